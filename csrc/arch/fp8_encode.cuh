// Conversion to FP8 by the instructions there are for it.
#pragma once

#include <cstdint>

namespace pagedkern {

// Two float32 to two codes, `low` in the low byte: round to nearest even, saturating, NaN to 0x7F, as common/fp8.h.
static __device__ __forceinline__ uint16_t f32x2_to_e4m3x2(float low, float high) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
static __device__ __forceinline__ uint16_t f32x2_to_e5m2x2(float low, float high) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

}  // namespace pagedkern
