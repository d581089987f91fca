// The device between launches: memory that was allocated on it, how the launches of a thread run, and what they did.
// One instance serves a process: the Python module sets it up, the runtime in place of cudart launches through it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "vgpu/export.h"
#include "vgpu/launch.h"
#include "vgpu/tma_map.h"

namespace pagedkern::vgpu {

struct FinishedLaunch {
  std::shared_ptr<const Program> program;
  const Kernel* kernel;
  LaunchReport report;
};

// ---- settings of the calling thread's launches

// How launches of this thread run from here on, and whether their reports are kept; nullptr: defaults, reports dropped.
PAGEDKERN_VGPU_API void set_thread_options(const LaunchOptions* options);

// The reports kept since the last call, in order.
PAGEDKERN_VGPU_API std::vector<FinishedLaunch> take_thread_reports();

// ---- memory

// Memory of the device, 256-byte aligned; reading what nothing wrote is a fault, as is using it after it was released.
PAGEDKERN_VGPU_API void* device_allocate(u64 bytes);
PAGEDKERN_VGPU_API bool device_release(void* pointer);             // false: not allocated here
PAGEDKERN_VGPU_API bool device_owns(const void* pointer);          // or granted to this thread
PAGEDKERN_VGPU_API void device_written(void* pointer, u64 bytes);  // by the host

// Host memory that launches of this thread may use for as long as the grant is held. Nothing for zero bytes.
using MemoryGrant = std::shared_ptr<void>;
PAGEDKERN_VGPU_API MemoryGrant grant_memory(const void* pointer, u64 bytes, const std::string& name);

struct HostRange {
  u64 base, bytes;
  std::string name;
};

// What is granted to this thread now.
std::vector<HostRange> granted_memory();

// ---- launches

// Runs a kernel over the device's memory and this thread's grants. Throws LaunchError or KernelFault.
PAGEDKERN_VGPU_API void device_launch(const std::shared_ptr<const Program>& program, const Kernel& kernel,
                                      const LaunchConfig& config, const std::vector<u8>& params);

// ---- tensor maps

// Fills the 128 bytes; where the driver would refuse the map: what is wrong, and nothing is filled.
PAGEDKERN_VGPU_API std::string make_tensor_map(const TensorMap& map, u8* bytes);

}  // namespace pagedkern::vgpu
