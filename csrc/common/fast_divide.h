// Division by a number the host knows, as a multiplication.
#pragma once

#include <cstdint>

#include "common/paged_cache.h"

namespace pagedkern {

// n / divisor for 0 <= n < 2^31 and 1 <= divisor < 2^31.
struct FastDivide {
  uint32_t divisor = 1;
  uint32_t multiplier = 1;
  uint32_t shift = 0;

  FastDivide() = default;
  explicit FastDivide(uint32_t d) : divisor(d) {
    while ((uint64_t{1} << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - d) << 32) / d + 1);
  }

  PAGEDKERN_HOST_DEVICE uint32_t operator()(uint32_t n) const {
#if defined(__CUDA_ARCH__)
    return (__umulhi(n, multiplier) + n) >> shift;
#else
    return static_cast<uint32_t>((static_cast<uint64_t>(n) * multiplier >> 32) + n) >> shift;
#endif
  }
};

}  // namespace pagedkern
