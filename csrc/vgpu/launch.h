// The C++ interface of the virtual GPU: what the Python module and the runtime shim call.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "vgpu/counters.h"
#include "vgpu/export.h"
#include "vgpu/fault.h"
#include "vgpu/memory.h"
#include "vgpu/program.h"

namespace pagedkern::vgpu {

enum class AsyncCompletion : u8 { kEarly, kLate, kRandom };

struct LaunchOptions {
  u64 seed = 0;
  AsyncCompletion async_completion = AsyncCompletion::kLate;
  bool check_uninitialized = true;
  bool check_races = true;         // in shared memory
  bool check_global_races = true;  // and in global memory
  bool check_barriers = true;      // divergent barriers, warps that left
  bool check_async = true;         // unfinished asynchronous operations, proxy fences
  bool counters = true;
  u64 max_warp_instructions = 0;  // 0: no limit; beyond it the launch is a "budget" fault
  int threads = 0;                // 0: all cores
};

struct LaunchConfig {
  Dim3 grid, block, cluster;
  u32 dynamic_shared_bytes = 0;
};

struct LaunchReport {
  std::string kernel;
  LaunchConfig config;
  Counters counters;
  double seconds = 0;
  std::vector<u64> executed;  // by pc: warp instructions
};

// Device limits of an H200.
struct DeviceLimits {
  static constexpr u32 kMaxThreads = 1024, kMaxSharedBytes = 227 * 1024, kMaxClusterBlocks = 16;
  static constexpr u32 kMultiprocessors = 132, kMaxGridX = 0x7fffffff, kMaxGridYZ = 65535;
};

// `params` is the kernel's parameter buffer, laid out by Kernel::params. Throws LaunchError or KernelFault.
PAGEDKERN_VGPU_API LaunchReport launch(const Kernel& kernel, const LaunchConfig& config, const std::vector<u8>& params,
                                       GlobalMemory& memory, const LaunchOptions& options);

// Process-wide: how often each form (Form::index) was executed by any launch, for the coverage table.
PAGEDKERN_VGPU_API std::vector<u64> executed_forms();

}  // namespace pagedkern::vgpu
