// From the sums of warps and of parts to rows of `out`.
#pragma once

#include "common/split_merge.cuh"
#include "paged_decode/attend.cuh"

namespace pagedkern {

// x a + y b, rounded the same in every kernel: the compiler is left no choice of what to fuse.
static __device__ __forceinline__ float weighted(float x, float a, float y, float b) {
  return fmaf(y, b, __fmul_rn(x, a));
}

// A row's share of a thread: kRowThreads of them have a row, each every kRowThreads-th four of its elements.
template <class Config>
struct RowShare {
  static constexpr int kFours = (Config::kDim / 4 + Config::kRowThreads - 1) / Config::kRowThreads;
  float reference = minus_infinity();  // -inf: nothing yet
  float sum = 0.0f;
  float4 out[kFours] = {};

  static __device__ __forceinline__ int row() { return threadIdx.x / Config::kRowThreads; }
  static __device__ __forceinline__ int element(int four) {
    return 4 * (threadIdx.x % Config::kRowThreads + four * Config::kRowThreads);
  }

  // The old sums and the new are brought to one reference: these are their factors.
  __device__ __forceinline__ float2 meet(float other) {
    const float both = fmaxf(reference, other);
    const float2 factors = {rescale_factor(reference, both), rescale_factor(other, both)};
    reference = both;
    return factors;
  }
  __device__ __forceinline__ void add(int four, float2 factors, float4 x) {
    float4& y = out[four];
    y = make_float4(weighted(y.x, factors.x, x.x, factors.y), weighted(y.y, factors.x, x.y, factors.y),
                    weighted(y.z, factors.x, x.z, factors.y), weighted(y.w, factors.x, x.w, factors.y));
  }
};

// Puts down what a warp has.
template <class Config>
static __device__ __forceinline__ void store_sums(PagedDecodeShared<Config>& shared, DecodeState<Config>& state,
                                                  int warp, int lane) {
#pragma unroll
  for (int c = 0; c < Config::kColumns; ++c) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* row = shared.sums[warp][c * 8 + lane % 4 * 2 + i];
#pragma unroll
      for (int m = 0; m < Config::kDim / 16; ++m) {
        if constexpr (Config::kFp8) {  // neighbours, see sum_values
          *reinterpret_cast<float2*>(row + m * 16 + lane / 4 * 2) =
              make_float2(state.out[m][c][i], state.out[m][c][2 + i]);
        } else {
          row[m * 16 + lane / 4] = state.out[m][c][i];
          row[m * 16 + 8 + lane / 4] = state.out[m][c][2 + i];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = rows_sum(state.sum[c][i]);
      if (lane >= 4) continue;
      const int row = c * 8 + lane * 2 + i;
      shared.sum[warp][row] = sum;
      shared.reference[warp][row] = state.limit[c][i] == minus_infinity() ? minus_infinity() : state.reference[c][i];
    }
  }
}

template <class Config>
static __device__ __forceinline__ void merge_warps(const PagedDecodeShared<Config>& shared, RowShare<Config>& row) {
  const int n = RowShare<Config>::row();
#pragma unroll
  for (int warp = 0; warp < Config::kWarps; ++warp) {
    const float2 factors = row.meet(shared.reference[warp][n]);
    row.sum = weighted(row.sum, factors.x, shared.sum[warp][n], factors.y);
#pragma unroll
    for (int i = 0; i < RowShare<Config>::kFours; ++i) {
      const int d = row.element(i);
      if (d < Config::kDim) row.add(i, factors, *reinterpret_cast<const float4*>(shared.sums[warp][n] + d));
    }
  }
}

template <class Config>
static __device__ __forceinline__ void store_partial(const PagedDecodeParams& p, const RowShare<Config>& row,
                                                     int64_t slot) {
  float* to = p.partials + slot * slot_floats(p.slot_rows, p.op.cache.head_dim);
  const int n = row.row();
  if (row.element(0) == 0) {
    to[2 * n] = row.reference;
    to[2 * n + 1] = row.sum;
  }
  to += 2 * p.slot_rows + static_cast<int64_t>(n) * p.op.cache.head_dim;
#pragma unroll
  for (int i = 0; i < RowShare<Config>::kFours; ++i) {
    const int d = row.element(i);
    if (d >= p.op.cache.head_dim) continue;
    *reinterpret_cast<float2*>(to + d) = make_float2(row.out[i].x, row.out[i].y);
    *reinterpret_cast<float2*>(to + d + 2) = make_float2(row.out[i].z, row.out[i].w);
  }
}

template <class Config>
static __device__ __forceinline__ void add_partial(const PagedDecodeParams& p, RowShare<Config>& row, int64_t slot) {
  const float* from = p.partials + slot * slot_floats(p.slot_rows, p.op.cache.head_dim);
  const int n = row.row();
  const float2 state = __ldcg(reinterpret_cast<const float2*>(from + 2 * n));
  const float2 factors = row.meet(state.x);
  row.sum = weighted(row.sum, factors.x, state.y, factors.y);
  from += 2 * p.slot_rows + static_cast<int64_t>(n) * p.op.cache.head_dim;
#pragma unroll
  for (int i = 0; i < RowShare<Config>::kFours; ++i) {
    const int d = row.element(i);
    if (d >= p.op.cache.head_dim) continue;
    const float2 low = __ldcg(reinterpret_cast<const float2*>(from + d));
    const float2 high = __ldcg(reinterpret_cast<const float2*>(from + d + 2));
    row.add(i, factors, make_float4(low.x, low.y, high.x, high.y));
  }
}

// One row of `out` and its lse.
template <class Config>
static __device__ __forceinline__ void store_row(const PagedDecodeParams& p, RowShare<Config>& row, int64_t token,
                                                 int32_t head, int32_t kv_head) {
  const PagedAttentionParams& op = p.op;
  if (op.sinks != nullptr) {  // one more weight, without a value
    const float2 factors = row.meet(op.sinks[head] * kLog2E);
    row.sum = weighted(row.sum, factors.x, 1.0f, factors.y);
#pragma unroll
    for (int i = 0; i < RowShare<Config>::kFours; ++i) row.add(i, factors, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
  }
  if (op.lse != nullptr && row.element(0) == 0) {
    op.lse[token * op.lse_stride_token + head * op.lse_stride_head] =
        row.sum == 0.0f ? minus_infinity() : (guarded_maximum(row.reference) + log2f(row.sum)) * kLn2;
  }
  float value_scale = 1.0f;
  if (Config::kFp8 && op.v_scale.data != nullptr && !op.v_scale.per_token()) {
    value_scale = op.v_scale.data[kv_head * op.v_scale.stride_head];
  }
  const float factor = row.sum == 0.0f ? 0.0f : __fdiv_rn(value_scale, row.sum);
  auto* to = static_cast<uint16_t*>(op.out) + token * op.out_stride_token + head * op.out_stride_head;
  const bool half = Config::kFp8 ? op.dtype == DType::kFloat16 : Config::kCache == DType::kFloat16;
#pragma unroll
  for (int i = 0; i < RowShare<Config>::kFours; ++i) {
    const int d = row.element(i);
    if (d >= op.cache.head_dim) continue;
    const float4 x = row.out[i];
    const float y[4] = {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
    const uint2 packed = half ? make_uint2(pack2<__half>(y[0], y[1]), pack2<__half>(y[2], y[3]))
                              : make_uint2(pack2<__nv_bfloat16>(y[0], y[1]), pack2<__nv_bfloat16>(y[2], y[3]));
    if (p.out_width == 8) {
      *reinterpret_cast<uint2*>(to + d) = packed;
    } else {
      to[d] = static_cast<uint16_t>(packed.x);
      to[d + 1] = static_cast<uint16_t>(packed.x >> 16);
      to[d + 2] = static_cast<uint16_t>(packed.y);
      to[d + 3] = static_cast<uint16_t>(packed.y >> 16);
    }
  }
}

// The part's rows from all warps, then, if it is the unit's last to be done, from all parts. Ends behind a barrier.
template <class Config>
static __device__ __forceinline__ void finish_part(const PagedDecodeParams& p, PagedDecodeShared<Config>& shared,
                                                   DecodeState<Config>& state, const Part& part, const Cut& cut) {
  store_sums(shared, state, threadIdx.x / 32, threadIdx.x % 32);
  __syncthreads();
  RowShare<Config> row;
  merge_warps(shared, row);
  const int32_t number = row.row();  // of the sequence's rows of this KV head
  const bool real = number < part.query_len * p.group;
  bool last = true;
  if (part.num_pieces < part.unit_pieces) {
    const PartPlaces places = places_of(p, part, cut, blockIdx.x);
    if (real) store_partial(p, row, places.mine);
    last = is_last_part(p, places, shared.split);
    if (last && real) {
      row = RowShare<Config>();
      add_partial(p, row, places.first_slot);
      int64_t slot = places.next_slots;
#pragma unroll 4
      for (int i = 1; i < places.parts; ++i, slot += places.step) add_partial(p, row, slot);
    }
  }
  if (last && real) {
    const int32_t token = number / p.group;
    const int32_t head = part.head * p.group + number - token * p.group;
    store_row(p, row, static_cast<int64_t>(part.query_begin) + token, head, part.head);
  }
  __syncthreads();
}

}  // namespace pagedkern
