// How the memory-bound ops split their work over the pool.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"

namespace pagedkern::cpu {

// Waking a thread costs as much as moving this much.
constexpr int64_t kBytesPerThread = 128 << 10;

// Runs body(begin, end) over [0, units); `bytes` is what all of them move together. Small calls stay on the caller's
// thread and never touch the pool.
template <class Body>
void share_work(const ThreadPool& pool, int64_t units, int64_t bytes, const Body& body) {
  if (units <= 0) return;
  if (units == 1 || pool.num_threads <= 1 || bytes < 2 * kBytesPerThread) {
    body(0, units);
    return;
  }
  const int64_t bytes_per_unit = bytes / units > 0 ? bytes / units : 1;
  pool.parallel_for(units, (kBytesPerThread + bytes_per_unit - 1) / bytes_per_unit, body);
}

}  // namespace pagedkern::cpu
