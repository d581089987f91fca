// Online softmax in base 2 with IEEE minus infinity: no finite stand-in, every exponential guarded.
#pragma once

#include "arch/convert.cuh"

namespace pagedkern {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

static __device__ __forceinline__ float minus_infinity() {
  return __int_as_float(0xFF800000);
}

// Larger scores, to base 2, are so coarse that a margin, or a scale's part, would be lost in their rounding.
constexpr float kExactScores = 1048576.0f;

// What weights are relative to: `margin` less than the greatest score, where float32 takes that off exactly, so that
// small weights stay above the subnormal numbers of float16.
static __device__ __forceinline__ float below_maximum(float maximum, float margin) {
  return fabsf(maximum) < kExactScores ? __fsub_rn(maximum, margin) : maximum;
}

// Of a weight with its value's scale, as a score: what the maximum follows where weights are multiplied by scales, so
// that they keep the range of float16 at any scale.
static __device__ __forceinline__ float scaled_score(float score, float value_scale) {
  return fabsf(score) < kExactScores ? score + __log2f(fabsf(value_scale)) : score;
}

// From a product to a score, as a factor: of positive numbers, in an order that loses none of them. Not 0, by which a
// masked score of -inf would become NaN.
static __device__ __forceinline__ float score_factor(double scale, double k_scale, double row_factor) {
  return fmaxf(static_cast<float>(scale * k_scale * row_factor), 1.17549435e-38f);
}

// What is subtracted before the exponential: the maximum, or 0 where there is no finite score (-inf - 0 is -inf).
static __device__ __forceinline__ float guarded_maximum(float maximum) {
  return maximum == minus_infinity() ? 0.0f : maximum;
}

// The factor that brings sums relative to `from` to the maximum `to` >= from; 0 where `from` is -inf.
static __device__ __forceinline__ float rescale_factor(float from, float to) {
  return exp2_approx(from - guarded_maximum(to));
}

// Natural logarithm of sum * 2^maximum; -inf for an empty row.
static __device__ __forceinline__ float natural_lse(float maximum, float sum) {
  return maximum == minus_infinity() ? maximum : (maximum + log2f(sum)) * kLn2;
}

// Over the four lanes that share a row of an mma result.
static __device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}
static __device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

}  // namespace pagedkern
