// lanes.h with AVX-512 F, BW, DQ, VL. VCVTNEPS2BF16 is not used: it flushes subnormals.
#pragma once

// GCC 12 warns of the undefined pass-through operands of its own intrinsics.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

namespace pagedkern::cpu::PAGEDKERN_SIMD::lanes {

constexpr int kLanes = 16;
using Vec = __m512;

inline __mmask16 first_lanes(int n) {
  return static_cast<__mmask16>((1u << n) - 1);
}

inline Vec broadcast(float x) {
  return _mm512_set1_ps(x);
}
inline Vec add(Vec a, Vec b) {
  return _mm512_add_ps(a, b);
}
inline Vec sub(Vec a, Vec b) {
  return _mm512_sub_ps(a, b);
}
inline Vec mul(Vec a, Vec b) {
  return _mm512_mul_ps(a, b);
}
inline Vec div(Vec a, Vec b) {
  return _mm512_div_ps(a, b);
}
inline Vec mul_rounded(Vec a, Vec b) {
  Vec product = _mm512_mul_ps(a, b);
  asm("" : "+v"(product));
  return product;
}

// The running maximum of finite magnitudes, kept as bit patterns.
using MaxVec = __m512i;
inline MaxVec max_zero() {
  return _mm512_setzero_si512();
}
inline MaxVec max_finite(MaxVec running, Vec x) {
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
  const __mmask16 finite = _mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32(0x7F800000));
  return _mm512_mask_max_epu32(running, finite, running, magnitude);
}
inline float max_value(MaxVec running) {
  return bits_to_float(_mm512_reduce_max_epu32(running));
}

inline Vec from_bits(__m256i bits, Half) {
  return _mm512_cvtph_ps(bits);
}
inline Vec from_bits(__m256i bits, BFloat16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
// e5m2 is the upper half of a float16.
inline Vec from_bits(__m128i bits, Fp8<E5M2>) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bits), 8));
}
// e4m3 shifted into a float16 is 2^-8 of its value, subnormals included; only NaN needs care.
inline Vec from_bits(__m128i bits, Fp8<E4M3>) {
  const __m256i wide = _mm256_cvtepu8_epi16(bits);
  const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7F));
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(wide, 8), _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7F));
  __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign);
  half = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7E00));
  return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}

inline __m256i to_bits(Vec x, Half) {
  const __m256i half = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm256_mask_mov_epi16(half, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm256_set1_epi16(0x7FFF));
}
inline __m256i to_bits(Vec x, BFloat16) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __m256i narrow = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  return _mm256_mask_mov_epi16(narrow, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm256_set1_epi16(0x7FFF));
}
// encode_fp8 of common/fp8.h, lane by lane.
template <class Format>
inline __m128i to_bits(Vec x, Fp8<Format>) {
  constexpr int kShift = 23 - Format::kMantissaBits;
  constexpr int kRoundAndRebias = ((1 << (kShift - 1)) - 1) - ((127 - Format::kBias) << 23);
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
  const __m512i clamped = _mm512_min_epu32(magnitude, _mm512_set1_epi32(Format::kMaxBits));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(clamped, kShift), _mm512_set1_epi32(1));
  __m512i code = _mm512_add_epi32(_mm512_add_epi32(clamped, _mm512_set1_epi32(kRoundAndRebias)), odd);
  code = _mm512_srli_epi32(code, kShift);
  const __m512 shifted = _mm512_add_ps(_mm512_castsi512_ps(clamped), _mm512_set1_ps(Format::kSubnormalMagic));
  const __mmask16 subnormal = _mm512_cmplt_epu32_mask(clamped, _mm512_set1_epi32(Format::kMinNormalBits));
  code = _mm512_mask_sub_epi32(code, subnormal, _mm512_castps_si512(shifted),
                               _mm512_set1_epi32(Format::kSubnormalMagicBits));
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
  code = _mm512_or_si512(code, sign);
  code = _mm512_mask_mov_epi32(code, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7F));
  return _mm512_cvtepi32_epi8(code);
}

inline Vec load(const float* p) {
  return _mm512_loadu_ps(p);
}
inline Vec load_part(const float* p, int n) {
  return _mm512_maskz_loadu_ps(first_lanes(n), p);
}
inline void store(float* p, Vec x) {
  _mm512_storeu_ps(p, x);
}
inline void store_part(float* p, Vec x, int n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), x);
}

template <class T>
inline Vec load(const T* p) {
  if constexpr (sizeof(T) == 2) {
    return from_bits(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), T{});
  } else {
    return from_bits(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), T{});
  }
}
template <class T>
inline Vec load_part(const T* p, int n) {
  if constexpr (sizeof(T) == 2) {
    return from_bits(_mm256_maskz_loadu_epi16(first_lanes(n), p), T{});
  } else {
    return from_bits(_mm_maskz_loadu_epi8(first_lanes(n), p), T{});
  }
}
template <class T>
inline void store(T* p, Vec x) {
  if constexpr (sizeof(T) == 2) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bits(x, T{}));
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bits(x, T{}));
  }
}
template <class T>
inline void store_part(T* p, Vec x, int n) {
  if constexpr (sizeof(T) == 2) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), to_bits(x, T{}));
  } else {
    _mm_mask_storeu_epi8(p, first_lanes(n), to_bits(x, T{}));
  }
}

template <class T>
inline void load_pairs(const T* p, Vec& even, Vec& odd) {
  const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const Vec low = load(p), high = load(p + kLanes);
  even = _mm512_permutex2var_ps(low, evens, high);
  odd = _mm512_permutex2var_ps(low, _mm512_add_epi32(evens, _mm512_set1_epi32(1)), high);
}
template <class T>
inline void store_pairs(T* p, Vec even, Vec odd) {
  const __m512i lows = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  store(p, _mm512_permutex2var_ps(even, lows, odd));
  store(p + kLanes, _mm512_permutex2var_ps(even, _mm512_add_epi32(lows, _mm512_set1_epi32(8)), odd));
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD::lanes
