// What an instantiation file instantiates.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "paged_prefill/instances.h"
#include "paged_prefill/kernel.cuh"

namespace pagedkern {

constexpr int64_t kMaxGrid = INT32_MAX;  // blocks loop beyond it

template <DType kType, bool kFp8, int kDim>
Status launch_paged_prefill_instance(const PagedPrefillParams& params, void* stream) {
  using T = std::conditional_t<kType == DType::kBFloat16, __nv_bfloat16, __half>;
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(std::min(params.num_tiles * params.op.cache.num_kv_heads, kMaxGrid)));
  config.block = dim3(PagedPrefillConfig<kDim, kFp8>::kThreads);
  config.shared_bytes = sizeof(PagedPrefillShared<kDim, kFp8>);
  return launch(paged_prefill_kernel<T, kFp8, kDim>, config, params, static_cast<cudaStream_t>(stream));
}

}  // namespace pagedkern
