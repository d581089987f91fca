// How kernels see the paged cache and its scales. Strides are in elements and 64-bit everywhere:
// every layout (NHD, HND, [N, 2, ...], K beside V) is only a set of strides.
#pragma once

#include <cstdint>

#include "common/dtypes.h"

#if defined(__CUDACC__)
#define PAGEDKERN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PAGEDKERN_HOST_DEVICE inline
#endif

namespace pagedkern {

// One of key_cache and value_cache: [num_blocks, block_size, num_kv_heads, head_dim], last dim contiguous.
struct PagedCache {
  void* data;            // element (0, 0, 0, 0)
  int64_t stride_block;  // elements
  int64_t stride_token;  // elements
  int64_t stride_head;   // elements

  // Offset in elements of the row of (block, token in block, head): the one place paged addresses are made.
  PAGEDKERN_HOST_DEVICE int64_t offset(int64_t block, int64_t token, int64_t head) const {
    return block * stride_block + token * stride_token + head * stride_head;
  }
};

// k_scale or v_scale, float32. One rule serves every kind: per tensor has all strides 0, per head has
// stride_head only, per token and head has all three. data == nullptr means 1.
struct KvScale {
  float* data;
  int64_t stride_block;  // elements
  int64_t stride_token;  // elements
  int64_t stride_head;   // elements

  PAGEDKERN_HOST_DEVICE int64_t offset(int64_t block, int64_t token, int64_t head) const {
    return block * stride_block + token * stride_token + head * stride_head;
  }
  PAGEDKERN_HOST_DEVICE bool per_token() const { return stride_block != 0 || stride_token != 0; }
};

// What key_cache and value_cache share.
struct PagedCacheShape {
  int64_t num_blocks;
  int64_t block_size;  // tokens in a block
  int32_t num_kv_heads;
  int32_t head_dim;
  DType dtype;
};

}  // namespace pagedkern
