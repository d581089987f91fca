#include <algorithm>

#include "common/launch.h"
#include "smoke/launcher.h"

namespace pagedkern {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 4;            // floats of a 16-byte access
constexpr int64_t kMaxBlocks = 1024;  // beyond it the threads loop

__global__ void __launch_bounds__(kThreads) smoke_add_kernel(const __grid_constant__ SmokeAddParams params) {
  const int64_t thread_idx = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t num_threads = static_cast<int64_t>(gridDim.x) * kThreads;
  const bool aligned = (reinterpret_cast<uintptr_t>(params.x) | reinterpret_cast<uintptr_t>(params.y)) % 16 == 0;
  const int64_t num_vectors = aligned ? params.num_elements / kVector : 0;
  for (int64_t i = thread_idx; i < num_vectors; i += num_threads) {
    const float4 x = reinterpret_cast<const float4*>(params.x)[i];
    float4 y = reinterpret_cast<float4*>(params.y)[i];
    y.x += params.alpha * x.x;
    y.y += params.alpha * x.y;
    y.z += params.alpha * x.z;
    y.w += params.alpha * x.w;
    reinterpret_cast<float4*>(params.y)[i] = y;
  }
  for (int64_t i = num_vectors * kVector + thread_idx; i < params.num_elements; i += num_threads) {
    params.y[i] += params.alpha * params.x[i];
  }
}

}  // namespace

Status launch_smoke_add(const SmokeAddParams& params, void* stream) {
  if (params.num_elements == 0) return {};
  const int64_t blocks = (params.num_elements + kThreads * kVector - 1) / (kThreads * kVector);
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(std::min(blocks, kMaxBlocks)));
  config.block = dim3(kThreads);
  return launch(smoke_add_kernel, config, params, static_cast<cudaStream_t>(stream));
}

}  // namespace pagedkern
