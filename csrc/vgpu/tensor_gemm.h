// The inner loops of the tensor-core families: sixteen rows of a product, columns in panels of eight.
#pragma once

#include <cstdint>

namespace pagedkern::vgpu {

constexpr int kTensorRows = 16;
constexpr int kPanel = 8;

// Row i, column 8 p + j of C lies at c[(p * 16 + i) * 8 + j], element (k, 8 p + j) of B at b[(p * depth + k) * 8 + j],
// A is row major, 16 x depth.
// c = fma(a, b, c) for k ascending: float32 sums in k order of exact products, the same on every host.
void tensor_accumulate(float* c, const float* a, const float* b, int panels, int depth);

// The same in 32-bit integers; the k sums are exact, adding them to c wraps or saturates once.
void tensor_accumulate(int32_t* c, const int32_t* a, const int32_t* b, int panels, int depth, bool saturate);

}  // namespace pagedkern::vgpu
