// Element types of the tensor-core and tensor-map families, and their exact conversions to float.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

namespace pagedkern::vgpu {

enum class TensorType : uint8_t { kF16, kBF16, kTF32, kE4M3, kE5M2, kS8, kU8, kF32, kS32 };

constexpr int tensor_type_bytes(TensorType t) {
  switch (t) {
    case TensorType::kF16:
    case TensorType::kBF16: return 2;
    case TensorType::kE4M3:
    case TensorType::kE5M2:
    case TensorType::kS8:
    case TensorType::kU8: return 1;
    default: return 4;
  }
}

constexpr bool tensor_type_is_integer(TensorType t) {
  return t == TensorType::kS8 || t == TensorType::kU8 || t == TensorType::kS32;
}

// No step passes through a float32 subnormal, so a host that flushes them (torch.set_flush_denormal) changes nothing.
inline float half_bits_to_float(uint16_t h) {
  uint32_t bits = static_cast<uint32_t>(h & 0x7fffu) << 13;
  const uint32_t exponent = bits & (0x7c00u << 13);
  bits += (127u - 15u) << 23;
  if (exponent == (0x7c00u << 13)) {
    bits += (128u - 16u) << 23;
  } else if (exponent == 0) {
    bits = std::bit_cast<uint32_t>(std::bit_cast<float>(bits + (1u << 23)) - 0x1p-14f);
  }
  return std::bit_cast<float>(bits | static_cast<uint32_t>(h & 0x8000u) << 16);
}

// Round to nearest even; NaN becomes the canonical 0x7fff, overflow becomes infinity.
inline uint16_t float_to_half_bits(float f) {
  const uint32_t u = std::bit_cast<uint32_t>(f);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above
  if (magnitude < 0x33000001u) return static_cast<uint16_t>(sign);             // 2^-25 and below round to zero
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const int shift = exponent < -14 ? 13 + (-14 - exponent) : 13;
  const uint32_t half = 1u << (shift - 1);
  const uint32_t rest = mantissa & ((1u << shift) - 1);
  mantissa >>= shift;
  if (rest > half || (rest == half && (mantissa & 1u))) ++mantissa;
  if (exponent < -14) return static_cast<uint16_t>(sign | mantissa);
  return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(exponent + 15) << 10) + (mantissa - 0x400u)));
}

inline float bfloat_bits_to_float(uint16_t h) {
  return std::bit_cast<float>(static_cast<uint32_t>(h) << 16);
}

inline uint16_t float_to_bfloat_bits(float f) {
  const uint32_t u = std::bit_cast<uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// The hardware takes the upper 19 bits of a 32-bit register as a tf32 value.
inline float tf32_bits_to_float(uint32_t u) {
  return std::bit_cast<float>(u & 0xffffe000u);
}

namespace detail {

template <int kExponentBits, bool kHasInfinity>
constexpr std::array<float, 256> make_fp8_table() {
  constexpr int kMantissaBits = 7 - kExponentBits;
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr int kTop = (1 << kExponentBits) - 1;
  std::array<float, 256> table{};
  for (int i = 0; i < 256; ++i) {
    const int exponent = (i >> kMantissaBits) & kTop;
    const int mantissa = i & ((1 << kMantissaBits) - 1);
    const uint32_t sign = (i & 0x80) ? 0x80000000u : 0u;
    const bool nan = kHasInfinity ? exponent == kTop && mantissa != 0 : (i & 0x7f) == 0x7f;
    if (nan) {
      table[i] = std::bit_cast<float>(0x7fffffffu);
    } else if (kHasInfinity && exponent == kTop) {
      table[i] = std::bit_cast<float>(sign | 0x7f800000u);
    } else {
      float value = static_cast<float>(exponent == 0 ? mantissa : mantissa | (1 << kMantissaBits));
      for (int e = (exponent == 0 ? 1 : exponent) - kBias - kMantissaBits; e < 0; ++e) value *= 0.5f;
      for (int e = (exponent == 0 ? 1 : exponent) - kBias - kMantissaBits; e > 0; --e) value *= 2.0f;
      table[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
    }
  }
  return table;
}

inline constexpr std::array<float, 256> kE4M3Table = make_fp8_table<4, false>();
inline constexpr std::array<float, 256> kE5M2Table = make_fp8_table<5, true>();

}  // namespace detail

inline float e4m3_bits_to_float(uint8_t b) {
  return detail::kE4M3Table[b];
}
inline float e5m2_bits_to_float(uint8_t b) {
  return detail::kE5M2Table[b];
}

}  // namespace pagedkern::vgpu
