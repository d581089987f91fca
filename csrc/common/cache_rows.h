// What the rows of both caches allow a launcher, found on the host.
#pragma once

#include "common/access_width.h"
#include "common/paged_cache.h"

namespace pagedkern {

// What the starts of the caches' rows are multiples of.
inline AccessWidth cache_starts(DType dtype, const PagedCache& key_cache, const PagedCache& value_cache) {
  AccessWidth width;
  const int64_t size = size_of(dtype);
  for (const PagedCache* cache : {&key_cache, &value_cache}) {
    width.pointer(cache->data)
        .bytes(size * cache->stride_block)
        .bytes(size * cache->stride_token)
        .bytes(size * cache->stride_head);
  }
  return width;
}

// The widest access that takes whole rows of both caches apart.
template <class Params>
int cache_width(const Params& p) {
  return cache_starts(p.cache.dtype, p.key_cache, p.value_cache)
      .bytes(static_cast<int64_t>(size_of(p.cache.dtype)) * p.cache.head_dim)
      .width();
}

constexpr int64_t kMaxMergedRow = 1 << 20;  // elements

// Where the heads of a token lie end to end on every side and share a scale, they are one head.
template <class Params>
void merge_heads(Params& p) {
  const int64_t head_dim = p.cache.head_dim;
  const auto joined = [&](int64_t stride_head, const PagedCache& cache, const KvScale& scale) {
    return stride_head == head_dim && cache.stride_head == head_dim &&
           (scale.data == nullptr || scale.stride_head == 0);
  };
  if (!joined(p.key_stride_head, p.key_cache, p.k_scale) || !joined(p.value_stride_head, p.value_cache, p.v_scale)) {
    return;
  }
  if (head_dim * p.cache.num_kv_heads > kMaxMergedRow) return;
  p.cache.head_dim *= p.cache.num_kv_heads;
  p.cache.num_kv_heads = 1;
}

}  // namespace pagedkern
