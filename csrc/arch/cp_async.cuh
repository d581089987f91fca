// cp.async: global to shared memory without registers in between.
#pragma once

#include <cstdint>

namespace pagedkern {

// kBytes (16, 8 or 4) to shared memory, the first source_bytes of them from `source` and zeros behind them. With 0
// nothing is read. 16-byte copies pass by the first-level cache.
template <int kBytes>
static __device__ __forceinline__ void cp_async(uint32_t shared, const void* source, int source_bytes) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(source), "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(source), "n"(kBytes),
                 "r"(source_bytes)
                 : "memory");
  }
}

static __device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until all but the latest kPending committed groups of this thread have arrived; others see them after a barrier.
template <int kPending>
static __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace pagedkern
