// What an H200 allows, for launches, attributes and occupancy alike.
#pragma once

#include <algorithm>

#include "vgpu/launch.h"
#include "vgpu/runtime/modules.h"

namespace pagedkern::vgpu::runtime {

constexpr u32 kDefaultSharedBytes = 48 * 1024;  // of a block without the opt-in attribute
constexpr u32 kSharedBytesOfMultiprocessor = 228 * 1024;
constexpr u32 kReservedSharedBytes = 1024;  // of every resident block
constexpr u32 kPortableClusterBlocks = 8;
constexpr u32 kThreadsOfMultiprocessor = 2048, kBlocksOfMultiprocessor = 32, kRegisters = 65536;

inline u32 static_shared_bytes(const Kernel& kernel) {
  return kernel.shared_dynamic_offset - kSharedBase;
}

// Dynamic shared memory a launch of the kernel may ask for.
inline u32 dynamic_shared_limit(const Function& function, const Kernel& kernel) {
  if (function.max_dynamic_shared >= 0) return u32(function.max_dynamic_shared);
  return kDefaultSharedBytes - std::min(kDefaultSharedBytes, static_shared_bytes(kernel));
}

// Resident blocks by threads and shared memory. Registers are not known (ptxas assigns them), but where the kernel has
// a .maxnreg that bound is taken.
inline u32 blocks_per_multiprocessor(const Kernel& kernel, u32 threads, size_t dynamic_shared_bytes) {
  const u32 warps = (threads + 31) / 32;
  if (warps == 0 || threads > DeviceLimits::kMaxThreads) return 0;
  const size_t shared = static_shared_bytes(kernel) + dynamic_shared_bytes;
  if (shared > DeviceLimits::kMaxSharedBytes) return 0;
  u32 blocks = std::min(kBlocksOfMultiprocessor, kThreadsOfMultiprocessor / (32 * warps));
  blocks = std::min(blocks, u32(kSharedBytesOfMultiprocessor / (shared + kReservedSharedBytes)));
  if (kernel.maxnreg != 0) blocks = std::min(blocks, kRegisters / (kernel.maxnreg * 32 * warps));
  return blocks;
}

}  // namespace pagedkern::vgpu::runtime
