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

// grid [min(rows over those of a block, kMaxBlocks)]. lanes_of_row lanes of a warp take a row, kCount elements at a
// time. out and lse may be one of the inputs: everything a thread reads it reads before it writes, and the lanes of a
// row have all read its lse before it is written.
template <class Out, class A, class B, int kCount>
__global__ void __launch_bounds__(MergeStatesConfig::kThreads)
    merge_attention_states_kernel(const __grid_constant__ MergeStatesKernelParams p) {
  const int lane = static_cast<int>(threadIdx.x) & (p.lanes_of_row - 1);
  const int64_t rows_of_block = MergeStatesConfig::kThreads / p.lanes_of_row;
  const int64_t rows_of_warp = 32 / p.lanes_of_row;
  const int64_t step = gridDim.x * rows_of_block;
  // Lanes of a warp go round together.
  for (int64_t base = blockIdx.x * rows_of_block + threadIdx.x / 32 * rows_of_warp; base < p.num_rows; base += step) {
    const int64_t row = base + threadIdx.x % 32 / p.lanes_of_row;
    const bool inside = row < p.num_rows;
    const int64_t token = p.num_rows >> 31 == 0 ? p.heads(static_cast<uint32_t>(row)) : row / p.num_heads;
    const int64_t head = row - token * p.num_heads;
    const A* a_row = static_cast<const A*>(p.out_a) + token * p.a_stride_token + head * p.a_stride_head;
    const B* b_row = static_cast<const B*>(p.out_b) + token * p.b_stride_token + head * p.b_stride_head;
    Out* out_row = static_cast<Out*>(p.out) + token * p.out_stride_token + head * p.out_stride_head;
    const int head_dim = inside ? p.head_dim : 0;
    int element = lane * kCount;
    Chunk<A, kCount> a;
    Chunk<B, kCount> b;
    float lse_a = 0.0f, lse_b = 0.0f;
    if (element < head_dim) {
      a.load(a_row + element);
      b.load(b_row + element);
    }
    if (inside) {
      lse_a = p.lse_a[token * p.lse_a_stride_token + head * p.lse_a_stride_head];
      lse_b = p.lse_b[token * p.lse_b_stride_token + head * p.lse_b_stride_head];
    }
    __syncwarp();
    const MergeWeights weights(lse_a, lse_b);
    while (element < head_dim) {
      store_merged(weights, a, b, out_row + element);
      element += p.lanes_of_row * kCount;
      if (element >= head_dim) break;
      a.load(a_row + element);
      b.load(b_row + element);
    }
    if (inside && lane == 0 && p.lse != nullptr) {
      p.lse[token * p.lse_stride_token + head * p.lse_stride_head] = weights.lse;
    }
  }
}

}  // namespace pagedkern
