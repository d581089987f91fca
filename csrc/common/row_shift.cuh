// bfloat16 queries over FP8 keys, which are multiplied in float16.
#pragma once

#include <cstdint>

#include "arch/convert.cuh"

namespace pagedkern {

// A row is brought by a power of two to where its greatest element is below 2^15, which keeps every element of more
// than 2^-29 of that exactly.
struct RowShift {
  float up;
  float down;
  static __device__ __forceinline__ RowShift of(uint32_t greatest_bits) {
    const int exponent = static_cast<int>(greatest_bits >> 7);
    if (exponent == 255 || greatest_bits == 0) return {1.0f, 1.0f};
    const int shift = min(141 - exponent, 126);
    return {__int_as_float((127 + shift) << 23), __int_as_float((127 - shift) << 23)};
  }
};

// Of eight elements, without their signs.
static __device__ __forceinline__ uint32_t greatest_bits(uint4 x) {
  uint32_t greatest = 0;
  for (const uint32_t pair : {x.x, x.y, x.z, x.w}) greatest = max(greatest, max(pair & 0x7FFF, pair >> 16 & 0x7FFF));
  return greatest;
}

static __device__ __forceinline__ uint32_t shifted_to_half(uint32_t pair, float up) {
  return pack2<__half>(__uint_as_float(pair << 16) * up, __uint_as_float(pair & 0xFFFF0000u) * up);
}
static __device__ __forceinline__ uint4 shifted_to_half(uint4 x, float up) {
  return make_uint4(shifted_to_half(x.x, up), shifted_to_half(x.y, up), shifted_to_half(x.z, up),
                    shifted_to_half(x.w, up));
}

}  // namespace pagedkern
