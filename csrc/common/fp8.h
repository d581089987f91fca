// FP8 as every backend stores it: round to nearest even, saturating (+-inf to +-max), NaN to 0x7F, -0.0 to 0x80.
// Plain integer code, for the host, for the device where no conversion instruction fits, and as the text to check
// others by.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/paged_cache.h"

namespace pagedkern {

// What the two formats differ in. float32 bit patterns stand for the values: for finite magnitudes their order is the
// order of the values.
struct E4M3 {
  static constexpr int kMantissaBits = 3;
  static constexpr int kBias = 7;
  static constexpr float kMax = 448.0f;
  static constexpr uint32_t kMaxBits = 0x43E00000;        // 448
  static constexpr uint32_t kMinNormalBits = 0x3C800000;  // 2^-6
  static constexpr float kSubnormalStep = 0x1p-9f;
  static constexpr float kSubnormalMagic = 0x1p14f;  // its last bit weighs kSubnormalStep
  static constexpr uint32_t kSubnormalMagicBits = 0x46800000;
};

struct E5M2 {
  static constexpr int kMantissaBits = 2;
  static constexpr int kBias = 15;
  static constexpr float kMax = 57344.0f;
  static constexpr uint32_t kMaxBits = 0x47600000;        // 57344
  static constexpr uint32_t kMinNormalBits = 0x38800000;  // 2^-14
  static constexpr float kSubnormalStep = 0x1p-16f;
  static constexpr float kSubnormalMagic = 0x1p7f;
  static constexpr uint32_t kSubnormalMagicBits = 0x43000000;
};

constexpr float fp8_max(DType dtype) {
  return dtype == DType::kFloat8E5M2 ? E5M2::kMax : E4M3::kMax;
}

// Internal linkage on purpose: translation units compiled for different instruction sets each keep their own copy.
static PAGEDKERN_HOST_DEVICE uint32_t float_to_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
#endif
}

static PAGEDKERN_HOST_DEVICE float bits_to_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
#endif
}

// Clamping first leaves no overflow to handle; below the smallest normal the hardware's own float32 addition rounds.
template <class Format>
static PAGEDKERN_HOST_DEVICE uint8_t encode_fp8(float x) {
  constexpr int kShift = 23 - Format::kMantissaBits;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - Format::kBias) << Format::kMantissaBits;
  const uint32_t bits = float_to_bits(x);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t clamped = magnitude < Format::kMaxBits ? magnitude : Format::kMaxBits;
  const uint32_t half_ulp = (1u << (kShift - 1)) - 1 + ((clamped >> kShift) & 1);
  const uint32_t normal = ((clamped + half_ulp) >> kShift) - kRebias;
  const uint32_t subnormal =
      float_to_bits(bits_to_float(clamped) + Format::kSubnormalMagic) - Format::kSubnormalMagicBits;
  const uint32_t code = (clamped < Format::kMinNormalBits ? subnormal : normal) | ((bits >> 24) & 0x80u);
  return static_cast<uint8_t>(magnitude > 0x7F800000u ? 0x7Fu : code);
}

// Exact for all 256 codes; e4m3 has NaN at 0x7F and 0xFF and no infinity, e5m2 both as IEEE has them.
template <class Format>
static PAGEDKERN_HOST_DEVICE float decode_fp8(uint8_t code) {
  constexpr bool kIeee = Format::kBias == E5M2::kBias;
  constexpr int kShift = 23 - Format::kMantissaBits;
  const uint32_t magnitude = code & 0x7Fu;
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t normal = (magnitude << kShift) + (static_cast<uint32_t>(127 - Format::kBias) << 23);
  const uint32_t subnormal =
      float_to_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * Format::kSubnormalStep);
  if (!kIeee && magnitude == 0x7Fu) return bits_to_float(0x7FC00000u);
  uint32_t bits = magnitude < (1u << Format::kMantissaBits) ? subnormal : normal;
  if (kIeee && magnitude >= 0x7Cu) bits = 0x7F800000u | (magnitude << kShift) | (magnitude > 0x7Cu ? 0x00400000u : 0u);
  return bits_to_float(bits | sign);
}

}  // namespace pagedkern
