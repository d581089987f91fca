// What an instantiation file instantiates.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "paged_prefill/bounds.h"
#include "paged_prefill/instances.h"
#include "paged_prefill/kernel.cuh"

namespace pagedkern {

template <DType kType, bool kFp8, int kDim>
Status launch_paged_prefill_instance(const PagedPrefillParams& params, void* stream) {
  using T = std::conditional_t<kType == DType::kBFloat16, __nv_bfloat16, __half>;
  LaunchConfig config;
  using Shared = PagedPrefillShared<kDim, kFp8>;
  const int64_t buckets = prefill_grid<kDim, kFp8>(params, device_multiprocessors(kMaxMultiprocessors));
  config.cluster = dim3(1u << params.cluster_log);
  config.grid =
      dim3(static_cast<unsigned>(std::min<int64_t>(buckets, INT32_MAX >> params.cluster_log)) << params.cluster_log);
  config.block = dim3(params.block_rows * kPrefillThreadsOfRow);
  config.shared_bytes = Shared::bytes(params.block_rows);
  config.most_shared_bytes = sizeof(Shared);
  config.dependent = true;
  return launch(paged_prefill_kernel<T, kFp8, kDim>, config, params, static_cast<cudaStream_t>(stream));
}

}  // namespace pagedkern
