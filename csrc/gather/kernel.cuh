// gather_cache: rows of the cache to rows of key and value, copied, or from FP8 times their scale.
#pragma once

#include "common/elements.cuh"
#include "common/fast_divide.h"
#include "gather/config.h"
#include "gather/params.h"

namespace pagedkern {

struct GatherKernelParams : GatherCacheParams {
  int32_t block_tokens;      // tokens that a block of threads takes at a time
  FastDivide chunks_of_row;  // heads that lie end to end everywhere are one row (num_kv_heads is then 1)
  FastDivide heads;
  bool trade;  // chunks of a row are in pairs, so that neighbouring lanes can trade halves of theirs
};

// Elements as they are.
template <int kCount>
struct CopyChunk {
  static constexpr int kElements = kCount;
  using Source = uint16_t;
  using Target = uint16_t;
  using Data = Chunk<uint16_t, kCount>;

  static __device__ __forceinline__ void store(const Data& data, Target* target, float, bool, bool write) {
    if (write) data.store(target);
  }
};

// stored * scale in float32, rounded once. 16 codes become two accesses: neighbouring lanes trade, so that together
// they write 32 neighbouring bytes at a time.
template <class T, class Format, int kCount>
struct DequantizeChunk {
  static constexpr int kElements = kCount;
  using Source = uint8_t;
  using Target = T;
  using Data = Codes<Format, kCount>;

  template <int kPart>
  static __device__ __forceinline__ void store_part(const Codes<Format, kPart>& codes, Target* target, float scale) {
    float x[kPart];
    codes.decode(x);
#pragma unroll
    for (int i = 0; i < kPart; ++i) x[i] *= scale;
    Chunk<T, kPart> out;
    out.set(x);
    out.store(target);
  }

  // All lanes of a warp call it; `write` and `scale` are the same for a pair of lanes that trades.
  static __device__ __forceinline__ void store(const Data& data, Target* target, float scale, bool trade, bool write) {
    if constexpr (kCount == 16) {
      const bool odd = trade && threadIdx.x % 2 != 0;
      Codes<Format, 8> low, high;
      low.vector[0] = {data.vector[0].x, data.vector[0].y};
      high.vector[0] = {data.vector[0].z, data.vector[0].w};
      if (trade) {
        const uint4 both = trade_halves(low.vector[0], high.vector[0], odd);
        low.vector[0] = {both.x, both.y};
        high.vector[0] = {both.z, both.w};
      }
      // The even lane has the low halves of both, the odd one the high halves.
      Target* const first = odd ? target - 8 : target;
      if (write) store_part<8>(low, first, scale);
      if (write) store_part<8>(high, first + (trade ? 16 : 8), scale);
    } else if (write) {
      store_part<kCount>(data, target, scale);
    }
  }
};

// Where the tokens of a block of threads are stored.
struct GatherPlaces {
  int64_t block[GatherConfig::kMaxTokens];  // -1: nowhere, the row stays as it is
  int64_t offset[GatherConfig::kMaxTokens];

  // Token `row` of the output, by the thread of that number.
  __device__ __forceinline__ void find(const GatherCacheParams& p, int64_t row) {
    int64_t low = 0, high = p.num_seqs;  // the last sequence that starts at or before the row
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (p.cu_seqlens[middle] <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int64_t token = row - p.cu_seqlens[low];
    const int64_t page = token / p.cache.block_size;
    int64_t found = -1;
    if (token >= 0 && token < p.seq_lens[low] && page < p.max_blocks) {
      found = p.block_table[low * p.block_table_stride + page];
    }
    block[threadIdx.x] = found < p.cache.num_blocks ? found : -1;
    offset[threadIdx.x] = token - page * p.cache.block_size;
  }
};

// Two parts of key and value a thread: four loads are in flight.
template <class Row>
static __device__ __forceinline__ void gather_tokens(const GatherKernelParams& p, const GatherPlaces& places,
                                                     int64_t first, int count) {
  constexpr int kUnroll = 2;
  const auto scale_at = [](const KvScale& scale, int64_t block, int64_t offset, int head) {
    return scale.data == nullptr ? 1.0f : scale.data[scale.offset(block, offset, head)];
  };
  const uint32_t total = count * p.heads.divisor * p.chunks_of_row.divisor, lane = threadIdx.x % 32;
  // Lanes of a warp go round together.
  for (uint32_t base = threadIdx.x - lane; base < total; base += GatherConfig::kThreads * kUnroll) {
    typename Row::Data key[kUnroll] = {}, value[kUnroll] = {};
    float k_scale[kUnroll] = {}, v_scale[kUnroll] = {};
    int token[kUnroll], head[kUnroll], element[kUnroll];
    bool live[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t i = base + lane + u * GatherConfig::kThreads;
      const uint32_t row = p.chunks_of_row(i);
      token[u] = static_cast<int>(p.heads(row));
      head[u] = static_cast<int>(row - token[u] * p.heads.divisor);
      element[u] = static_cast<int>(i - row * p.chunks_of_row.divisor) * Row::kElements;
      live[u] = i < total && places.block[token[u]] >= 0;
      if (!live[u]) continue;
      const int64_t block = places.block[token[u]], offset = places.offset[token[u]];
      using Source = const typename Row::Source*;
      key[u].load(static_cast<Source>(p.key_cache.data) + p.key_cache.offset(block, offset, head[u]) + element[u]);
      value[u].load(static_cast<Source>(p.value_cache.data) + p.value_cache.offset(block, offset, head[u]) +
                    element[u]);
      k_scale[u] = scale_at(p.k_scale, block, offset, head[u]);
      v_scale[u] = scale_at(p.v_scale, block, offset, head[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      using Target = typename Row::Target*;
      const int64_t row = first + token[u];
      Target const key_row = static_cast<Target>(p.key) + row * p.key_stride_token + head[u] * p.key_stride_head;
      Target const value_row =
          static_cast<Target>(p.value) + row * p.value_stride_token + head[u] * p.value_stride_head;
      Row::store(key[u], key_row + element[u], k_scale[u], p.trade, live[u]);
      Row::store(value[u], value_row + element[u], v_scale[u], p.trade, live[u]);
    }
  }
}

// grid [min(chunks of block_tokens tokens, kMaxBlocks)]
template <class Row>
__global__ void __launch_bounds__(GatherConfig::kThreads)
    gather_cache_kernel(const __grid_constant__ GatherKernelParams p) {
  __shared__ GatherPlaces places;
  const int64_t step = static_cast<int64_t>(gridDim.x) * p.block_tokens;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * p.block_tokens; first < p.total; first += step) {
    const int count = static_cast<int>(p.total - first < p.block_tokens ? p.total - first : p.block_tokens);
    if (static_cast<int>(threadIdx.x) < count) places.find(p, first + threadIdx.x);
    __syncthreads();
    gather_tokens<Row>(p, places, first, count);
    __syncthreads();  // the places are found anew for the next tokens
  }
}

}  // namespace pagedkern
