// reshape_and_cache: rows of key and value to their slots, copied, or divided by their scale and rounded to FP8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cache_write/config.h"
#include "cache_write/params.h"
#include "common/fp8.h"
#include "common/vectors.cuh"

namespace pagedkern {

static __device__ __forceinline__ int64_t load_slot(const CacheWriteParams& p, int64_t token) {
  const int64_t offset = token * p.slot_stride;
  return p.slot_is_int32 ? static_cast<const int32_t*>(p.slot_mapping)[offset]
                         : static_cast<const int64_t*>(p.slot_mapping)[offset];
}

static __device__ __forceinline__ float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
static __device__ __forceinline__ float to_float(__half x) {
  return __half2float(x);
}

// Bytes as they are, kBytes at a time.
template <int kBytes>
struct CopyRow {
  using Vector = typename Access<kBytes>::Type;
  static constexpr int kElements = kBytes / 2;
  using Source = uint16_t;
  using Target = uint16_t;

  static __device__ __forceinline__ void store(const Source* source, Target* target, float) {
    *reinterpret_cast<Vector*>(target) = *reinterpret_cast<const Vector*>(source);
  }
};

// stored = saturate(x / scale), one IEEE division per element.
template <class T, class Format, int kCount>
struct QuantizeRow {
  static constexpr int kElements = kCount;
  using Source = T;
  using Target = uint8_t;

  static __device__ __forceinline__ void store(const Source* source, Target* target, float scale) {
    alignas(kCount * sizeof(T)) Source x[kCount];
    alignas(kCount) Target y[kCount];
    using In = typename Access<kCount * sizeof(T)>::Type;
    using Out = typename Access<kCount>::Type;
    *reinterpret_cast<In*>(x) = *reinterpret_cast<const In*>(source);
#pragma unroll
    for (int i = 0; i < kCount; ++i) y[i] = encode_fp8<Format>(__fdiv_rn(to_float(x[i]), scale));
    *reinterpret_cast<Out*>(target) = *reinterpret_cast<const Out*>(y);
  }
};

static __device__ __forceinline__ float load_scale(const KvScale& scale, int64_t block, int64_t offset, int head) {
  return scale.data == nullptr ? 1.0f : scale.data[scale.offset(block, offset, head)];
}

// One row set, key or value, of one token. Each thread has the same elements of every token, so that of two tokens
// with one slot the later overwrites the earlier whole.
template <class Row>
static __device__ __forceinline__ void write_token(const void* source, int64_t stride_token, int64_t stride_head,
                                                   const PagedCache& cache, const KvScale& scale,
                                                   const CacheWriteParams& p, int64_t token, int64_t block,
                                                   int64_t offset) {
  const int per_head = p.cache.head_dim / Row::kElements;
  const int total = per_head * p.cache.num_kv_heads;
  const auto* rows = static_cast<const typename Row::Source*>(source) + token * stride_token;
#pragma unroll 2  // four at a time spill the narrowest copy's addresses
  for (int i = threadIdx.x; i < total; i += CacheWriteConfig::kThreads) {
    const int head = i / per_head;
    const int element = (i - head * per_head) * Row::kElements;
    auto* target = static_cast<typename Row::Target*>(cache.data) + cache.offset(block, offset, head) + element;
    Row::store(rows + head * stride_head + element, target, load_scale(scale, block, offset, head));
  }
}

// grid [min(num_slots, kMaxBlocks)]. A block owns the slots congruent to its index, so that tokens with one slot meet
// in one block and go in order. It reads the mapping kThreads entries at a time and lists its own in order.
template <class Row>
__global__ void __launch_bounds__(CacheWriteConfig::kThreads)
    reshape_and_cache_kernel(const __grid_constant__ CacheWriteParams p) {
  constexpr int kThreads = CacheWriteConfig::kThreads;
  constexpr int kWarps = kThreads / 32;
  __shared__ int64_t s_slot[kThreads];
  __shared__ int s_token[kThreads];  // relative to the chunk
  __shared__ int s_count[kWarps];
  const int64_t num_cache_slots = p.cache.num_blocks * p.cache.block_size;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  for (int64_t chunk = 0; chunk < p.num_slots; chunk += kThreads) {
    const int64_t token = chunk + threadIdx.x;
    const int64_t slot = token < p.num_slots ? load_slot(p, token) : -1;
    const bool mine = slot >= 0 && slot < num_cache_slots && slot % gridDim.x == blockIdx.x;
    const unsigned ballot = __ballot_sync(0xFFFFFFFFu, mine);
    if (lane == 0) s_count[warp] = __popc(ballot);
    __syncthreads();
    int place = __popc(ballot & ((1u << lane) - 1));
    int count = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) place += s_count[w];
      count += s_count[w];
    }
    if (mine) {
      s_slot[place] = slot;
      s_token[place] = threadIdx.x;
    }
    __syncthreads();
    for (int i = 0; i < count; ++i) {
      const int64_t block = s_slot[i] / p.cache.block_size;
      const int64_t offset = s_slot[i] - block * p.cache.block_size;
      const int64_t source = chunk + s_token[i];
      write_token<Row>(p.key, p.key_stride_token, p.key_stride_head, p.key_cache, p.k_scale, p, source, block, offset);
      write_token<Row>(p.value, p.value_stride_token, p.value_stride_head, p.value_cache, p.v_scale, p, source, block,
                       offset);
    }
    __syncthreads();  // the lists are rewritten by the next chunk
  }
}

}  // namespace pagedkern
