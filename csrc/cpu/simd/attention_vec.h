// What attention needs of vectors beyond lanes.h: comparisons, exponentials, transposes. A Vec also carries kLanes
// 32-bit words that are no floats (pairs of bfloat16): nothing here that moves lanes changes bits.
#pragma once

#include <cstdint>
#include <limits>

#include "cpu/simd/lanes.h"

// Before a loop of constant length over an array of vectors: the array must end in registers, and what the compiler
// leaves as a loop it keeps in memory.
#define PAGEDKERN_UNROLL _Pragma("GCC unroll 16")

namespace pagedkern::cpu::PAGEDKERN_SIMD {

using namespace lanes;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

inline Vec fma(Vec a, Vec b, Vec c) {
  return _mm512_fmadd_ps(a, b, c);
}
// The larger; b where either is NaN.
inline Vec max_else(Vec a, Vec b) {
  return _mm512_max_ps(a, b);
}
// a < b ? x : y; y where either is NaN.
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x);
}
inline Vec round_to_integer(Vec a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// a * 2^n for integral n; 0 below the smallest normal is fine, NaN in a stays.
inline Vec scale_by_power(Vec a, Vec n) {
  return _mm512_scalef_ps(a, n);
}
inline Vec lane_numbers() {
  return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
inline float first_lane(Vec a) {
  return _mm512_cvtss_f32(a);
}
inline float max_of_lanes(Vec a) {
  return _mm512_reduce_max_ps(a);
}
inline float sum_of_lanes(Vec a) {
  return _mm512_reduce_add_ps(a);
}

// Lane i of the result is the sum of rows[i].
inline Vec sums_of_rows(const Vec (&rows)[16]) {
  Vec quads[4];
  PAGEDKERN_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Vec* r = rows + 4 * i;
    const Vec a = add(_mm512_unpacklo_ps(r[0], r[1]), _mm512_unpackhi_ps(r[0], r[1]));
    const Vec b = add(_mm512_unpacklo_ps(r[2], r[3]), _mm512_unpackhi_ps(r[2], r[3]));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    quads[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  }
  const auto halve = [](Vec a, Vec b) {
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  };
  return halve(halve(quads[0], quads[1]), halve(quads[2], quads[3]));
}

inline void transpose(Vec (&rows)[16]) {
  Vec t[16];
  PAGEDKERN_UNROLL
  for (int i = 0; i < 16; i += 4) {
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(rows[i], rows[i + 1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(rows[i], rows[i + 1]));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(rows[i + 2], rows[i + 3]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(rows[i + 2], rows[i + 3]));
    t[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    t[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    t[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    t[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  // t[4 i + j] holds columns j, 4 + j, 8 + j, 12 + j of rows 4 i to 4 i + 3, one 128-bit block each.
  PAGEDKERN_UNROLL
  for (int j = 0; j < 4; ++j) {
    const Vec a = _mm512_shuffle_f32x4(t[j], t[4 + j], 0x88), b = _mm512_shuffle_f32x4(t[j], t[4 + j], 0xDD);
    const Vec c = _mm512_shuffle_f32x4(t[8 + j], t[12 + j], 0x88), d = _mm512_shuffle_f32x4(t[8 + j], t[12 + j], 0xDD);
    rows[j] = _mm512_shuffle_f32x4(a, c, 0x88);
    rows[4 + j] = _mm512_shuffle_f32x4(b, d, 0x88);
    rows[8 + j] = _mm512_shuffle_f32x4(a, c, 0xDD);
    rows[12 + j] = _mm512_shuffle_f32x4(b, d, 0xDD);
  }
}

#elif defined(__AVX2__) && defined(__FMA__)

inline Vec fma(Vec a, Vec b, Vec c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline Vec max_else(Vec a, Vec b) {
  return _mm256_max_ps(a, b);
}
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline Vec round_to_integer(Vec a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec scale_by_power(Vec a, Vec n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  const Vec scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
  return where_less(n, _mm256_set1_ps(-125.0f), _mm256_setzero_ps(), scaled);
}
inline Vec lane_numbers() {
  return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
}
inline float first_lane(Vec a) {
  return _mm256_cvtss_f32(a);
}
inline float max_of_lanes(Vec a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
inline float sum_of_lanes(Vec a) {
  __m128 m = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_add_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_add_ss(m, _mm_movehdup_ps(m)));
}

inline Vec sums_of_rows(const Vec (&rows)[8]) {
  const Vec a = _mm256_hadd_ps(_mm256_hadd_ps(rows[0], rows[1]), _mm256_hadd_ps(rows[2], rows[3]));
  const Vec b = _mm256_hadd_ps(_mm256_hadd_ps(rows[4], rows[5]), _mm256_hadd_ps(rows[6], rows[7]));
  return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

inline void transpose(Vec (&rows)[8]) {
  Vec t[8];
  PAGEDKERN_UNROLL
  for (int i = 0; i < 8; i += 4) {
    const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(rows[i], rows[i + 1]));
    const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(rows[i], rows[i + 1]));
    const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(rows[i + 2], rows[i + 3]));
    const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(rows[i + 2], rows[i + 3]));
    t[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
    t[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
    t[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
    t[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
  }
  PAGEDKERN_UNROLL
  for (int j = 0; j < 4; ++j) {
    rows[j] = _mm256_permute2f128_ps(t[j], t[4 + j], 0x20);
    rows[4 + j] = _mm256_permute2f128_ps(t[j], t[4 + j], 0x31);
  }
}

#else

inline Vec fma(const Vec& a, const Vec& b, const Vec& c) {
  return map_lanes([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline Vec max_else(const Vec& a, const Vec& b) {
  return map_lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec where_less(const Vec& a, const Vec& b, const Vec& x, const Vec& y) {
  return map_lanes([&](int i) { return a.v[i] < b.v[i] ? x.v[i] : y.v[i]; });
}
// Adding and taking away 1.5 * 2^23 rounds what is smaller than 2^22, and exponents are.
inline Vec round_to_integer(const Vec& a) {
  return map_lanes([&](int i) { return (a.v[i] + 0x1.8p23f) - 0x1.8p23f; });
}
inline Vec scale_by_power(const Vec& a, const Vec& n) {
  return map_lanes([&](int i) {
    const uint32_t exponent = float_to_bits(n.v[i] + 0x1.8p23f) << 23;
    const float scaled = bits_to_float(float_to_bits(a.v[i]) + exponent);
    return n.v[i] < -125.0f ? 0.0f : scaled;
  });
}
inline Vec lane_numbers() {
  return map_lanes([](int i) { return static_cast<float>(i); });
}
inline float first_lane(const Vec& a) {
  return a.v[0];
}
inline float max_of_lanes(const Vec& a) {
  float result = a.v[0];
  for (int i = 1; i < kLanes; ++i) result = a.v[i] > result ? a.v[i] : result;
  return result;
}
inline float sum_of_lanes(const Vec& a) {
  float sums[kLanes];
  PAGEDKERN_UNROLL
  for (int i = 0; i < kLanes; ++i) sums[i] = a.v[i];
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  }
  return sums[0];
}
inline Vec sums_of_rows(const Vec (&rows)[kLanes]) {
  return map_lanes([&](int i) { return sum_of_lanes(rows[i]); });
}
inline void transpose(Vec (&rows)[kLanes]) {
  PAGEDKERN_UNROLL
  for (int i = 0; i < kLanes; ++i) {
    for (int j = i + 1; j < kLanes; ++j) {
      const float kept = rows[i].v[j];
      rows[i].v[j] = rows[j].v[i];
      rows[j].v[i] = kept;
    }
  }
}

#endif

// 2^x for x <= 0, within about one unit in the last place; exactly 1 at 0, exactly 0 at -inf, NaN stays NaN.
inline Vec exp2_of(Vec x) {
  x = max_else(broadcast(-200.0f), x);
  const Vec n = round_to_integer(x);
  const Vec f = sub(x, n);
  Vec p = broadcast(0.0001545316294512069f);
  p = fma(p, f, broadcast(0.0013390863364671234f));
  p = fma(p, f, broadcast(0.009618082557277852f));
  p = fma(p, f, broadcast(0.05550357114219078f));
  p = fma(p, f, broadcast(0.24022650760568126f));
  p = fma(p, f, broadcast(0.6931471880262288f));
  p = fma(p, f, broadcast(1.0f));
  return scale_by_power(p, n);
}

// A short odd polynomial near 0, where the quotient would cancel, and (1 - e^-2|x|) / (1 + e^-2|x|) beyond.
inline Vec tanh_of(Vec x) {
  const Vec zero = broadcast(0.0f), one = broadcast(1.0f);
  const Vec magnitude = max_else(sub(zero, x), x);
  const Vec e = exp2_of(mul(magnitude, broadcast(-2.885390081777927f)));
  const Vec large = div(sub(one, e), add(one, e));
  const Vec z = mul(x, x);
  Vec p = broadcast(-5.70498872745e-3f);
  p = fma(p, z, broadcast(2.06390887954e-2f));
  p = fma(p, z, broadcast(-5.37397155531e-2f));
  p = fma(p, z, broadcast(1.33314422036e-1f));
  p = fma(p, z, broadcast(-3.33332819422e-1f));
  const Vec small = fma(mul(p, z), x, x);
  return where_less(magnitude, broadcast(0.625f), small, where_less(x, zero, sub(zero, large), large));
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
