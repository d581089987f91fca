// Launches one kernel of a dtype and head_dim. Included by instantiations/ only.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "paged_decode/instances.h"
#include "paged_decode/kernel.cuh"

namespace pagedkern {

// head_dims that are no multiple of 64 apart from 96 are padded to one of these in the general kernel.
constexpr bool has_general_decode(int dim) {
  return dim == 64 || dim == 128 || dim == 256;
}

// Calls `use` with the config of the kernel. The general kernel has tiles of 16 rows only.
template <DType kCache, int kDim, class Use>
auto with_decode_config(int rows, bool general, Use use) {
  if constexpr (has_general_decode(kDim)) {
    if (general) return use(PagedDecodeConfig<kCache, kDim, 16, true>());
  }
  return rows == 8 ? use(PagedDecodeConfig<kCache, kDim, 8, false>())
                   : use(PagedDecodeConfig<kCache, kDim, 16, false>());
}

// The grid has a constant shape for given bounds, whatever the lengths: as many blocks as the device holds at once.
template <class Config>
int64_t decode_grid(const PagedDecodeParams& p) {
  const int64_t resident = device_multiprocessors(kMaxMultiprocessors) * Config::kBlocksPerMultiprocessor;
  const int64_t tiles = std::max<int64_t>(1, ceil_div<int64_t>(p.op.max_seqlen_k, Config::kTileKeys));
  const int64_t pieces = p.op.num_splits > 0 ? std::min<int64_t>(tiles, p.op.num_splits) : tiles;
  return std::min(resident, p.op.num_tokens * p.op.cache.num_kv_heads * pieces);
}

template <DType kCache, int kDim>
Status launch_paged_decode_instance(const PagedDecodeParams& params, int rows, bool general, void* stream) {
  return with_decode_config<kCache, kDim>(rows, general, [&](auto c) {
    using Config = decltype(c);
    constexpr size_t kBytes = sizeof(PagedDecodeShared<Config>);
    static_assert(kBytes <=
                  kSharedBytesOfMultiprocessor / Config::kBlocksPerMultiprocessor - kReservedSharedBytesOfBlock);
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(decode_grid<Config>(params)));
    config.block = dim3(Config::kThreads);
    config.shared_bytes = kBytes;
    config.dependent = true;
    return launch(paged_decode_kernel<Config>, config, params, static_cast<cudaStream_t>(stream));
  });
}

#define PAGEDKERN_PAGED_DECODE(cache, dim) \
  template Status launch_paged_decode_instance<DType::cache, dim>(const PagedDecodeParams&, int, bool, void*);

}  // namespace pagedkern
