// merge_attention_states: two partial results of the same rows, weighed by their lse.
#pragma once

#include <type_traits>

#include "common/elements.cuh"
#include "common/fast_divide.h"
#include "merge_states/config.h"
#include "merge_states/params.h"

namespace pagedkern {

struct MergeStatesKernelParams : MergeStatesParams {
  int64_t num_rows;      // num_tokens * num_heads
  FastDivide heads;      // of row numbers below 2^31
  int32_t lanes_of_row;  // a power of two
  int32_t rows_of_lane;  // up to kMergeRows
};

struct RowPlace {
  int64_t token, head;
};

// What two lse make of their parts.
struct MergeWeights {
  bool a_empty, b_empty;
  float a, b;
  float lse;

  __device__ __forceinline__ MergeWeights(float lse_a, float lse_b)
      : a_empty(isinf(lse_a)), b_empty(isinf(lse_b)), a(0.0f), b(0.0f) {
    if (a_empty || b_empty) {  // no key at all, or a backend's mark for that
      lse = !a_empty ? lse_a : !b_empty ? lse_b : -INFINITY;
      return;
    }
    const bool a_leads = lse_a > lse_b;
    const float lesser = expf(a_leads ? lse_b - lse_a : lse_a - lse_b);
    const float of_leader = __fdividef(1.0f, 1.0f + lesser), of_lesser = lesser * of_leader;
    a = a_leads ? of_leader : of_lesser;
    b = a_leads ? of_lesser : of_leader;
    lse = (a_leads ? lse_a : lse_b) + log1pf(lesser);
  }

  // Those of another lane, but for the lse. All lanes of a warp call it.
  __device__ __forceinline__ MergeWeights of_lane(int lane) const {
    constexpr unsigned kAll = 0xFFFFFFFFu;
    const int empty = __shfl_sync(kAll, (a_empty ? 1 : 0) | (b_empty ? 2 : 0), lane);
    MergeWeights other = *this;
    other.a_empty = (empty & 1) != 0;
    other.b_empty = (empty & 2) != 0;
    other.a = __shfl_sync(kAll, a, lane);
    other.b = __shfl_sync(kAll, b, lane);
    return other;
  }
};

// A part that stands alone keeps its bits where the types agree.
template <class Out, class In, int kCount>
static __device__ __forceinline__ void store_alone(const Chunk<In, kCount>& part, Out* out) {
  if constexpr (std::is_same_v<Out, In>) {
    part.store(out);
  } else {
    float x[kCount];
    part.get(x);
    Chunk<Out, kCount> rounded;
    rounded.set(x);
    rounded.store(out);
  }
}

template <class Out, class A, class B, int kCount>
static __device__ __forceinline__ void store_merged(const MergeWeights& weights, const Chunk<A, kCount>& a,
                                                    const Chunk<B, kCount>& b, Out* out) {
  if (weights.b_empty && !weights.a_empty) {
    store_alone(a, out);
  } else if (weights.a_empty && !weights.b_empty) {
    store_alone(b, out);
  } else {
    float x[kCount] = {}, y[kCount] = {};
    if (!weights.a_empty) {
      a.get(x);
      b.get(y);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = weights.a * x[i] + weights.b * y[i];
    Chunk<Out, kCount> merged;
    merged.set(x);
    merged.store(out);
  }
}

// Rows that a lane has at a time: with two parts of each eight loads are in flight, and 32 lanes' lse fill a sector.
constexpr int kMergeRows = 4;

// grid [min(rows over those of a block, kMaxBlocks)]. lanes_of_row lanes of a warp take a row, kCount elements at a
// time, rows_of_lane rows one after the other. out and lse may be one of the inputs: everything a thread reads it reads
// before it writes, and a row's lse is read before the only lane that writes it does.
template <class Out, class A, class B, int kCount>
__global__ void __launch_bounds__(MergeStatesConfig::kThreads)
    merge_attention_states_kernel(const __grid_constant__ MergeStatesKernelParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32, in_row = lane & (p.lanes_of_row - 1);
  const int rows_at_once = 32 / p.lanes_of_row;
  const int64_t rows_of_warp = static_cast<int64_t>(rows_at_once) * p.rows_of_lane;  // 32 at most
  const int64_t step = gridDim.x * (MergeStatesConfig::kThreads / 32) * rows_of_warp;
  const auto place = [&p](int64_t row) {
    const int64_t token = p.num_rows >> 31 == 0 ? p.heads(static_cast<uint32_t>(row)) : row / p.num_heads;
    return RowPlace{token, row - token * p.num_heads};
  };
  // Lanes of a warp go round together.
  const int64_t warp = blockIdx.x * (MergeStatesConfig::kThreads / 32) + threadIdx.x / 32;
  for (int64_t base = warp * rows_of_warp; base < p.num_rows; base += step) {
    // Lane i reads, and writes, the lse of the warp's row i.
    const bool has_lse = lane < rows_of_warp && base + lane < p.num_rows;
    const RowPlace lse_row = place(base + lane);
    float lse_a = 0.0f, lse_b = 0.0f;
    if (has_lse) {
      lse_a = p.lse_a[lse_row.token * p.lse_a_stride_token + lse_row.head * p.lse_a_stride_head];
      lse_b = p.lse_b[lse_row.token * p.lse_b_stride_token + lse_row.head * p.lse_b_stride_head];
    }
    Chunk<A, kCount> a[kMergeRows];
    Chunk<B, kCount> b[kMergeRows];
    const A* a_row[kMergeRows];
    const B* b_row[kMergeRows];
    Out* out_row[kMergeRows];
    int left[kMergeRows];  // elements from the lane's own on
#pragma unroll
    for (int u = 0; u < kMergeRows; ++u) {
      const int64_t row = base + u * rows_at_once + lane / p.lanes_of_row;
      const RowPlace r = place(row);
      const int first = in_row * kCount;
      left[u] = u < p.rows_of_lane && row < p.num_rows ? p.head_dim - first : 0;
      a_row[u] = static_cast<const A*>(p.out_a) + r.token * p.a_stride_token + r.head * p.a_stride_head + first;
      b_row[u] = static_cast<const B*>(p.out_b) + r.token * p.b_stride_token + r.head * p.b_stride_head + first;
      out_row[u] = static_cast<Out*>(p.out) + r.token * p.out_stride_token + r.head * p.out_stride_head + first;
      if (left[u] <= 0) continue;
      a[u].load(a_row[u]);
      b[u].load(b_row[u]);
    }
    const MergeWeights of_lse(lse_a, lse_b);
    if (has_lse && p.lse != nullptr) {
      p.lse[lse_row.token * p.lse_stride_token + lse_row.head * p.lse_stride_head] = of_lse.lse;
    }
#pragma unroll
    for (int u = 0; u < kMergeRows; ++u) {
      const MergeWeights weights = of_lse.of_lane((u * rows_at_once + lane / p.lanes_of_row) & 31);
      for (int done = 0; done < left[u]; done += p.lanes_of_row * kCount) {
        if (done > 0) {
          a[u].load(a_row[u] + done);
          b[u].load(b_row[u] + done);
        }
        store_merged(weights, a[u], b[u], out_row[u] + done);
      }
    }
  }
}

}  // namespace pagedkern
