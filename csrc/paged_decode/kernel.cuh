// Decode attention: a few query tokens of each sequence over its paged keys and values.
#pragma once

#include "arch/grid_dependency.cuh"
#include "arch/opaque.cuh"
#include "common/row_shift.cuh"
#include "common/split_walk.cuh"
#include "paged_decode/merge.cuh"

namespace pagedkern {

// Eight elements of a query row.
static __device__ __forceinline__ uint4 load_query(const uint16_t* from, int width) {
  if (width == 16) return *reinterpret_cast<const uint4*>(from);
  return make_uint4(from[0] | static_cast<uint32_t>(from[1]) << 16, from[2] | static_cast<uint32_t>(from[3]) << 16,
                    from[4] | static_cast<uint32_t>(from[5]) << 16, from[6] | static_cast<uint32_t>(from[7]) << 16);
}

// The query tile and what there is to know of its rows. Rows past the last are zeros and see what the last one sees.
template <class Config>
static __device__ __forceinline__ void load_rows(const PagedDecodeParams& p, PagedDecodeShared<Config>& shared,
                                                 const Part& part) {
  constexpr int kThreads = Config::kRowThreads;
  constexpr int kEights = (Config::kDim / 8 + kThreads - 1) / kThreads;
  const PagedAttentionParams& op = p.op;
  const int n = threadIdx.x / kThreads, thread = threadIdx.x % kThreads;
  const bool real = n < part.query_len * p.group;
  const int32_t row = real ? n : part.query_len * p.group - 1;
  const int32_t token = row / p.group;
  const int32_t head = part.head * p.group + row - token * p.group;
  const auto* from = static_cast<const uint16_t*>(op.query) +
                     (static_cast<int64_t>(part.query_begin) + token) * op.query_stride_token +
                     head * op.query_stride_head;
  uint4 x[kEights];
#pragma unroll
  for (int i = 0; i < kEights; ++i) {
    const int d = 8 * (thread + i * kThreads);
    x[i] = real && d < op.cache.head_dim ? load_query(from + d, p.query_width) : make_uint4(0, 0, 0, 0);
  }
  RowShift shift = {1.0f, 1.0f};
  if (Config::kFp8 && op.dtype == DType::kBFloat16) {
    uint32_t greatest = 0;
#pragma unroll
    for (int i = 0; i < kEights; ++i) greatest = max(greatest, greatest_bits(x[i]));
#pragma unroll
    for (int step = 1; step < kThreads; step *= 2) {
      greatest = max(greatest, __shfl_xor_sync(0xFFFFFFFFu, greatest, step));
    }
    shift = RowShift::of(greatest);
#pragma unroll
    for (int i = 0; i < kEights; ++i) x[i] = shifted_to_half(x[i], shift.up);
  }
#pragma unroll
  for (int i = 0; i < kEights; ++i) {
    const int d = 8 * (thread + i * kThreads);
    if (d < Config::kDim) *reinterpret_cast<uint4*>(shared.query[n] + d) = x[i];
  }
  if (thread != 0) return;
  float k_scale = 1.0f;
  if (Config::kFp8 && op.k_scale.data != nullptr && !op.k_scale.per_token()) {
    k_scale = op.k_scale.data[part.head * op.k_scale.stride_head];
  }
  const int32_t position = part.seq_len - part.query_len + token;
  const KeyRange keys = visible_keys(position, p.window, part.seq_len);
  shared.factor[n] = score_factor(op.scale, k_scale, shift.down * kLog2E);
  shared.begin[n] = keys.begin;
  shared.end[n] = keys.end;
  if constexpr (Config::kGeneral) {
    shared.slope[n] = op.alibi_slopes == nullptr ? 0.0f : op.alibi_slopes[head] * kLog2E;
    shared.position[n] = position;
  }
}

// Keys that every row of the tile sees.
template <class Config>
static __device__ __forceinline__ KeyRange seen_by_all(const PagedDecodeShared<Config>& shared) {
  KeyRange keys = {shared.begin[0], shared.end[0]};
#pragma unroll
  for (int n = 1; n < Config::kRows; ++n) {
    keys.begin = max(keys.begin, shared.begin[n]);
    keys.end = min(keys.end, shared.end[n]);
  }
  return keys;
}

// A slot of a warp's ring.
template <class Config>
struct RingPlace {
  uint32_t slot;    // shared address
  uint32_t scales;  // likewise

  __device__ __forceinline__ RingPlace(const PagedDecodeShared<Config>& shared, int warp, int index)
      : slot(shared_address(shared.slots[warp][index])), scales(0) {
    if constexpr (Config::kGeneral) scales = shared_address(shared.scale[warp][index]);
  }
  __device__ __forceinline__ void advance(uint32_t end) {
    slot += Config::kSlotBytes;
    scales += 2 * Config::kWarpKeys * 4;
    if (slot == end) {
      slot -= Config::kSlots * Config::kSlotBytes;
      scales -= Config::kSlots * 2 * Config::kWarpKeys * 4;
    }
  }
};

template <class Config>
static __device__ __forceinline__ void clear_ring(PagedDecodeShared<Config>& shared, int warp, int lane) {
  auto* slots = reinterpret_cast<uint4*>(shared.slots[warp]);
  for (int i = lane; i < Config::kSlots * Config::kSlotBytes / 16; i += 32) slots[i] = make_uint4(0, 0, 0, 0);
  auto* scales = &shared.scale[warp][0][0][0];
  for (int i = lane; i < Config::kSlots * 2 * Config::kWarpKeys; i += 32) scales[i] = 0.0f;
  __syncwarp();
}

// grid [min(resident blocks, most buckets)]. A block computes its bucket of the schedule, see split_schedule.h; each
// warp has kWarpKeys keys of every tile and sums of its own, which meet at the end of a part.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerMultiprocessor)
    paged_decode_kernel(const __grid_constant__ PagedDecodeParams p) {
  extern __shared__ __align__(1024) uint8_t s_memory[];
  auto& shared = *reinterpret_cast<PagedDecodeShared<Config>*>(s_memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kSlots = Config::kSlots;
  constexpr bool kEven = kSlots % 2 == 0;  // then a slot is always of keys or always of values
  if constexpr (Config::kGeneral) clear_ring(shared, warp, lane);
  grid_dependency_wait();
  const Cut cut = find_bucket<Config>(p, blockIdx.x, gridDim.x, Config::kThreads, shared.split);
  if (cut.buckets == 0) return;

  LoadStream<Config> stream;
  stream.start(p, shared.split.parts, warp, lane);
  RingPlace<Config> place(shared, warp, 0), before(shared, warp, kSlots - 1);
  const uint32_t ring_end = opaque(place.slot + kSlots * Config::kSlotBytes);
#pragma unroll
  for (int i = 0; i < kSlots - 1; i += 2) {
    stream.template issue<false>(p, place.slot + i * Config::kSlotBytes, place.scales + i * 8 * Config::kWarpKeys);
    if (i + 1 < kSlots - 1) stream.template issue<true>(p, place.slot + (i + 1) * Config::kSlotBytes, 0);
  }

  const uint32_t key_rows = opaque(matrix_rows<Config, false>(lane)),
                 value_rows = opaque(matrix_rows<Config, true>(lane));
  DecodeQuery<Config> query;
  DecodeState<Config> state;
  for (uint32_t index = 0;; ++index) {
    const Part part = shared.split.parts[index % Config::kParts];
    if (part.tile_begin == part.tile_end) break;
    load_rows(p, shared, part);
    __syncthreads();
    // In place of the part before this one, which nobody looks at any more.
    if (index > 0 && threadIdx.x == 0) {
      next_part<Config>(p, shared.split.walk, shared.split.parts[(index - 1) % Config::kParts]);
    }
    query.keep(shared, lane);
    state.clear();
    const KeyRange all = seen_by_all(shared);
    const KeyRange any = part.keys;
    // First keys of a warp's turn: of which every row sees all keys, or some row sees some.
    const uint32_t whole_length = max(all.end - all.begin - Config::kWarpKeys + 1, 0);
    const int32_t live_begin = any.begin / Config::kWarpKeys * Config::kWarpKeys;
    const uint32_t live_length = any.end > any.begin ? any.end - live_begin : 0;
    float factor[Config::kColumns][2];
#pragma unroll
    for (int c = 0; c < Config::kColumns * 2; ++c) {
      factor[c / 2][c % 2] = shared.factor[c / 2 * 8 + lane % 4 * 2 + c % 2];
    }

    int32_t key = part.tile_begin * Config::kTileKeys + warp * Config::kWarpKeys;
    for (int32_t steps = part.tile_end - part.tile_begin; steps > 0; --steps, key += Config::kTileKeys) {
      const bool whole = static_cast<uint32_t>(key - all.begin) < whole_length;
      const bool live = static_cast<uint32_t>(key - live_begin) < live_length;
      Weights<Config> weights;

      cp_async_wait<kSlots - 2>();
      __syncwarp();
      stream.template issue<kEven>(p, before.slot, before.scales);
      if (live) {
        Scores<Config> scores;
        if (__builtin_expect(!whole, 0)) zero_dead_keys<Config>(place.slot, key, any, lane);
        score_keys<Config>(shared, query, place.slot + key_rows, lane, scores);
        if constexpr (Config::kGeneral) {
          const int index =
              static_cast<int>((place.slot + kSlots * Config::kSlotBytes - ring_end) / Config::kSlotBytes);
          weigh_general<Config>(p, shared, shared.scale[warp][index], key, lane, state, scores, weights);
        } else {
          if (__builtin_expect(!whole, 0)) mask_scores<Config>(shared, key, lane, scores);
          weigh<Config>(state, scores, factor, weights);
        }
      }
      before = place;
      place.advance(ring_end);

      cp_async_wait<kSlots - 2>();
      __syncwarp();
      stream.template issue<!kEven>(p, before.slot, before.scales);
      if (live) {
        if (__builtin_expect(!whole, 0)) zero_dead_keys<Config>(place.slot, key, any, lane);
        sum_values<Config>(place.slot + value_rows, weights, state);
      }
      before = place;
      place.advance(ring_end);
    }
    finish_part(p, shared, state, part, cut);
  }
  cp_async_wait<0>();
}

}  // namespace pagedkern
