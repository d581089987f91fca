// Attention of any number of query tokens over the paged cache, with mma.sync.
//
// A block takes 64 or 128 rows, (query token, query head) pairs of one KV head of one sequence, so that every key and
// value it loads serves all query heads that share it; its warps take 16 rows each. Where a KV head has more query
// heads than that, a cluster of up to 8 blocks takes them together: each loads its share of the keys, and has the rest
// from the others' shared memory. Keys and values come a tile at a time, by cp.async through the block table, one tile
// ahead of the arithmetic. Where rows are few, their keys are shared out among blocks, and the one that is done last
// merges.
#pragma once

#include <type_traits>

#include "arch/grid_dependency.cuh"
#include "common/split_walk.cuh"
#include "paged_prefill/attend.cuh"
#include "paged_prefill/load.cuh"
#include "paged_prefill/merge.cuh"

namespace pagedkern {

static __device__ __forceinline__ float per_head_scale(const KvScale& scale, int kv_head) {
  return scale.data == nullptr || scale.per_token() ? 1.0f : scale.data[scale.offset(0, 0, kv_head)];
}

template <class Config, int kDim, class Shared>
static __device__ __forceinline__ void start_rows(const PagedPrefillParams& p, const QueryTile& tile, int32_t seq_len,
                                                  const Shared& s, WarpRows<kDim>& rows) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * Config::kWarpRows;
  const int last = min(first + Config::kWarpRows, tile.num_rows) - 1;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = min(first + lane / 4 + 8 * r, max(last, 0));
    rows.position[r] = seq_len - tile.query_len + s.row_token[row];
    rows.keys[r] = visible_keys(rows.position[r], p.window, seq_len);
    rows.slope[r] = p.op.alibi_slopes == nullptr ? 0.0f : p.op.alibi_slopes[s.row_head[row]];
  }
  rows.clear();
  if (last < first) {
    rows.any = rows.all = {0, 0};
    return;
  }
  const int64_t before = seq_len - tile.query_len;
  const KeyRange low = visible_keys(before + s.row_token[first], p.window, seq_len);
  const KeyRange high = visible_keys(before + s.row_token[last], p.window, seq_len);
  rows.any = {low.begin, high.end};
  rows.all = {high.begin, low.end};
}

// Sums over the lanes, adds the sink, divides; the rows' results go to shared memory, their lse to the caller.
template <class T, bool kFp8, class Config, int kDim, class Shared>
static __device__ __forceinline__ void finish_rows(const PagedPrefillParams& p, const QueryTile& tile, int kv_head,
                                                   WarpRows<kDim>& rows, Shared& s) {
  constexpr int kPieces = Config::kPieces;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * Config::kWarpRows;
  const float v_scale = per_head_scale(p.op.v_scale, kv_head);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first + lane / 4 + 8 * r;
    const bool live = row < tile.num_rows;
    float sum = quad_sum(rows.sum[r]), factor = 1.0f;
    if (live && p.op.sinks != nullptr) {
      const float sink = p.op.sinks[s.row_head[row]] * kLog2E;
      const float top = fmaxf(rows.base[r], sink);
      factor = rescale_factor(rows.base[r], top);
      sum = sum * factor + rescale_factor(sink, top);
      rows.base[r] = top;
    }
    if (live && p.op.lse != nullptr && lane % 4 == 0) {
      const int64_t token = tile.first_token + s.row_token[row];
      p.op.lse[token * p.op.lse_stride_token + s.row_head[row] * p.op.lse_stride_head] = natural_lse(rows.base[r], sum);
    }
    factor = sum == 0.0f ? 0.0f : factor / sum * v_scale;
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) {
      auto* piece = reinterpret_cast<uint32_t*>(s.query + (row * kPieces + swizzle_piece<kPieces>(row, d)) * 8);
      const float x = rows.output[d][2 * r] * factor, y = rows.output[d][2 * r + 1] * factor;
      const bool bfloat16 = kFp8 && p.op.dtype == DType::kBFloat16;  // else T
      piece[lane % 4] = bfloat16 ? pack2<__nv_bfloat16>(x, y) : pack2<T>(x, y);
    }
  }
}

// The warp's rows from shared memory to out, 16 bytes at a time where that fits.
template <class Config, class Shared>
static __device__ __forceinline__ void store_rows(const PagedPrefillParams& p, const QueryTile& tile, const Shared& s) {
  constexpr int kPieces = Config::kPieces;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * Config::kWarpRows;
  auto* out = static_cast<uint16_t*>(p.op.out) + tile.first_token * p.op.out_stride_token;
#pragma unroll 4
  for (int i = lane; i < Config::kWarpRows * kPieces; i += 32) {
    const int row = first + i / kPieces, piece = i % kPieces;
    if (row >= tile.num_rows || piece * 8 >= p.op.cache.head_dim) continue;
    uint16_t* target =
        out + s.row_token[row] * p.op.out_stride_token + s.row_head[row] * p.op.out_stride_head + piece * 8;
    const uint4 values =
        *reinterpret_cast<const uint4*>(s.query + (row * kPieces + swizzle_piece<kPieces>(row, piece)) * 8);
    if (p.out_width == 16) {
      *reinterpret_cast<uint4*>(target) = values;
    } else {
      const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) target[e] = static_cast<uint16_t>(words[e / 2] >> (16 * (e % 2)));
    }
  }
}

// `keys` of a query tile, begin < end: the rest of the tiles that they begin and end in is seen by no row.
template <class T, bool kFp8, int kDim, class Config, class Shared>
static __device__ __forceinline__ void attend_keys(const PagedPrefillParams& p, const QueryTile& tile, int kv_head,
                                                   KeyRange keys, uint32_t rank, WarpRows<kDim>& rows, Shared& s) {
  const int first = keys.begin / Config::kKeys, last = (keys.end - 1) / Config::kKeys;
  const bool token_scales = p.op.k_scale.per_token() || p.op.v_scale.per_token();
  const ScoreOptions options = {p.op.k_scale.per_token() || p.op.softcap != 0 || p.op.alibi_slopes != nullptr,
                                p.op.v_scale.per_token()};
  PageLookup page = look_up<Config>(p, tile.sequence, keys, first, rank);
  store_row<Config>(p, page, kv_head, first % 2, s);
  if (token_scales) store_scale<Config>(load_scale<Config>(p, page, kv_head), first % 2, s);
  page = look_up<Config>(p, tile.sequence, keys, first + 1, rank);
  store_row<Config>(p, page, kv_head, (first + 1) % 2, s);
  __syncthreads();
  start_tile<Config, kFp8>(p, keys, first, rank, s);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  float scales[2] = {p.op.scale, p.op.scale};
  if constexpr (kFp8) {
    shift_queries<Config>(p.op.dtype == DType::kBFloat16, s);
    const float* factor = s.row_factor + threadIdx.x / 32 * Config::kWarpRows + threadIdx.x % 32 / 4;
    const float k_scale = per_head_scale(p.op.k_scale, kv_head);
    scales[0] = score_factor(p.op.scale, k_scale, factor[0]);
    scales[1] = score_factor(p.op.scale, k_scale, factor[8]);
  }
  uint32_t query[kDim / 16][4];
  if constexpr (Config::kQueryInRegisters) load_query_fragments<Config, kDim>(s.query, query);

  for (int t = first; t <= last; ++t) {
    const int stage = t % 2;
    cp_async_wait<0>();
    if (p.cluster_log == 0) {
      __syncthreads();
    } else {
      cluster_barrier();
    }
    if (t < last) start_tile<Config, kFp8>(p, keys, t + 1, rank, s);
    cp_async_commit();
    const float next_scale = token_scales ? load_scale<Config>(p, page, kv_head) : 0.0f;
    page = look_up<Config>(p, tile.sequence, keys, t + 2, rank);
    if (p.cluster_log > 0) {
      take_from_cluster<Config, kFp8>(p, token_scales, stage, rank, s);
      __syncthreads();
    }
    if constexpr (kFp8) {
      decode_tile<Config>(p.op.cache.dtype == DType::kFloat8E5M2, stage, s);
      __syncthreads();
    }

    const int first_key = t * Config::kKeys;
    if (first_key < rows.any.end && first_key + Config::kKeys > rows.any.begin) {
      const bool whole = first_key >= rows.all.begin && first_key + Config::kKeys <= rows.all.end;
      const auto attend = [&](auto plain) {
        attend_tile<T, Config, kDim, decltype(plain)::value>(p, s.tiles[kFp8 ? 0 : stage], s.query, query,
                                                             s.scale[stage], first_key, scales, options, rows);
      };
      if (whole && !options.scores && !options.values) {
        attend(std::true_type{});
      } else {
        attend(std::false_type{});
      }
    }
    store_row<Config>(p, page, kv_head, stage, s);
    if (token_scales) store_scale<Config>(next_scale, 1 - stage, s);
  }
  if (p.cluster_log > 0) cluster_barrier();  // the others have what they need of this block
}

// grid [at least the units that are computed whole, or as many blocks as are resident at once], in clusters of
// 2^cluster_log. A cluster computes its bucket of the schedule, see split_schedule.h. T: what is multiplied, float16
// where the cache is FP8.
template <class T, bool kFp8, int kDim>
__global__ void __launch_bounds__(PagedPrefillConfig<kDim, kFp8>::kResidentThreads, 1)
    paged_prefill_kernel(const __grid_constant__ PagedPrefillParams p) {
  using Config = PagedPrefillConfig<kDim, kFp8>;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& s = *reinterpret_cast<PagedPrefillShared<kDim, kFp8>*>(shared_bytes);

  grid_dependency_wait();
  const ClusterPlace place = ClusterPlace::of(p);
  const Cut cut = find_bucket<Config>(p, place.bucket, place.buckets, blockDim.x, s.split);
  if (cut.buckets == 0) return;
  const Part& part = s.split.parts[0];
  while (part.tile_begin < part.tile_end) {
    const QueryTile unit = query_tile(p, part), tile = rows_of_block(p, unit, place.rank);
    const int kv_head = part.head;
    const int32_t seq_len = part.seq_len;
    load_queries<Config>(p, tile, kv_head, s);
    WarpRows<kDim> rows;
    start_rows<Config>(p, tile, seq_len, s, rows);
    const KeyRange keys = keys_of<Config>(p, unit, part);
    if (keys.begin < keys.end) attend_keys<T, kFp8, kDim, Config>(p, tile, kv_head, keys, place.rank, rows, s);
    cp_async_wait<0>();
    __syncthreads();  // the queries have arrived everywhere before results take their place
    if (part.num_pieces == part.unit_pieces || merge_parts(p, part, tile.num_rows, cut, place, rows, s)) {
      finish_rows<T, kFp8, Config>(p, tile, kv_head, rows, s);
      __syncwarp();
      store_rows<Config>(p, tile, s);
    }
    __syncthreads();
    if (threadIdx.x == 0) next_part<Config>(p, s.split.walk, s.split.parts[0]);
    __syncthreads();
  }
}

}  // namespace pagedkern
