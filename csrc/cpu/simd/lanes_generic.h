// lanes.h in plain C++: fixed loops that the compiler vectorises for whatever the baseline is.
#pragma once

namespace pagedkern::cpu::PAGEDKERN_SIMD::lanes {

constexpr int kLanes = 16;
struct Vec {
  float v[kLanes];
};

template <class Op>
inline Vec map_lanes(Op op) {
  Vec result;
  for (int i = 0; i < kLanes; ++i) result.v[i] = op(i);
  return result;
}

inline Vec broadcast(float x) {
  return map_lanes([&](int) { return x; });
}
inline Vec add(const Vec& a, const Vec& b) {
  return map_lanes([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec sub(const Vec& a, const Vec& b) {
  return map_lanes([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec mul(const Vec& a, const Vec& b) {
  return map_lanes([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec div(const Vec& a, const Vec& b) {
  return map_lanes([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vec mul_rounded(const Vec& a, const Vec& b) {
  Vec product = mul(a, b);
#if defined(__FP_FAST_FMAF)
  asm("" : "+m"(product));
#endif
  return product;
}

// The running maximum of finite magnitudes, kept as bit patterns.
struct MaxVec {
  uint32_t v[kLanes];
};
inline MaxVec max_zero() {
  return MaxVec{};
}
inline MaxVec max_finite(const MaxVec& running, const Vec& x) {
  MaxVec result;
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t magnitude = float_to_bits(x.v[i]) & 0x7FFFFFFFu;
    const uint32_t finite = magnitude < 0x7F800000u ? magnitude : 0;
    result.v[i] = running.v[i] > finite ? running.v[i] : finite;
  }
  return result;
}
inline float max_value(const MaxVec& running) {
  uint32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = running.v[i] > largest ? running.v[i] : largest;
  return bits_to_float(largest);
}

inline float from_element(float x) {
  return x;
}
inline float from_element(BFloat16 x) {
  return bits_to_float(static_cast<uint32_t>(x.bits) << 16);
}
inline float from_element(Half x) {
  const uint32_t magnitude = x.bits & 0x7FFFu;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = (magnitude << 13) | 0x7F800000u;
  const uint32_t subnormal = float_to_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  uint32_t bits = magnitude < 0x0400u ? subnormal : normal;
  bits = magnitude >= 0x7C00u ? special : bits;
  return bits_to_float(bits | (static_cast<uint32_t>(x.bits & 0x8000u) << 16));
}
template <class Format>
inline float from_element(Fp8<Format> x) {
  return decode_fp8<Format>(x.bits);
}

inline void to_element(float x, float& out) {
  out = x;
}
inline void to_element(float x, BFloat16& out) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
  out.bits = static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : rounded);
}
inline void to_element(float x, Half& out) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t clamped = magnitude < 0x47800000u ? magnitude : 0x47800000u;  // 65536, which becomes infinity
  const uint32_t normal = ((clamped + 0xFFFu + ((clamped >> 13) & 1)) >> 13) - (112u << 10);
  const uint32_t subnormal = float_to_bits(bits_to_float(clamped) + 0.5f) - 0x3F000000u;
  const uint32_t code = (clamped < 0x38800000u ? subnormal : normal) | ((bits >> 16) & 0x8000u);
  out.bits = static_cast<uint16_t>(magnitude > 0x7F800000u ? 0x7FFFu : code);
}
template <class Format>
inline void to_element(float x, Fp8<Format>& out) {
  out.bits = encode_fp8<Format>(x);
}

template <class T>
inline Vec load(const T* p) {
  return map_lanes([&](int i) { return from_element(p[i]); });
}
template <class T>
inline Vec load_part(const T* p, int n) {
  T staged[kLanes] = {};
  std::memcpy(staged, p, n * sizeof(T));
  return load(staged);
}
template <class T>
inline void store(T* p, const Vec& x) {
  for (int i = 0; i < kLanes; ++i) to_element(x.v[i], p[i]);
}
template <class T>
inline void store_part(T* p, const Vec& x, int n) {
  T staged[kLanes];
  store(staged, x);
  std::memcpy(p, staged, n * sizeof(T));
}

template <class T>
inline void load_pairs(const T* p, Vec& even, Vec& odd) {
  even = map_lanes([&](int i) { return from_element(p[2 * i]); });
  odd = map_lanes([&](int i) { return from_element(p[2 * i + 1]); });
}
template <class T>
inline void store_pairs(T* p, const Vec& even, const Vec& odd) {
  for (int i = 0; i < kLanes; ++i) {
    to_element(even.v[i], p[2 * i]);
    to_element(odd.v[i], p[2 * i + 1]);
  }
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD::lanes
