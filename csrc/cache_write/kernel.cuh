// reshape_and_cache: rows of key and value to their slots, copied, or divided by their scale and rounded to FP8.
#pragma once

#include "cache_write/kernel_params.h"
#include "cache_write/slots.cuh"
#include "common/elements.cuh"

namespace pagedkern {

// Elements as they are.
template <int kCount>
struct CopyRow {
  static constexpr int kElements = kCount;
  static constexpr int kUnroll = 2;  // with key and value four loads of a thread are in flight
  using Source = uint16_t;
  using Target = uint16_t;
  using Data = Chunk<uint16_t, kCount>;

  static __device__ __forceinline__ void store(const Data& data, Target* target, float) { data.store(target); }
};

// stored = saturate(x / scale)
template <class T, class Format, int kCount>
struct QuantizeRow {
  static constexpr int kElements = kCount;
  static constexpr int kUnroll = kCount == 16 ? 1 : 2;
  using Source = T;
  using Target = uint8_t;
  using Data = Chunk<T, kCount>;

  static __device__ __forceinline__ void store(const Data& data, Target* target, float scale) {
    float x[kCount];
    data.get(x);
    const Quotient quotient(scale);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = quotient(x[i]);
    Codes<Format, kCount> codes;
    codes.encode(x);
    codes.store(target);
  }
};

// Scales of one kind for all tokens and heads are loaded once.
class ScaleReader {
 public:
  __device__ __forceinline__ explicit ScaleReader(const KvScale& scale)
      : scale_(scale), varies_(scale.data != nullptr && (scale.per_token() || scale.stride_head != 0)) {
    if (!varies_ && scale.data != nullptr) fixed_ = scale.data[0];
  }
  __device__ __forceinline__ float at(int64_t block, int64_t offset, int64_t head) const {
    return varies_ ? scale_.data[scale_.offset(block, offset, head)] : fixed_;
  }

 private:
  const KvScale& scale_;
  bool varies_;
  float fixed_ = 1.0f;
};

// The kElements elements from `element` of one head of the team's token t.
struct RowPart {
  int token;
  int head;
  int element;
};

template <class Row>
static __device__ __forceinline__ RowPart row_part(const CacheWriteKernelParams& p, uint32_t i) {
  const uint32_t row = p.chunks_of_row(i);
  const uint32_t token = p.heads(row);
  return {static_cast<int>(token), static_cast<int>(row - token * p.heads.divisor),
          static_cast<int>(i - row * p.chunks_of_row.divisor) * Row::kElements};
}

template <class Row>
static __device__ __forceinline__ void load_part(typename Row::Data& data, const void* rows, int64_t stride_token,
                                                 int64_t stride_head, int64_t token, const RowPart& part) {
  data.load(static_cast<const typename Row::Source*>(rows) + token * stride_token + part.head * stride_head +
            part.element);
}

template <class Row>
static __device__ __forceinline__ void store_part(const typename Row::Data& data, const PagedCache& cache,
                                                  const ScaleReader& scale, int64_t block, int64_t offset,
                                                  const RowPart& part) {
  Row::store(data,
             static_cast<typename Row::Target*>(cache.data) + cache.offset(block, offset, part.head) + part.element,
             scale.at(block, offset, part.head));
}

// grid: teams of blocks. A team takes team_tokens tokens after the other; a thread the same part of key and value.
template <class Row>
__global__ void __launch_bounds__(CacheWriteConfig::kThreads)
    reshape_and_cache_kernel(const __grid_constant__ CacheWriteKernelParams p) {
  constexpr int kUnroll = Row::kUnroll;
  __shared__ SlotTable slots;
  const WriteTeam team;
  const ScaleReader k_scale(p.k_scale), v_scale(p.v_scale);

  for (int64_t first = team.index() * p.team_tokens; first < p.num_slots; first += team.num_teams() * p.team_tokens) {
    const int64_t left = p.num_slots - first;
    const TokenRange range{first, static_cast<int>(left < p.team_tokens ? left : p.team_tokens)};
    const uint32_t total = range.count * p.heads.divisor * p.chunks_of_row.divisor;
    typename Row::Data key[kUnroll], value[kUnroll];
    RowPart part[kUnroll];
    bool live[kUnroll];
    // The first parts are under way while the slots are looked through.
    bool known = false;
    for (uint32_t begin = team.thread(); known ? begin < total : true; begin += team.num_threads() * kUnroll) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const uint32_t i = begin + u * team.num_threads();
        live[u] = i < total;
        part[u] = row_part<Row>(p, i);
        if (live[u] && known) live[u] = slots.live(part[u].token);
        if (!live[u]) continue;
        const int64_t token = first + part[u].token;
        load_part<Row>(key[u], p.key, p.key_stride_token, p.key_stride_head, token, part[u]);
        load_part<Row>(value[u], p.value, p.value_stride_token, p.value_stride_head, token, part[u]);
      }
      if (!known) {
        slots.build(p, range, team);
        known = true;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (!live[u] || !slots.live(part[u].token)) continue;
        const int64_t block = slots.block(part[u].token), offset = slots.offset(part[u].token);
        store_part<Row>(key[u], p.key_cache, k_scale, block, offset, part[u]);
        store_part<Row>(value[u], p.value_cache, v_scale, block, offset, part[u]);
      }
    }
    __syncthreads();  // the table is built anew for the next tokens
  }
}

}  // namespace pagedkern
