// Four FP8 codes of a 32-bit word to float16. Taken apart inside the asm, so that the conversion itself selects the
// upper half.
#pragma once

#include <cstdint>

namespace pagedkern {

static __device__ __forceinline__ void e4m3x4_to_f16x4(uint32_t codes, uint32_t& low, uint32_t& high) {
  asm("{\n\t.reg .b16 first, second;\n\tmov.b32 {first, second}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, first;\n\t"
      "cvt.rn.f16x2.e4m3x2 %1, second;\n\t}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}

static __device__ __forceinline__ void e5m2x4_to_f16x4(uint32_t codes, uint32_t& low, uint32_t& high) {
  asm("{\n\t.reg .b16 first, second;\n\tmov.b32 {first, second}, %2;\n\tcvt.rn.f16x2.e5m2x2 %0, first;\n\t"
      "cvt.rn.f16x2.e5m2x2 %1, second;\n\t}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}

}  // namespace pagedkern
