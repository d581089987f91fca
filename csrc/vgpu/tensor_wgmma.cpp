#include "vgpu/tensor_wgmma.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vgpu/tensor_gemm.h"

namespace pagedkern::vgpu {
namespace {

constexpr int kChunk = 16;
constexpr int kRows = kTensorRows;
constexpr int kMaxN = 256;
constexpr int kMaxK = 32;

// Element (mn, k) of a matrix in panels of eight along mn, or row major along k.
struct PanelOrder {
  int k_count;
  int operator()(int mn, int k) const { return ((mn / kPanel) * k_count + k) * kPanel + mn % kPanel; }
};
struct RowOrder {
  int k_count;
  int operator()(int mn, int k) const { return mn * k_count + k; }
};

template <typename T, typename Order, typename Convert>
void unpack_elements(bool transposed, int count, int k, const uint8_t* chunks, float sign, Order order, float* out,
                     Convert convert) {
  constexpr int kPerChunk = kChunk / static_cast<int>(sizeof(T));
  T in[kPerChunk];
  const int outer_count = transposed ? k : count, inner_count = transposed ? count : k;
  for (int outer = 0; outer < outer_count; ++outer) {
    for (int inner = 0; inner < inner_count; inner += kPerChunk, chunks += kChunk) {
      std::memcpy(in, chunks, kChunk);
      const int step = transposed ? order(1, 0) : order(0, 1);
      float* to = out + (transposed ? order(inner, outer) : order(outer, inner));
      for (int i = 0; i < kPerChunk; ++i) to[i * step] = sign * convert(in[i]);
    }
  }
}

template <typename Order>
void unpack(TensorType type, bool transposed, int count, int k, const uint8_t* chunks, bool negate, Order order,
            float* out) {
  const float sign = negate ? -1.0f : 1.0f;
  switch (type) {
    case TensorType::kF16:
      return unpack_elements<uint16_t>(transposed, count, k, chunks, sign, order, out,
                                       [](auto x) { return half_bits_to_float(x); });
    case TensorType::kBF16:
      return unpack_elements<uint16_t>(transposed, count, k, chunks, sign, order, out,
                                       [](auto x) { return bfloat_bits_to_float(x); });
    case TensorType::kTF32:
      return unpack_elements<uint32_t>(transposed, count, k, chunks, sign, order, out,
                                       [](auto x) { return tf32_bits_to_float(x); });
    case TensorType::kE4M3:
      return unpack_elements<uint8_t>(transposed, count, k, chunks, sign, order, out,
                                      [](auto x) { return e4m3_bits_to_float(x); });
    case TensorType::kE5M2:
      return unpack_elements<uint8_t>(transposed, count, k, chunks, sign, order, out,
                                      [](auto x) { return e5m2_bits_to_float(x); });
    case TensorType::kS8:
      return unpack_elements<int8_t>(transposed, count, k, chunks, sign, order, out,
                                     [](int8_t x) { return static_cast<float>(x); });
    default:
      return unpack_elements<uint8_t>(transposed, count, k, chunks, sign, order, out,
                                      [](uint8_t x) { return static_cast<float>(x); });
  }
}

}  // namespace

WgmmaDescriptor WgmmaDescriptor::decode(uint64_t bits) {
  const auto field = [bits](int at) { return static_cast<uint32_t>((bits >> at) & 0x3fff) << 4; };
  WgmmaDescriptor d;
  d.start = field(0);
  d.leading_offset = field(16);
  d.stride_offset = field(32);
  d.base_offset = static_cast<uint32_t>((bits >> 49) & 7);
  d.swizzle = static_cast<SmemSwizzle>(bits >> 62);
  constexpr uint64_t kReserved = (3ull << 14) | (3ull << 30) | (7ull << 46) | (0x3ffull << 52);
  d.reserved_bits = (bits & kReserved) != 0;
  return d;
}

bool wgmma_supported(const WgmmaForm& f) {
  if (f.n < 8 || f.n > kMaxN || f.n % 8 != 0) return false;
  if (f.k * tensor_type_bytes(f.a) != 32) return false;
  const auto is_fp8 = [](TensorType t) { return t == TensorType::kE4M3 || t == TensorType::kE5M2; };
  const auto is_int8 = [](TensorType t) { return t == TensorType::kS8 || t == TensorType::kU8; };
  const bool half = f.a == f.b && (f.a == TensorType::kF16 || f.a == TensorType::kBF16);
  if ((f.a_transposed || f.b_transposed) && !half) return false;
  if (is_int8(f.a)) {
    const bool n_listed = f.n == 8 || f.n == 24 || f.n % 16 == 0;
    return is_int8(f.b) && n_listed && f.accumulator == TensorType::kS32 && !f.negate_a && !f.negate_b;
  }
  if (f.saturate) return false;
  if (f.accumulator == TensorType::kF16) return (half && f.a == TensorType::kF16) || (is_fp8(f.a) && is_fp8(f.b));
  if (f.accumulator != TensorType::kF32) return false;
  return half || (is_fp8(f.a) && is_fp8(f.b)) || (f.a == TensorType::kTF32 && f.b == TensorType::kTF32);
}

int wgmma_accumulator_registers(const WgmmaForm& f) {
  return f.accumulator == TensorType::kF16 ? f.n / 4 : f.n / 2;
}

// In units of 16-byte chunks both majors are grids of 8 x span core blocks; they differ in which of the two offsets
// leads along which dimension (PTX ISA, wgmma shared-memory matrix layout, canonical layouts).
int wgmma_chunk_addresses(const WgmmaDescriptor& d, TensorType type, bool transposed, int first, int count, int k,
                          uint32_t* out) {
  const uint32_t span = smem_swizzle_span(d.swizzle);
  const bool plain = d.swizzle == SmemSwizzle::kNone;
  const auto place = [&](uint32_t offset) {
    return smem_swizzle((d.start + offset) & 0x3ffffu, d.swizzle, d.base_offset);
  };
  int written = 0;
  if (!transposed) {
    const uint32_t per_row = static_cast<uint32_t>(k * tensor_type_bytes(type) / kChunk);
    const uint32_t step = plain ? d.leading_offset : kChunk;
    for (uint32_t row = first; row < static_cast<uint32_t>(first + count); ++row) {
      const uint32_t base = row / 8 * d.stride_offset + row % 8 * span;
      for (uint32_t c = 0; c < per_row; ++c) out[written++] = place(base + c * step);
    }
    return written;
  }
  const uint32_t begin = static_cast<uint32_t>(first * tensor_type_bytes(type) / kChunk);
  const uint32_t end = begin + static_cast<uint32_t>(count * tensor_type_bytes(type) / kChunk);
  const uint32_t per_block = span / kChunk;
  const uint32_t block_offset = plain ? d.stride_offset : d.leading_offset;
  const uint32_t eight_steps = plain ? d.leading_offset : d.stride_offset;
  for (uint32_t step = 0; step < static_cast<uint32_t>(k); ++step) {
    const uint32_t base = step / 8 * eight_steps + step % 8 * span;
    for (uint32_t c = begin; c < end; ++c) {
      out[written++] = place(base + c / per_block * block_offset + c % per_block * kChunk);
    }
  }
  return written;
}

void wgmma_unpack_a(TensorType type, bool transposed, int count, int k, const uint8_t* chunks, bool negate,
                    float* out) {
  unpack(type, transposed, count, k, chunks, negate, RowOrder{k}, out);
}

void wgmma_unpack_b(TensorType type, bool transposed, int count, int k, const uint8_t* chunks, bool negate,
                    float* out) {
  unpack(type, transposed, count, k, chunks, negate, PanelOrder{k}, out);
}

void wgmma_rows(const WgmmaForm& f, const float* a, const float* b, bool accumulate, LaneWords* d) {
  if (f.accumulator == TensorType::kS32) {
    thread_local int32_t ia[kRows * kMaxK], ib[kMaxK * kMaxN], ic[kRows * kMaxN];
    for (int i = 0; i < kRows * f.k; ++i) ia[i] = static_cast<int32_t>(a[i]);
    for (int i = 0; i < f.k * f.n; ++i) ib[i] = static_cast<int32_t>(b[i]);
    if (accumulate) {
      unpack_accumulator(f.n, d, ic);
    } else {
      std::fill_n(ic, kRows * f.n, 0);
    }
    tensor_accumulate(ic, ia, ib, f.n / kPanel, f.k, f.saturate);
    pack_accumulator(f.n, ic, d);
    return;
  }
  thread_local float c[kRows * kMaxN];
  if (accumulate) {
    unpack_accumulator(f.accumulator, f.n, d, c);
  } else {
    std::fill_n(c, kRows * f.n, 0.0f);
  }
  tensor_accumulate(c, a, b, f.n / kPanel, f.k);
  pack_accumulator(f.accumulator, f.n, c, d);
}

}  // namespace pagedkern::vgpu
