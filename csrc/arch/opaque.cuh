// Values the compiler shall keep rather than compute again.
#pragma once

#include <cstdint>

namespace pagedkern {

static __device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm("" : "+r"(x));
  return x;
}

}  // namespace pagedkern
