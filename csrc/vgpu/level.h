// Family files are compiled once per SIMD level, everything in them inside namespace
// pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL (generic with the baseline's flags; avx2 with -mavx2 -mfma -mf16c -mbmi2
// -mpopcnt). The registry picks one at start.
#pragma once

#ifndef PAGEDKERN_VGPU_LEVEL
#define PAGEDKERN_VGPU_LEVEL generic
#endif
