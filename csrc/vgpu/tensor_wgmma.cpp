#include "vgpu/tensor_wgmma.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vgpu/tensor_gemm.h"

namespace pagedkern::vgpu {
namespace {

constexpr int kChunk = 16;
constexpr int kRows = 16;
constexpr int kMaxN = 256;
constexpr int kMaxK = 32;

template <typename Load>
void unpack_with(bool transposed, bool b_order, int mn, int k, int bytes, const uint8_t* chunks, Load load,
                 float* out) {
  for (int outer = 0; outer < (transposed ? k : mn); ++outer) {
    const int inner_count = transposed ? mn : k;
    const uint8_t* row = chunks + static_cast<size_t>(outer) * inner_count * bytes;
    const bool along_row = transposed == b_order;  // the contiguous dimension of memory is that of the output
    float* to = out + (along_row ? outer * inner_count : outer);
    const int step = along_row ? 1 : (b_order ? mn : k);
    for (int i = 0; i < inner_count; ++i) to[i * step] = load(row + i * bytes);
  }
}

void unpack(TensorType type, bool transposed, bool b_order, int mn, int k, const uint8_t* chunks, bool negate,
            float* out) {
  const auto half = [](const uint8_t* p) {
    uint16_t v;
    std::memcpy(&v, p, 2);
    return v;
  };
  switch (type) {
    case TensorType::kF16:
      unpack_with(transposed, b_order, mn, k, 2, chunks, [&](auto* p) { return half_bits_to_float(half(p)); }, out);
      break;
    case TensorType::kBF16:
      unpack_with(transposed, b_order, mn, k, 2, chunks, [&](auto* p) { return bfloat_bits_to_float(half(p)); }, out);
      break;
    case TensorType::kTF32:
      unpack_with(
          transposed, b_order, mn, k, 4, chunks,
          [](auto* p) {
            uint32_t v;
            std::memcpy(&v, p, 4);
            return tf32_bits_to_float(v);
          },
          out);
      break;
    case TensorType::kE4M3:
      unpack_with(transposed, b_order, mn, k, 1, chunks, [](auto* p) { return e4m3_bits_to_float(*p); }, out);
      break;
    case TensorType::kE5M2:
      unpack_with(transposed, b_order, mn, k, 1, chunks, [](auto* p) { return e5m2_bits_to_float(*p); }, out);
      break;
    case TensorType::kS8:
      unpack_with(
          transposed, b_order, mn, k, 1, chunks, [](auto* p) { return static_cast<float>(static_cast<int8_t>(*p)); },
          out);
      break;
    default:
      unpack_with(transposed, b_order, mn, k, 1, chunks, [](auto* p) { return static_cast<float>(*p); }, out);
      break;
  }
  if (negate) {
    for (int i = 0; i < mn * k; ++i) out[i] = -out[i];
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
void wgmma_chunk_addresses(const WgmmaDescriptor& d, TensorType type, bool transposed, int mn, int k,
                           std::vector<uint32_t>& out) {
  const uint32_t span = smem_swizzle_span(d.swizzle);
  const bool plain = d.swizzle == SmemSwizzle::kNone;
  const auto place = [&](uint32_t offset) {
    return smem_swizzle((d.start + offset) & 0x3ffffu, d.swizzle, d.base_offset);
  };
  out.clear();
  if (!transposed) {
    const int per_row = k * tensor_type_bytes(type) / kChunk;
    for (int row = 0; row < mn; ++row) {
      const uint32_t base = static_cast<uint32_t>(row / 8) * d.stride_offset + static_cast<uint32_t>(row % 8) * span;
      for (int c = 0; c < per_row; ++c) out.push_back(place(base + c * (plain ? d.leading_offset : kChunk)));
    }
    return;
  }
  const int per_step = mn * tensor_type_bytes(type) / kChunk;
  const int per_block = static_cast<int>(span) / kChunk;
  const uint32_t block_offset = plain ? d.stride_offset : d.leading_offset;
  const uint32_t eight_steps = plain ? d.leading_offset : d.stride_offset;
  for (int step = 0; step < k; ++step) {
    const uint32_t base = static_cast<uint32_t>(step / 8) * eight_steps + static_cast<uint32_t>(step % 8) * span;
    for (int c = 0; c < per_step; ++c) {
      out.push_back(place(base + static_cast<uint32_t>(c / per_block) * block_offset +
                          static_cast<uint32_t>(c % per_block) * kChunk));
    }
  }
}

void wgmma_unpack_b(TensorType type, bool transposed, int mn, int k, const uint8_t* chunks, bool negate, float* out) {
  unpack(type, transposed, true, mn, k, chunks, negate, out);
}

void wgmma_unpack_a(TensorType type, bool transposed, int mn, int k, const uint8_t* chunks, bool negate, float* out) {
  unpack(type, transposed, false, mn, k, chunks, negate, out);
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
    tensor_accumulate(ic, ia, ib, kRows, f.n, f.k, f.saturate);
    pack_accumulator(f.n, ic, d);
    return;
  }
  thread_local float c[kRows * kMaxN];
  if (accumulate) {
    unpack_accumulator(f.accumulator, f.n, d, c);
  } else {
    std::fill_n(c, kRows * f.n, 0.0f);
  }
  tensor_accumulate(c, a, b, kRows, f.n, f.k);
  pack_accumulator(f.accumulator, f.n, c, d);
}

}  // namespace pagedkern::vgpu
