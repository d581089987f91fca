// reshape_and_cache: rows of key and value to their slots, copied, or divided by their scale and rounded to FP8.
#pragma once

#include "cache_write/kernel_params.h"
#include "cache_write/slots.cuh"
#include "common/elements.cuh"

namespace pagedkern {

// A thread has kUnroll parts of key and of value at a time, so that at least four loads are in flight.
constexpr int kUnroll = 2;

// Elements as they are.
template <int kCount>
struct CopyRow {
  static constexpr int kElements = kCount;
  using Source = uint16_t;
  using Target = uint16_t;
  using Data = Chunk<uint16_t, kCount>;

  template <class Places>
  static __device__ __forceinline__ void store(const Data (&data)[kUnroll], const Places& places) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (places.live(u)) data[u].store(places.target(u));
    }
  }
};

// stored = saturate(x / scale). Eight elements are half an access of FP8: neighbouring lanes trade (kTrade), so that
// the even one has 16 elements of the first part and the odd one 16 of the second. Both halves belong to one row.
template <class T, class Format, int kCount, bool kTrade>
struct QuantizeRow {
  static constexpr int kElements = kCount;
  using Source = T;
  using Target = uint8_t;
  using Data = Chunk<T, kCount>;

  template <class Places>
  static __device__ __forceinline__ void store(const Data (&data)[kUnroll], const Places& places) {
    Codes<Format, kCount> codes[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float x[kCount];
      data[u].get(x);
      const Quotient quotient = places.quotient(u);
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = quotient(x[i]);
      codes[u].encode(x);
      if (!kTrade && places.live(u)) codes[u].store(places.target(u));
    }
    if constexpr (kTrade) {
      const bool odd = threadIdx.x % 2 != 0;
      const uint4 both = trade_halves(codes[0].vector[0], codes[1].vector[0], odd);
      if (odd ? places.live(1) : places.live(0)) {
        *reinterpret_cast<uint4*>(places.target_of(odd) - (odd ? kCount : 0)) = both;
      }
    }
  }
};

// One scale for all tokens and heads is loaded once.
class ScaleReader {
 public:
  __device__ __forceinline__ explicit ScaleReader(const KvScale& scale)
      : scale_(scale), varies_(scale.data != nullptr && (scale.per_token() || scale.stride_head != 0)) {
    if (!varies_ && scale.data != nullptr) fixed_ = scale.data[0];
  }
  __device__ __forceinline__ bool varies() const { return varies_; }
  // The one scale, where it does not vary.
  __device__ __forceinline__ float fixed() const { return fixed_; }
  __device__ __forceinline__ float at(int64_t block, int64_t offset, int64_t head) const {
    return scale_.data[scale_.offset(block, offset, head)];
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

// Where the parts of a thread go on one side, key or value.
template <class Row>
struct PartPlaces {
  const SlotTable& slots;
  const RowPart (&parts)[kUnroll];
  const bool (&alive)[kUnroll];
  const PagedCache& cache;
  const ScaleReader& scales;
  const Quotient& fixed;  // where the scale does not vary

  __device__ __forceinline__ bool live(int u) const { return alive[u]; }
  __device__ __forceinline__ Quotient quotient(int u) const {
    if (!scales.varies() || !alive[u]) return fixed;
    return Quotient(scales.at(slots.block(parts[u].token), slots.offset(parts[u].token), parts[u].head));
  }
  __device__ __forceinline__ typename Row::Target* target(int u) const {
    return target(slots.block(parts[u].token), slots.offset(parts[u].token), parts[u].head, parts[u].element);
  }
  // Of the second part or the first. Both are looked up and one is taken: lanes of a warp then read one place of the
  // table, and an index that is no constant would put the parts into local memory. It must be live.
  __device__ __forceinline__ typename Row::Target* target_of(bool second) const {
    const RowPart &a = parts[0], &b = parts[1];
    const int64_t blocks[] = {alive[0] ? slots.block(a.token) : 0, alive[1] ? slots.block(b.token) : 0};
    const int64_t offsets[] = {alive[0] ? slots.offset(a.token) : 0, alive[1] ? slots.offset(b.token) : 0};
    return target(second ? blocks[1] : blocks[0], second ? offsets[1] : offsets[0], second ? b.head : a.head,
                  second ? b.element : a.element);
  }

 private:
  __device__ __forceinline__ typename Row::Target* target(int64_t block, int64_t offset, int head, int element) const {
    return static_cast<typename Row::Target*>(cache.data) + cache.offset(block, offset, head) + element;
  }
};

template <class Row>
static __device__ __forceinline__ void load_part(typename Row::Data& data, const void* rows, int64_t stride_token,
                                                 int64_t stride_head, int64_t token, const RowPart& part) {
  data.load(static_cast<const typename Row::Source*>(rows) + token * stride_token + part.head * stride_head +
            part.element);
}

// grid: teams of blocks. A team takes team_tokens tokens after the other; a thread the same parts of key and value.
template <class Row>
// Two blocks of an SM: left to itself the compiler spills for more.
__global__ void __launch_bounds__(CacheWriteConfig::kTeamThreads, 2)
    reshape_and_cache_kernel(const __grid_constant__ CacheWriteKernelParams p) {
  __shared__ SlotTable slots;
  const Team team;
  const ScaleReader k_scale(p.k_scale), v_scale(p.v_scale);
  const Quotient k_quotient(k_scale.fixed()), v_quotient(v_scale.fixed());

  for (int64_t first = team.index() * p.team_tokens; first < p.num_slots; first += team.num_teams() * p.team_tokens) {
    const int64_t left = p.num_slots - first;
    const TokenRange range{first, static_cast<int>(left < p.team_tokens ? left : p.team_tokens)};
    const uint32_t total = range.count * p.heads.divisor * p.chunks_of_row.divisor;
    // The first parts are under way while the slots are looked through. Lanes of a warp go round together.
    bool known = false;
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t base = team.thread() - lane; !known || base < total; base += team.num_threads() * kUnroll) {
      typename Row::Data key[kUnroll] = {}, value[kUnroll] = {};
      RowPart part[kUnroll];
      bool live[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const uint32_t i = base + lane + u * team.num_threads();
        part[u] = row_part<Row>(p, i);
        live[u] = i < total && (!known || slots.live(part[u].token));
        if (!live[u]) continue;
        const int64_t token = first + part[u].token;
        load_part<Row>(key[u], p.key, p.key_stride_token, p.key_stride_head, token, part[u]);
        load_part<Row>(value[u], p.value, p.value_stride_token, p.value_stride_head, token, part[u]);
      }
      if (!known) {
        slots.build(p, range, team);
        known = true;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) live[u] = live[u] && slots.live(part[u].token);
      }
      Row::store(key, PartPlaces<Row>{slots, part, live, p.key_cache, k_scale, k_quotient});
      Row::store(value, PartPlaces<Row>{slots, part, live, p.value_cache, v_scale, v_quotient});
    }
    __syncthreads();  // the table is built anew for the next tokens
  }
}

}  // namespace pagedkern
