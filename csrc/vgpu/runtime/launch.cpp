// Launches: what <<<>>>, cudaLaunchKernel and cudaLaunchKernelEx arrive as. A refused launch is an error code, as on a
// GPU; a fault of the kernel leaves the call as a pagedkern::vgpu::KernelFault.
#include <cstring>
#include <vector>

#include "vgpu/device.h"
#include "vgpu/runtime/graphs.h"
#include "vgpu/runtime/limits.h"
#include "vgpu/runtime/modules.h"

namespace pagedkern::vgpu::runtime {
namespace {

struct Call {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
  Dim3 cluster{0, 0, 0};  // 0: not given
  bool cooperative = false;
};

struct Pushed {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};

std::vector<Pushed>& pushed() {
  thread_local std::vector<Pushed> stack;
  return stack;
}

Dim3 to_dim(const dim3& d) {
  return {d.x, d.y, d.z};
}

// What the driver looks at before the executor's own checks, which know no attributes.
cudaError_t check_attributes(const Function& function, const Kernel& kernel, const Call& call, const Dim3& cluster) {
  const size_t allowed = dynamic_shared_limit(function, kernel);
  if (call.shared_bytes > allowed) {
    return fail(cudaErrorInvalidValue, "kernel " + kernel.name + ": " + std::to_string(call.shared_bytes) +
                                           " bytes of dynamic shared memory, allowed are " + std::to_string(allowed) +
                                           " (cudaFuncAttributeMaxDynamicSharedMemorySize)");
  }
  if (cluster.count() > kPortableClusterBlocks && !function.large_clusters) {
    return fail(cudaErrorInvalidClusterSize, "kernel " + kernel.name + ": a cluster of " +
                                                 std::to_string(cluster.count()) +
                                                 " blocks needs cudaFuncAttributeNonPortableClusterSizeAllowed");
  }
  const u64 blocks = u64(call.grid.x) * call.grid.y * call.grid.z;
  const u64 resident = u64(DeviceLimits::kMultiprocessors) *
                       blocks_per_multiprocessor(kernel, u32(to_dim(call.block).count()), call.shared_bytes);
  if (call.cooperative && blocks > resident) {
    return fail(cudaErrorCooperativeLaunchTooLarge, "kernel " + kernel.name + ": " + std::to_string(blocks) +
                                                        " blocks, resident at once are " + std::to_string(resident));
  }
  const bool divides = cluster.x && cluster.y && cluster.z && call.grid.x % cluster.x == 0 &&
                       call.grid.y % cluster.y == 0 && call.grid.z % cluster.z == 0;
  if (!divides)
    return fail(cudaErrorInvalidClusterSize, "kernel " + kernel.name + ": a cluster that does not divide the grid");
  return cudaSuccess;
}

cudaError_t run(const void* symbol, const Call& call, void** args) {
  Function* function = find_function(symbol);
  if (function == nullptr) return fail(cudaErrorInvalidDeviceFunction, "no kernel is registered for it");
  const std::shared_ptr<const Program> program = function->module->program();
  const Kernel& kernel = program->kernel(function->name);
  const Dim3 required = kernel.reqnctapercluster.x ? kernel.reqnctapercluster : Dim3{};
  const Dim3 cluster = call.cluster.x ? call.cluster : required;
  const cudaError_t refused = check_attributes(*function, kernel, call, cluster);
  if (refused != cudaSuccess) return refused;
  std::vector<u8> params(kernel.param_bytes);
  for (size_t k = 0; k < kernel.params.size(); ++k) {
    std::memcpy(params.data() + kernel.params[k].offset, args[k], kernel.params[k].bytes);
  }
  const LaunchConfig config{to_dim(call.grid), to_dim(call.block), cluster, u32(call.shared_bytes)};
  return enqueue(call.stream, [program, &kernel, config, params] { device_launch(program, kernel, config, params); });
}

// False: an attribute this runtime does not know.
bool apply(const cudaLaunchAttribute& attribute, Call& call) {
  switch (attribute.id) {
    case cudaLaunchAttributeClusterDimension:
      call.cluster = {attribute.val.clusterDim.x, attribute.val.clusterDim.y, attribute.val.clusterDim.z};
      return true;
    case cudaLaunchAttributeCooperative: call.cooperative = attribute.val.cooperative != 0; return true;
    // Launches run one after another, so that order and preferences hold of themselves.
    case cudaLaunchAttributeIgnore:
    case cudaLaunchAttributeAccessPolicyWindow:
    case cudaLaunchAttributeClusterSchedulingPolicyPreference:
    case cudaLaunchAttributeProgrammaticStreamSerialization:
    case cudaLaunchAttributePriority:
    case cudaLaunchAttributeMemSyncDomainMap:
    case cudaLaunchAttributeMemSyncDomain:
    case cudaLaunchAttributePreferredClusterDimension:
    case cudaLaunchAttributePreferredSharedMemoryCarveout: return true;
    default: return false;
  }
}

}  // namespace
}  // namespace pagedkern::vgpu::runtime

using namespace pagedkern::vgpu::runtime;

extern "C" {

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, struct CUstream_st* stream) {
  pushed().push_back({grid, block, shared_bytes, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  if (pushed().empty()) return fail(cudaErrorInvalidConfiguration, "no launch configuration was pushed");
  const Pushed top = pushed().back();
  pushed().pop_back();
  *grid = top.grid;
  *block = top.block;
  *shared_bytes = top.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = top.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  Function* function = find_function(stub);
  if (function == nullptr) return fail(cudaErrorInvalidDeviceFunction, "no kernel is registered for it");
  *kernel = reinterpret_cast<cudaKernel_t>(function);
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t shared_bytes,
                               cudaStream_t stream) {
  return run(kernel, {grid, block, shared_bytes, stream}, args);
}

cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t shared_bytes,
                                    cudaStream_t stream) {
  return run(kernel, {grid, block, shared_bytes, stream}, args);
}

cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** args, size_t shared_bytes,
                             cudaStream_t stream) {
  return run(stub, {grid, block, shared_bytes, stream}, args);
}

cudaError_t cudaLaunchCooperativeKernel(const void* stub, dim3 grid, dim3 block, void** args, size_t shared_bytes,
                                        cudaStream_t stream) {
  const Call call{.grid = grid, .block = block, .shared_bytes = shared_bytes, .stream = stream, .cooperative = true};
  return run(stub, call, args);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* stub, void** args) {
  Call call{config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream};
  for (unsigned k = 0; k < config->numAttrs; ++k) {
    if (apply(config->attrs[k], call)) continue;
    return fail(cudaErrorNotSupported, "launch attribute " + std::to_string(config->attrs[k].id));
  }
  return run(stub, call, args);
}

}  // extern "C"
