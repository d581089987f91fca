// Attributes of kernels, and occupancy.
#include "vgpu/runtime/limits.h"
#include "vgpu/runtime/modules.h"

using namespace pagedkern::vgpu;
using namespace pagedkern::vgpu::runtime;

namespace {

cudaError_t unknown_function() {
  return fail(cudaErrorInvalidDeviceFunction, "no kernel is registered for it");
}

u32 threads_of(const Kernel& kernel) {
  const u64 bound = kernel.maxntid.x ? kernel.maxntid.count() : kernel.reqntid.x ? kernel.reqntid.count() : 1024;
  return u32(std::min<u64>(bound, DeviceLimits::kMaxThreads));
}

u32 blocks_of_launch(Function& function, const cudaLaunchConfig_t& config) {
  const dim3& b = config.blockDim;
  return blocks_per_multiprocessor(function.kernel(), b.x * b.y * b.z, config.dynamicSmemBytes);
}

}  // namespace

extern "C" {

cudaError_t cudaFuncSetAttribute(const void* symbol, enum cudaFuncAttribute attribute, int value) {
  Function* function = find_function(symbol);
  if (function == nullptr) return unknown_function();
  switch (attribute) {
    case cudaFuncAttributeMaxDynamicSharedMemorySize: {
      const u32 room = DeviceLimits::kMaxSharedBytes - static_shared_bytes(function->kernel());
      if (value < 0 || u32(value) > room) {
        return fail(cudaErrorInvalidValue, "kernel " + function->name + ": " + std::to_string(value) +
                                               " bytes of dynamic shared memory, a block has room for " +
                                               std::to_string(room));
      }
      function->max_dynamic_shared = value;
      return cudaSuccess;
    }
    case cudaFuncAttributeNonPortableClusterSizeAllowed: function->large_clusters = value != 0; return cudaSuccess;
    case cudaFuncAttributePreferredSharedMemoryCarveout:
    case cudaFuncAttributeClusterSchedulingPolicyPreference: return cudaSuccess;
    default: return fail(cudaErrorNotSupported, "function attribute " + std::to_string(attribute));
  }
}

cudaError_t cudaFuncSetCacheConfig(const void* symbol, enum cudaFuncCache) {
  return find_function(symbol) == nullptr ? unknown_function() : cudaSuccess;
}

// numRegs stays 0: ptxas assigns registers, and it did not run.
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* attributes, const void* symbol) {
  Function* function = find_function(symbol);
  if (function == nullptr) return unknown_function();
  const Kernel& kernel = function->kernel();
  *attributes = {};
  attributes->sharedSizeBytes = static_shared_bytes(kernel);
  attributes->localSizeBytes = kernel.local_bytes;
  attributes->maxThreadsPerBlock = int(threads_of(kernel));
  attributes->ptxVersion = 90;
  attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = int(dynamic_shared_limit(*function, kernel));
  attributes->preferredShmemCarveout = -1;
  attributes->clusterDimMustBeSet = kernel.reqnctapercluster.x != 0;
  if (kernel.reqnctapercluster.x != 0) {
    attributes->requiredClusterWidth = int(kernel.reqnctapercluster.x);
    attributes->requiredClusterHeight = int(kernel.reqnctapercluster.y);
    attributes->requiredClusterDepth = int(kernel.reqnctapercluster.z);
  }
  attributes->nonPortableClusterSizeAllowed = function->large_clusters;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* symbol, int threads,
                                                                   size_t shared_bytes, unsigned) {
  Function* function = find_function(symbol);
  if (function == nullptr) return unknown_function();
  if (threads <= 0) return fail(cudaErrorInvalidValue, "block size " + std::to_string(threads));
  *blocks = int(blocks_per_multiprocessor(function->kernel(), u32(threads), shared_bytes));
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* symbol, int threads,
                                                          size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, symbol, threads, shared_bytes, 0);
}

cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* symbol, const cudaLaunchConfig_t* config) {
  Function* function = find_function(symbol);
  if (function == nullptr) return unknown_function();
  u32 size = 1;
  for (unsigned k = 0; k < config->numAttrs; ++k) {
    if (config->attrs[k].id != cudaLaunchAttributeClusterDimension) continue;
    const auto& dim = config->attrs[k].val.clusterDim;
    size = dim.x * dim.y * dim.z;
  }
  if (size == 0 || size > DeviceLimits::kMaxClusterBlocks) {
    return fail(cudaErrorInvalidClusterSize, "a cluster of " + std::to_string(size) + " blocks");
  }
  *clusters = int(blocks_of_launch(*function, *config) * DeviceLimits::kMultiprocessors / size);
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxPotentialClusterSize(int* size, const void* symbol, const cudaLaunchConfig_t* config) {
  Function* function = find_function(symbol);
  if (function == nullptr) return unknown_function();
  const u32 largest = function->large_clusters ? DeviceLimits::kMaxClusterBlocks : kPortableClusterBlocks;
  *size = blocks_of_launch(*function, *config) == 0 ? 0 : int(largest);
  return cudaSuccess;
}

}  // extern "C"
