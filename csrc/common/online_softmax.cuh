// Online softmax in base 2 with IEEE minus infinity: no finite stand-in, every exponential guarded.
#pragma once

#include "arch/convert.cuh"

namespace pagedkern {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

static __device__ __forceinline__ float minus_infinity() {
  return __int_as_float(0xFF800000);
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
