// Linear layers over weights in groups of 4 or 8 bits, for csrc/cpu.
//
// A group is 32 weights of one output that are next to each other; each is value * scale, plus minimum in 4 bits. A
// panel is 16 outputs side by side, in the order in which the kernel reads it: [panels, groups, bytes]
//   4 bits: 16 x float16 scale, 16 x float16 minimum, 16 x int16 sum of the group's values, then 4 times 16 words (one
//           per output) of 4 bytes: word i of an output has its values 4i to 4i + 3 in the low nibbles and 16 + 4i to
//           19 + 4i in the high ones
//   8 bits: 16 x float16 scale, 16 x int16 sum, then 8 times 16 words: word i of an output has its values 4i to 4i + 3
// Outputs that fill up the last panel have scale 0.
#pragma once

#include <cstdint>

#include "common/dtypes.h"

namespace pagedkern {

constexpr int64_t kPanelOutputs = 16;
constexpr int64_t kQuantGroup = 32;

enum class QuantFormat : int32_t { k4Bit, k8Bit };

constexpr int64_t group_bytes(QuantFormat format) {
  return format == QuantFormat::k4Bit ? 96 + 256 : 64 + 512;
}

// out = y, or out += y, with y = norm(x) W^T + bias; gated: y = silu(first half of the outputs) * second half.
struct QuantizedLinear {
  const void* x;  // [num_rows, in_features]
  void* out;      // [num_rows, out_features], gated: half as wide; shares no memory with x
  const uint8_t* weight;
  const float* norm;  // [in_features], RMSNorm's weight, or null: x is taken as it is
  const float* bias;  // [out_features] or null
  int64_t in_features;
  int64_t out_features;
  int64_t x_stride;    // elements, from row to row
  int64_t out_stride;  // elements, from row to row
  DType x_dtype;
  DType out_dtype;
  QuantFormat format;
  bool accumulate;
  bool gated;
};

// Runs the linears one after the other: one may read what another before it wrote.
struct QuantizedLinearsParams {
  const QuantizedLinear* linears;  // [num_linears]
  int64_t num_linears;
  int64_t num_rows;
  float eps;  // of the RMSNorms
};

}  // namespace pagedkern
