// The inner loops of the tensor-core families.
#pragma once

#include <cstdint>

namespace pagedkern::vgpu {

// c[i][j] = fma(a[i][k], b[k][j], c[i][j]) for k ascending: float32 sums in k order, every product exact.
// All matrices are row major and dense: a is m x k, b is k x n, c is m x n; n is a multiple of 8.
// The result is the same on every host.
void tensor_accumulate(float* c, const float* a, const float* b, int m, int n, int k);

// The same in 32-bit integers; the k sums are exact, adding them to c wraps or saturates once.
void tensor_accumulate(int32_t* c, const int32_t* a, const int32_t* b, int m, int n, int k, bool saturate);

}  // namespace pagedkern::vgpu
