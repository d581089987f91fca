// Launches of rope_reshape_and_cache for one type of query, key and value.
#pragma once

#include "cache_write/launcher.cuh"
#include "cache_write/launcher.h"
#include "cache_write/rope_kernel.cuh"

namespace pagedkern {

Status launch_rope_bfloat16(const RopeKernelParams& params, void* stream);
Status launch_rope_float16(const RopeKernelParams& params, void* stream);

template <class T, class Code, int kCount>
Status launch_rope_kernel(RopeKernelParams p, void* stream) {
  constexpr int64_t kWarps = CacheWriteConfig::kThreads / 32;
  const int units = p.cache.head_dim / (2 * kCount);
  p.lanes_of_row = 2;  // two lanes trade
  while (p.lanes_of_row < 32 && p.lanes_of_row < units) p.lanes_of_row *= 2;
  // Few tokens: all warps of a block together, so that a token is soon done. Many: a warp each, which loads its cosines
  // and sines once.
  p.warps_of_token = 1;
  while (p.warps_of_token < kWarps && p.num_slots * p.warps_of_token < kWarps * CacheWriteConfig::kMaxBlocks) {
    p.warps_of_token *= 2;
  }
  const LaunchConfig config = team_grid(p, 32 * p.warps_of_token);
  return launch(rope_reshape_and_cache_kernel<T, Code, kCount>, config, p, static_cast<cudaStream_t>(stream));
}

// Whether every run of 8 elements is one aligned access.
inline bool takes_vectors(const RopeKernelParams& p) {
  AccessWidth width;
  add_rows(width, p.rope.query, p.rope.query_stride_token, p.rope.query_stride_head);
  const int64_t table = size_of(p.rope.cos_sin_dtype);
  width.pointer(p.rope.cos_sin_cache).bytes(table * p.rope.cos_sin_stride).bytes(table * (p.rope.rotary_dim / 2));
  return width.width() == 16 && source_width(p) == 16 && cache_width(p) == 16 && p.cache.head_dim % 16 == 0 &&
         p.rope.rotary_dim % 16 == 0;
}

template <class T, class Code>
Status launch_rope_code(const RopeKernelParams& p, void* stream) {
  return takes_vectors(p) ? launch_rope_kernel<T, Code, 8>(p, stream) : launch_rope_kernel<T, Code, 1>(p, stream);
}

template <class T>
Status launch_rope(const RopeKernelParams& p, void* stream) {
  switch (p.cache.dtype) {
    case DType::kFloat8E4M3: return launch_rope_code<T, QuantizeCode<E4M3>>(p, stream);
    case DType::kFloat8E5M2: return launch_rope_code<T, QuantizeCode<E5M2>>(p, stream);
    default: return launch_rope_code<T, CopyCode>(p, stream);
  }
}

}  // namespace pagedkern
