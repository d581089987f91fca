#include "vgpu/tma_box.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "vgpu/tensor_types.h"

namespace pagedkern::vgpu {
namespace {

template <typename T>
T combine_integer(ReduceOp op, T memory, T operand) {
  using U = std::make_unsigned_t<T>;
  switch (op) {
    case ReduceOp::kAdd: return static_cast<T>(static_cast<U>(memory) + static_cast<U>(operand));
    case ReduceOp::kMin: return std::min(memory, operand);
    case ReduceOp::kMax: return std::max(memory, operand);
    case ReduceOp::kInc: return memory >= operand ? T{0} : static_cast<T>(memory + 1);
    case ReduceOp::kDec: return memory == 0 || memory > operand ? operand : static_cast<T>(memory - 1);
    case ReduceOp::kAnd: return memory & operand;
    case ReduceOp::kOr: return memory | operand;
    default: return memory ^ operand;
  }
}

// min and max of PTX: a NaN loses against a number, and -0 is below +0.
float combine_float(ReduceOp op, float memory, float operand) {
  if (op == ReduceOp::kAdd) return memory + operand;
  if (std::isnan(memory)) return operand;
  if (std::isnan(operand)) return memory;
  const bool memory_first = memory < operand || (memory == operand && std::signbit(memory));
  return (op == ReduceOp::kMin) == memory_first ? memory : operand;
}

template <typename T>
void reduce_integers(ReduceOp op, uint8_t* memory, const uint8_t* operand, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    T a, b;
    std::memcpy(&a, memory + i * sizeof(T), sizeof(T));
    std::memcpy(&b, operand + i * sizeof(T), sizeof(T));
    a = combine_integer(op, a, b);
    std::memcpy(memory + i * sizeof(T), &a, sizeof(T));
  }
}

template <typename Decode, typename Encode>
void reduce_halves(ReduceOp op, uint8_t* memory, const uint8_t* operand, uint32_t count, Decode decode, Encode encode) {
  for (uint32_t i = 0; i < count; ++i) {
    uint16_t a, b;
    std::memcpy(&a, memory + 2 * i, 2);
    std::memcpy(&b, operand + 2 * i, 2);
    const uint16_t result = encode(combine_float(op, decode(a), decode(b)));
    std::memcpy(memory + 2 * i, &result, 2);
  }
}

}  // namespace

std::vector<TmaRow> tma_rows(const TensorMap& m, const int32_t* coordinates) {
  const uint32_t element = static_cast<uint32_t>(tma_type_bytes(m.type));
  const uint32_t row_bytes = m.box[0] * element;
  const int64_t first = coordinates[0];
  const int64_t low = std::clamp<int64_t>(-first, 0, m.box[0]);
  const int64_t high = std::clamp<int64_t>(static_cast<int64_t>(m.dims[0]) - first, low, m.box[0]);
  std::array<uint32_t, kMaxTensorRank> count{1, 1, 1, 1, 1}, index{};
  uint32_t rows = 1;
  for (uint32_t d = 1; d < m.rank; ++d) rows *= count[d] = m.box_count(d);
  std::vector<TmaRow> out(rows);
  for (uint32_t r = 0; r < rows; ++r) {
    TmaRow& row = out[r];
    row.shared_offset = r * row_bytes;
    row.bytes = row_bytes;
    bool inside = low < high;
    uint64_t global = m.address + static_cast<uint64_t>(first + low) * element;
    for (uint32_t d = 1; d < m.rank; ++d) {
      const int64_t at = static_cast<int64_t>(coordinates[d]) + static_cast<int64_t>(index[d]) * m.element_strides[d];
      inside = inside && at >= 0 && at < static_cast<int64_t>(m.dims[d]);
      global += static_cast<uint64_t>(at) * m.strides[d - 1];
    }
    if (inside) {
      row.begin = static_cast<uint32_t>(low) * element;
      row.end = static_cast<uint32_t>(high) * element;
      row.global = global;
    }
    for (uint32_t d = 1; d < m.rank && ++index[d] == count[d]; ++d) index[d] = 0;
  }
  return out;
}

uint64_t tma_fill_element(const TensorMap& m) {
  if (!m.nan_fill) return 0;
  switch (tma_type_bytes(m.type)) {
    case 2: return 0x7fff;
    case 4: return 0x7fffffff;
    default: return 0x7fffffffffffffff;
  }
}

void tma_convert_loaded(const TensorMap& m, uint8_t* bytes, uint32_t count) {
  if (m.type != TmaType::kF32Ftz) return;
  for (uint32_t i = 0; i + 4 <= count; i += 4) {
    uint32_t word;
    std::memcpy(&word, bytes + i, 4);
    if ((word & 0x7f800000u) == 0) word &= 0x80000000u;
    std::memcpy(bytes + i, &word, 4);
  }
}

int reduce_type_bytes(ReduceType t) {
  switch (t) {
    case ReduceType::kF16:
    case ReduceType::kBF16: return 2;
    case ReduceType::kU64:
    case ReduceType::kS64:
    case ReduceType::kF64:
    case ReduceType::kB64: return 8;
    default: return 4;
  }
}

bool bulk_reduce_supported(ReduceOp op, ReduceType t) {
  switch (op) {
    case ReduceOp::kAdd: return t != ReduceType::kB32 && t != ReduceType::kB64 && t != ReduceType::kS64;
    case ReduceOp::kMin:
    case ReduceOp::kMax: return t <= ReduceType::kBF16;
    case ReduceOp::kInc:
    case ReduceOp::kDec: return t == ReduceType::kU32;
    default: return t == ReduceType::kB32 || t == ReduceType::kB64;
  }
}

bool tma_reduce_type(TmaType type, ReduceOp op, ReduceType& out) {
  const bool bits = op == ReduceOp::kAnd || op == ReduceOp::kOr || op == ReduceOp::kXor;
  switch (type) {
    case TmaType::kU32: out = bits ? ReduceType::kB32 : ReduceType::kU32; break;
    case TmaType::kS32: out = bits ? ReduceType::kB32 : ReduceType::kS32; break;
    case TmaType::kU64: out = bits ? ReduceType::kB64 : ReduceType::kU64; break;
    case TmaType::kS64:  // two's complement sums are those of u64
      out = bits ? ReduceType::kB64 : op == ReduceOp::kAdd ? ReduceType::kU64 : ReduceType::kS64;
      break;
    case TmaType::kF16: out = ReduceType::kF16; break;
    case TmaType::kBF16: out = ReduceType::kBF16; break;
    case TmaType::kF32: out = ReduceType::kF32; break;
    case TmaType::kF64: out = ReduceType::kF64; break;
    default: return false;
  }
  return bulk_reduce_supported(op, out);
}

void bulk_reduce(ReduceOp op, ReduceType type, uint8_t* memory, const uint8_t* operand, uint32_t count) {
  switch (type) {
    case ReduceType::kU32:
    case ReduceType::kB32: return reduce_integers<uint32_t>(op, memory, operand, count);
    case ReduceType::kS32: return reduce_integers<int32_t>(op, memory, operand, count);
    case ReduceType::kU64:
    case ReduceType::kB64: return reduce_integers<uint64_t>(op, memory, operand, count);
    case ReduceType::kS64: return reduce_integers<int64_t>(op, memory, operand, count);
    case ReduceType::kF16: return reduce_halves(op, memory, operand, count, half_bits_to_float, float_to_half_bits);
    case ReduceType::kBF16:
      return reduce_halves(op, memory, operand, count, bfloat_bits_to_float, float_to_bfloat_bits);
    case ReduceType::kF32:
      for (uint32_t i = 0; i < count; ++i) {
        float a, b;
        std::memcpy(&a, memory + 4 * i, 4);
        std::memcpy(&b, operand + 4 * i, 4);
        a = combine_float(op, a, b);
        std::memcpy(memory + 4 * i, &a, 4);
      }
      return;
    case ReduceType::kF64:
      for (uint32_t i = 0; i < count; ++i) {
        double a, b;
        std::memcpy(&a, memory + 8 * i, 8);
        std::memcpy(&b, operand + 8 * i, 8);
        a += b;
        std::memcpy(memory + 8 * i, &a, 8);
      }
      return;
  }
}

}  // namespace pagedkern::vgpu
