// reshape_and_cache_dynamic: rows of key and value to FP8, each with a scale of its own.
#pragma once

#include "cache_write/kernel_params.h"
#include "cache_write/slots.cuh"
#include "common/elements.cuh"

namespace pagedkern {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// A row in registers, spread over lanes_of_row lanes: kParts times kCount neighbouring elements in each, and the lanes'
// parts side by side. Two parts of eight elements are traded between neighbouring lanes, for 16-byte stores.
template <class T, int kCount, int kParts>
struct RowShare {
  static constexpr bool kTrade = kCount == 8 && kParts == 2;
  Chunk<T, kCount> chunk[kParts] = {};
  const int lane;
  const int lanes_of_row;
  const int head_dim;

  __device__ __forceinline__ RowShare(int lane, int lanes_of_row, int head_dim)
      : lane(lane), lanes_of_row(lanes_of_row), head_dim(head_dim) {}
  __device__ __forceinline__ int element(int part) const { return (lane + part * lanes_of_row) * kCount; }
  __device__ __forceinline__ bool has(int part) const { return element(part) < head_dim; }

  __device__ __forceinline__ void load(const T* row) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (has(i)) chunk[i].load(row + element(i));
    }
  }
  // Of the finite elements.
  __device__ __forceinline__ float amax() const {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      float x[kCount];
      chunk[i].get(x);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float magnitude = fabsf(x[j]);
        most = fmaxf(most, magnitude <= 0x1.fffffep127f ? magnitude : 0.0f);
      }
    }
    return most;
  }
  // All lanes of a warp call it; `write` is the same for those of a row.
  template <class Format>
  __device__ __forceinline__ void quantize(uint8_t* row, float scale, bool write) const {
    const Quotient quotient(scale);
    Codes<Format, kCount> codes[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      float x[kCount];
      chunk[i].get(x);
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[j] = quotient(x[j]);
      codes[i].encode(x);
      if (!kTrade && write && has(i)) codes[i].store(row + element(i));
    }
    if constexpr (kTrade) {
      const int odd = lane % 2;
      const uint4 both = trade_halves(codes[0].vector[0], codes[1].vector[0], odd != 0);
      if (write && has(odd)) *reinterpret_cast<uint4*>(row + element(odd) - odd * kCount) = both;
    }
  }
};

// The greatest over the lanes of a row.
static __device__ __forceinline__ float row_max(float x, int lanes_of_row) {
  for (int step = lanes_of_row / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

template <class Format, class Share>
static __device__ __forceinline__ void write_row(const Share& share, float amax, const PagedCache& cache,
                                                 const KvScale& scales, int64_t block, int64_t offset, int head,
                                                 bool write) {
  const float scale = __fdiv_rn(fmaxf(amax, 1e-10f), Format::kMax);
  if (write && share.lane == 0) scales.data[scales.offset(block, offset, head)] = scale;
  share.template quantize<Format>(static_cast<uint8_t*>(cache.data) + cache.offset(block, offset, head), scale, write);
}

// grid: teams of blocks. lanes_of_row lanes take the key and the value of one head of one token.
template <class T, class Format, int kCount, int kParts>
// Two blocks of an SM: left to itself the compiler spills two registers for a third.
__global__ void __launch_bounds__(CacheWriteConfig::kTeamThreads, 2)
    reshape_and_cache_dynamic_kernel(const __grid_constant__ CacheWriteKernelParams p) {
  using Share = RowShare<T, kCount, kParts>;
  __shared__ SlotTable slots;
  const Team team;
  const int lane = static_cast<int>(threadIdx.x) & (p.lanes_of_row - 1);
  const uint32_t rows_at_once = team.num_threads() / p.lanes_of_row;
  const uint32_t warp_first = (team.thread() - static_cast<int>(threadIdx.x) % 32) / p.lanes_of_row;

  for (int64_t first = team.index() * p.team_tokens; first < p.num_slots; first += team.num_teams() * p.team_tokens) {
    const int64_t left = p.num_slots - first;
    const TokenRange range{first, static_cast<int>(left < p.team_tokens ? left : p.team_tokens)};
    const uint32_t total = range.count * p.heads.divisor;
    // Lanes of a warp go round together, as they reduce together. The first rows are under way while the slots are
    // looked through.
    bool known = false;
    for (uint32_t round = 0; !known || warp_first + round < total; round += rows_at_once) {
      const uint32_t row = team.thread() / p.lanes_of_row + round;
      const int token = static_cast<int>(p.heads(row));
      const int head = static_cast<int>(row - token * p.heads.divisor);
      Share key(lane, p.lanes_of_row, p.cache.head_dim), value(lane, p.lanes_of_row, p.cache.head_dim);
      bool live = row < total && (!known || slots.live(token));
      if (live) {
        key.load(static_cast<const T*>(p.key) + (first + token) * p.key_stride_token + head * p.key_stride_head);
        value.load(static_cast<const T*>(p.value) + (first + token) * p.value_stride_token +
                   head * p.value_stride_head);
      }
      if (!known) {
        slots.build(p, range, team);
        known = true;
        live = live && slots.live(token);
      }
      const float key_amax = row_max(key.amax(), p.lanes_of_row), value_amax = row_max(value.amax(), p.lanes_of_row);
      const int64_t block = live ? slots.block(token) : 0, offset = live ? slots.offset(token) : 0;
      write_row<Format>(key, key_amax, p.key_cache, p.k_scale, block, offset, head, live);
      write_row<Format>(value, value_amax, p.value_cache, p.v_scale, block, offset, head, live);
    }
    __syncthreads();  // the table is built anew for the next tokens
  }
}

}  // namespace pagedkern
