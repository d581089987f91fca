#include "vgpu/tensor_mma.h"

#include <bit>
#include <cstdint>

#include "vgpu/tensor_gemm.h"

namespace pagedkern::vgpu {
namespace {

constexpr int kMaxDepth = 32;
constexpr int kRows = kTensorRows;
constexpr int kColumns = kPanel;

// f(elements per register, converter): the converter takes element i out of a register.
template <typename F>
void with_float_elements(TensorType type, F&& f) {
  switch (type) {
    case TensorType::kF16: return f(2, [](uint32_t w, int i) { return half_bits_to_float(uint16_t(w >> (16 * i))); });
    case TensorType::kBF16:
      return f(2, [](uint32_t w, int i) { return bfloat_bits_to_float(uint16_t(w >> (16 * i))); });
    case TensorType::kTF32: return f(1, [](uint32_t w, int) { return tf32_bits_to_float(w); });
    case TensorType::kE4M3: return f(4, [](uint32_t w, int i) { return e4m3_bits_to_float(uint8_t(w >> (8 * i))); });
    case TensorType::kE5M2: return f(4, [](uint32_t w, int i) { return e5m2_bits_to_float(uint8_t(w >> (8 * i))); });
    case TensorType::kS8: return f(4, [](uint32_t w, int i) { return static_cast<float>(int8_t(w >> (8 * i))); });
    default: return f(4, [](uint32_t w, int i) { return static_cast<float>(uint8_t(w >> (8 * i))); });
  }
}

template <typename F>
void with_integer_elements(TensorType type, F&& f) {
  if (type == TensorType::kS8) return f(4, [](uint32_t w, int i) { return int32_t(int8_t(w >> (8 * i))); });
  f(4, [](uint32_t w, int i) { return int32_t(uint8_t(w >> (8 * i))); });
}

// Register r of lane l holds, of row l / 4 + 8 (r mod 2), the elements that start at column
// (l mod 4) e + 4 e (r / 2), where e is how many elements a register holds.
template <typename Out, typename Convert>
void unpack_a(int per_register, int k, const LaneWords* a, Out* out, Convert convert) {
  const int registers = 2 * k / (4 * per_register);
  for (int r = 0; r < registers; ++r) {
    for (int lane = 0; lane < 32; ++lane) {
      Out* at = out + (lane / 4 + 8 * (r % 2)) * k + (lane % 4) * per_register + 4 * per_register * (r / 2);
      for (int i = 0; i < per_register; ++i) at[i] = convert(a[r][lane], i);
    }
  }
}

// Register r of lane l holds, of column l / 4, the elements that start at row (l mod 4) e + 4 e r.
template <typename Out, typename Convert>
void unpack_b(int per_register, int k, const LaneWords* b, Out* out, Convert convert) {
  const int registers = k / (4 * per_register);
  for (int r = 0; r < registers; ++r) {
    for (int lane = 0; lane < 32; ++lane) {
      const int row = (lane % 4) * per_register + 4 * per_register * r;
      for (int i = 0; i < per_register; ++i) out[(row + i) * kColumns + lane / 4] = convert(b[r][lane], i);
    }
  }
}

void unpack_b_fragment(TensorType type, int k, const LaneWords* b, float* out) {
  with_float_elements(type, [&](int e, auto convert) { unpack_b(e, k, b, out, convert); });
}

void unpack_b_fragment(TensorType type, int k, const LaneWords* b, int32_t* out) {
  with_integer_elements(type, [&](int e, auto convert) { unpack_b(e, k, b, out, convert); });
}

}  // namespace

bool mma_supported(const MmaForm& f) {
  if (f.m != kRows || f.n != kColumns) return false;
  const auto is_fp8 = [](TensorType t) { return t == TensorType::kE4M3 || t == TensorType::kE5M2; };
  const auto is_int8 = [](TensorType t) { return t == TensorType::kS8 || t == TensorType::kU8; };
  if (f.accumulator == TensorType::kS32) return is_int8(f.a) && is_int8(f.b) && (f.k == 16 || f.k == 32);
  if (f.saturate) return false;
  const bool f16_sum = f.accumulator == TensorType::kF16;
  if (!f16_sum && f.accumulator != TensorType::kF32) return false;
  if (is_fp8(f.a) && is_fp8(f.b)) return f.k == 16 || f.k == 32;
  if (f.a != f.b) return false;
  if (f.a == TensorType::kF16) return f.k == 8 || f.k == 16;
  if (f.a == TensorType::kBF16) return !f16_sum && (f.k == 8 || f.k == 16);
  if (f.a == TensorType::kTF32) return !f16_sum && (f.k == 4 || f.k == 8);
  return false;
}

int mma_a_registers(const MmaForm& f) {
  return f.k * tensor_type_bytes(f.a) / 8;
}
int mma_b_registers(const MmaForm& f) {
  return f.k * tensor_type_bytes(f.b) / 16;
}
int mma_accumulator_registers(const MmaForm& f) {
  return f.accumulator == TensorType::kF16 ? 2 : 4;
}

void unpack_a_fragment(TensorType type, int k, const LaneWords* a, bool negate, float* out) {
  with_float_elements(type, [&](int e, auto convert) { unpack_a(e, k, a, out, convert); });
  if (negate) {
    for (int i = 0; i < kRows * k; ++i) out[i] = -out[i];
  }
}

void unpack_a_fragment(TensorType type, int k, const LaneWords* a, int32_t* out) {
  with_integer_elements(type, [&](int e, auto convert) { unpack_a(e, k, a, out, convert); });
}

// In a panel, register pair p of lane l is row l / 4 + 8 p, columns 2 (l mod 4) and the next: the panel's 128 elements
// in row order are the two registers of each pair, interleaved.
void unpack_accumulator(TensorType type, int n, const LaneWords* c, float* out) {
  for (int half = 0; half < n / 4; ++half, out += 64) {
    if (type == TensorType::kF16) {
      const LaneWords& pair = c[half];
      for (int lane = 0; lane < 32; ++lane) {
        out[2 * lane] = half_bits_to_float(static_cast<uint16_t>(pair[lane]));
        out[2 * lane + 1] = half_bits_to_float(static_cast<uint16_t>(pair[lane] >> 16));
      }
    } else {
      const LaneWords &even = c[2 * half], &odd = c[2 * half + 1];
      for (int lane = 0; lane < 32; ++lane) {
        out[2 * lane] = std::bit_cast<float>(even[lane]);
        out[2 * lane + 1] = std::bit_cast<float>(odd[lane]);
      }
    }
  }
}

void unpack_accumulator(int n, const LaneWords* c, int32_t* out) {
  for (int r = 0; r < n / 2; ++r) {
    for (int lane = 0; lane < 32; ++lane) out[64 * (r / 2) + 2 * lane + r % 2] = static_cast<int32_t>(c[r][lane]);
  }
}

void pack_accumulator(TensorType type, int n, const float* in, LaneWords* d) {
  const auto word = [](float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffffffu : bits;
  };
  for (int half = 0; half < n / 4; ++half, in += 64) {
    if (type == TensorType::kF16) {
      for (int lane = 0; lane < 32; ++lane) {
        d[half][lane] = static_cast<uint32_t>(float_to_half_bits(in[2 * lane])) |
                        static_cast<uint32_t>(float_to_half_bits(in[2 * lane + 1])) << 16;
      }
    } else {
      LaneWords &even = d[2 * half], &odd = d[2 * half + 1];
      for (int lane = 0; lane < 32; ++lane) {
        even[lane] = word(in[2 * lane]);
        odd[lane] = word(in[2 * lane + 1]);
      }
    }
  }
}

void pack_accumulator(int n, const int32_t* in, LaneWords* d) {
  for (int r = 0; r < n / 2; ++r) {
    for (int lane = 0; lane < 32; ++lane) d[r][lane] = static_cast<uint32_t>(in[64 * (r / 2) + 2 * lane + r % 2]);
  }
}

void mma_sync(const MmaForm& form, LaneWords* d, const LaneWords* a, const LaneWords* b, const LaneWords* c) {
  if (form.accumulator == TensorType::kS32) {
    int32_t ta[kRows * kMaxDepth], tb[kMaxDepth * kColumns], tc[kRows * kColumns];
    unpack_a_fragment(form.a, form.k, a, ta);
    unpack_b_fragment(form.b, form.k, b, tb);
    unpack_accumulator(kColumns, c, tc);
    tensor_accumulate(tc, ta, tb, 1, form.k, form.saturate);
    pack_accumulator(kColumns, tc, d);
    return;
  }
  float ta[kRows * kMaxDepth], tb[kMaxDepth * kColumns], tc[kRows * kColumns];
  unpack_a_fragment(form.a, form.k, a, false, ta);
  unpack_b_fragment(form.b, form.k, b, tb);
  unpack_accumulator(form.accumulator, kColumns, c, tc);
  tensor_accumulate(tc, ta, tb, 1, form.k);
  pack_accumulator(form.accumulator, kColumns, tc, d);
}

}  // namespace pagedkern::vgpu
