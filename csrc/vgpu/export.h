// What the executor's shared library (pagedkern/libpagedkern_vgpu.so) gives to those linked with it; all else is
// hidden.
#pragma once

#define PAGEDKERN_VGPU_API __attribute__((visibility("default")))
