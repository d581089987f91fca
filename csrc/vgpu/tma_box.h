// The walk of a tensor map's box: which bytes of global memory meet which bytes of shared memory.
#pragma once

#include <cstdint>
#include <vector>

#include "vgpu/tma_map.h"

namespace pagedkern::vgpu {

// One row of the box, along the innermost dimension. Bytes [begin, end) of the row lie inside the tensor, the first
// of them at `global`; the others (all of them where begin == end) are filled on loads and skipped on stores.
struct TmaRow {
  uint32_t shared_offset = 0;  // of the row's first byte, before the swizzle
  uint32_t bytes = 0;
  uint32_t begin = 0, end = 0;
  uint64_t global = 0;
};

// Rows in the order they lie in shared memory. coordinates: one per dimension, innermost first, of any sign.
std::vector<TmaRow> tma_rows(const TensorMap& map, const int32_t* coordinates);

// The element a load writes where the box leaves the tensor: `bytes` long, little endian.
uint64_t tma_fill_element(const TensorMap& map);

// Loads convert in flight where the type says so (f32.ftz flushes subnormals); the rest is copied as it is.
void tma_convert_loaded(const TensorMap& map, uint8_t* bytes, uint32_t count);

enum class ReduceOp : uint8_t { kAdd, kMin, kMax, kInc, kDec, kAnd, kOr, kXor };
enum class ReduceType : uint8_t { kU32, kS32, kU64, kS64, kF16, kBF16, kF32, kF64, kB32, kB64 };

int reduce_type_bytes(ReduceType type);
// Whether the bulk reductions of sm_90 have `op` on `type`.
bool bulk_reduce_supported(ReduceOp op, ReduceType type);
// The type a tensor reduction computes in; false where the map's type has no reductions.
bool tma_reduce_type(TmaType type, ReduceOp op, ReduceType& out);
// *memory = op(*memory, *operand) for `count` elements, in order. Float sums round to nearest even.
void bulk_reduce(ReduceOp op, ReduceType type, uint8_t* memory, const uint8_t* operand, uint32_t count);

}  // namespace pagedkern::vgpu
