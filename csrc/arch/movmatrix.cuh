// movmatrix: an 8 x 8 matrix of 16-bit elements, spread over a warp as in mma.sync, transposed.
#pragma once

#include <cstdint>

namespace pagedkern {

static __device__ __forceinline__ uint32_t movmatrix_trans(uint32_t pair) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

}  // namespace pagedkern
