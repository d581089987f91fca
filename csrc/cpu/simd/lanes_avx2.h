// lanes.h with AVX2 and F16C.
#pragma once

#include <immintrin.h>

namespace pagedkern::cpu::PAGEDKERN_SIMD::lanes {

constexpr int kLanes = 8;
using Vec = __m256;

inline Vec broadcast(float x) {
  return _mm256_set1_ps(x);
}
inline Vec add(Vec a, Vec b) {
  return _mm256_add_ps(a, b);
}
inline Vec sub(Vec a, Vec b) {
  return _mm256_sub_ps(a, b);
}
inline Vec mul(Vec a, Vec b) {
  return _mm256_mul_ps(a, b);
}
inline Vec div(Vec a, Vec b) {
  return _mm256_div_ps(a, b);
}
inline Vec mul_rounded(Vec a, Vec b) {
  Vec product = _mm256_mul_ps(a, b);
  asm("" : "+x"(product));
  return product;
}

// The running maximum of finite magnitudes, kept as bit patterns (non-negative as signed integers).
using MaxVec = __m256i;
inline MaxVec max_zero() {
  return _mm256_setzero_si256();
}
inline MaxVec max_finite(MaxVec running, Vec x) {
  const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFFFF));
  const __m256i finite = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7F800000), magnitude);
  return _mm256_max_epi32(running, _mm256_and_si256(magnitude, finite));
}
inline float max_value(MaxVec running) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(running), _mm256_extracti128_si256(running, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1));
  return bits_to_float(static_cast<uint32_t>(_mm_cvtsi128_si32(m)));
}

inline Vec from_bits(__m128i bits, Half) {
  return _mm256_cvtph_ps(bits);
}
inline Vec from_bits(__m128i bits, BFloat16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
// Codes are in the low 8 bytes. e5m2 is the upper half of a float16.
inline Vec from_bits(__m128i bits, Fp8<E5M2>) {
  return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bits), 8));
}
// e4m3 shifted into a float16 is 2^-8 of its value, subnormals included; only NaN needs care.
inline Vec from_bits(__m128i bits, Fp8<E4M3>) {
  const __m128i wide = _mm_cvtepu8_epi16(bits);
  const __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7F));
  const __m128i sign = _mm_and_si128(_mm_slli_epi16(wide, 8), _mm_set1_epi16(static_cast<int16_t>(0x8000)));
  const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7F));
  const __m128i half = _mm_or_si128(_mm_slli_epi16(magnitude, 7), sign);
  const __m128i patched = _mm_blendv_epi8(half, _mm_set1_epi16(0x7E00), nan);
  return _mm256_mul_ps(_mm256_cvtph_ps(patched), _mm256_set1_ps(256.0f));
}

inline __m128i narrow_to_16(__m256i words) {
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08));
}
inline __m256i nan_lanes(Vec x) {
  return _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

inline __m128i to_bits(Vec x, Half) {
  const __m256i nan = nan_lanes(x);
  const __m128i nan16 = _mm_packs_epi32(_mm256_castsi256_si128(nan), _mm256_extracti128_si256(nan, 1));
  const __m128i half = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm_blendv_epi8(half, _mm_set1_epi16(0x7FFF), nan16);
}
inline __m128i to_bits(Vec x, BFloat16) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i shifted = _mm256_srli_epi32(rounded, 16);
  return narrow_to_16(_mm256_blendv_epi8(shifted, _mm256_set1_epi32(0x7FFF), nan_lanes(x)));
}
// encode_fp8 of common/fp8.h, lane by lane; the codes are in the low 8 bytes.
template <class Format>
inline __m128i to_bits(Vec x, Fp8<Format>) {
  constexpr int kShift = 23 - Format::kMantissaBits;
  constexpr int kRoundAndRebias = ((1 << (kShift - 1)) - 1) - ((127 - Format::kBias) << 23);
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
  const __m256i clamped = _mm256_min_epi32(magnitude, _mm256_set1_epi32(Format::kMaxBits));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(clamped, kShift), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(clamped, _mm256_set1_epi32(kRoundAndRebias)), odd);
  const __m256i normal = _mm256_srli_epi32(rounded, kShift);
  const __m256 shifted = _mm256_add_ps(_mm256_castsi256_ps(clamped), _mm256_set1_ps(Format::kSubnormalMagic));
  const __m256i subnormal =
      _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(Format::kSubnormalMagicBits));
  const __m256i is_subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(Format::kMinNormalBits), clamped);
  __m256i code = _mm256_blendv_epi8(normal, subnormal, is_subnormal);
  code = _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80)));
  code = _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7F), nan_lanes(x));
  const __m128i words = narrow_to_16(code);
  return _mm_packus_epi16(words, words);
}

inline Vec load(const float* p) {
  return _mm256_loadu_ps(p);
}
inline void store(float* p, Vec x) {
  _mm256_storeu_ps(p, x);
}

template <class T>
inline Vec load(const T* p) {
  if constexpr (sizeof(T) == 2) {
    return from_bits(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), T{});
  } else {
    return from_bits(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), T{});
  }
}
template <class T>
inline void store(T* p, Vec x) {
  if constexpr (sizeof(T) == 2) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bits(x, T{}));
  } else {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), to_bits(x, T{}));
  }
}
template <class T>
inline Vec load_part(const T* p, int n) {
  T staged[kLanes] = {};
  std::memcpy(staged, p, n * sizeof(T));
  return load(staged);
}
template <class T>
inline void store_part(T* p, Vec x, int n) {
  T staged[kLanes];
  store(staged, x);
  std::memcpy(p, staged, n * sizeof(T));
}

inline Vec swap_middle(Vec x) {
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xD8));
}
template <class T>
inline void load_pairs(const T* p, Vec& even, Vec& odd) {
  const Vec low = load(p), high = load(p + kLanes);
  even = swap_middle(_mm256_shuffle_ps(low, high, 0x88));
  odd = swap_middle(_mm256_shuffle_ps(low, high, 0xDD));
}
template <class T>
inline void store_pairs(T* p, Vec even, Vec odd) {
  const Vec inner = _mm256_unpacklo_ps(even, odd), outer = _mm256_unpackhi_ps(even, odd);
  store(p, _mm256_permute2f128_ps(inner, outer, 0x20));
  store(p + kLanes, _mm256_permute2f128_ps(inner, outer, 0x31));
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD::lanes
