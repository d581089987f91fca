// The one way to launch a kernel: shared memory attribute, cluster, programmatic dependent launch and the error check.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>

#include "common/status.h"

namespace pagedkern {

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;       // dynamic shared memory of a block
  size_t most_shared_bytes = 0;  // of any launch of this kernel, where launches differ: threads may launch at once
  dim3 cluster = dim3(1, 1, 1);
  // Lets the kernel start while its predecessor on the stream drains; it must then call cudaGridDependencySynchronize()
  // before its first read of what the predecessor wrote.
  bool dependent = false;
};

inline Status to_status(cudaError_t error) {
  return error == cudaSuccess ? Status{} : Status{cudaGetErrorString(error)};
}

// Of the current device, `most` at most, and where that cannot be told.
inline int device_multiprocessors(int most) {
  int device = 0, count = 0;
  const bool known = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
  return known && count < most ? count : most;
}

// Above this a block needs the opt-in attribute.
constexpr size_t kDefaultSharedBytes = 48 * 1024;

template <class Params>
Status launch(void (*kernel)(Params), const LaunchConfig& config, const Params& params, cudaStream_t stream) {
  const size_t most_shared = std::max(config.shared_bytes, config.most_shared_bytes);
  if (most_shared > kDefaultSharedBytes) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most_shared));
    if (error != cudaSuccess) return to_status(error);
  }
  cudaLaunchAttribute attributes[2];
  unsigned num_attributes = 0;
  if (config.cluster.x * config.cluster.y * config.cluster.z > 1) {
    attributes[num_attributes].id = cudaLaunchAttributeClusterDimension;
    attributes[num_attributes].val.clusterDim = {config.cluster.x, config.cluster.y, config.cluster.z};
    ++num_attributes;
  }
  if (config.dependent) {
    attributes[num_attributes].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[num_attributes].val.programmaticStreamSerializationAllowed = 1;
    ++num_attributes;
  }
  cudaLaunchConfig_t cuda_config = {};
  cuda_config.gridDim = config.grid;
  cuda_config.blockDim = config.block;
  cuda_config.dynamicSmemBytes = config.shared_bytes;
  cuda_config.stream = stream;
  cuda_config.attrs = attributes;
  cuda_config.numAttrs = num_attributes;
  return to_status(cudaLaunchKernelEx(&cuda_config, kernel, params));
}

}  // namespace pagedkern
