// quantized_panel.h for AVX-512 with VNNI: sixteen outputs side by side, four products a lane in one instruction.
#pragma once

namespace pagedkern::cpu::PAGEDKERN_SIMD {

// The range is that from the least to the largest value and holds 0: where one value is far from the others, half as
// wide as one that is the same on both sides.
inline void quantize_group(const float* x, int64_t at, const QuantizedRows& rows) {
  constexpr int kNotFinite = 0x99;  // vfpclassps: quiet NaN, +inf, -inf, signalling NaN
  const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16), none = _mm512_setzero_ps();
  const __m512 high = _mm512_max_ps(_mm512_max_ps(a, b), none);
  const __m512 low = _mm512_max_ps(_mm512_sub_ps(none, _mm512_min_ps(a, b)), none);
  // Eight lanes of the highs, then eight of the negated lows, and each to one.
  __m512 most = _mm512_max_ps(_mm512_shuffle_f32x4(high, low, 0x44), _mm512_shuffle_f32x4(high, low, 0xEE));
  most = _mm512_max_ps(most, _mm512_shuffle_f32x4(most, most, 0xB1));
  most = _mm512_max_ps(most, _mm512_permute_ps(most, 0x4E));
  most = _mm512_max_ps(most, _mm512_permute_ps(most, 0xB1));
  const float below = _mm_cvtss_f32(_mm512_castps512_ps128(_mm512_shuffle_f32x4(most, most, 0x02)));
  float range = _mm512_cvtss_f32(most) + below;
  const float inverse = range < kSmallestRange ? 0.0f : kSteps / range;
  if (_mm512_fpclass_ps_mask(a, kNotFinite) | _mm512_fpclass_ps_mask(b, kNotFinite)) range = NAN;
  const __m512i zero = _mm512_cvtps_epi32(_mm512_set1_ps(below * inverse));
  const auto values_of = [&](__m512 v) {
    const __m512i value = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(inverse))), zero);
    return _mm512_cvtusepi32_epi8(_mm512_max_epi32(value, _mm512_setzero_si512()));
  };
  const __m256i values = _mm256_set_m128i(values_of(b), values_of(a));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows.values + at * kQuantGroup), values);
  const __m256i sums = _mm256_sad_epu8(values, _mm256_setzero_si256());
  const __m128i pair = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  const int32_t sum = _mm_cvtsi128_si32(pair) + _mm_extract_epi32(pair, 2);
  store_group(range / kSteps, _mm_cvtsi128_si32(_mm512_castsi512_si128(zero)), sum, at, rows);
}

inline __m512i broadcast_word(const uint8_t* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof(word));
  return _mm512_set1_epi32(word);
}

inline __m512i sums_of(const uint8_t* p) {
  return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// -zero * sum: the upper halves of `zero` are 0, whatever those of the sums are.
inline __m512i minus_zeros(__m512i sums, int32_t zero) {
  return _mm512_madd_epi16(sums, _mm512_set1_epi32(zero));
}

// Integer sums of one group stay in registers over its 8 steps of 4 inputs; the unpacked weights serve all rows.
template <int kRows>
void multiply_4bit(const uint8_t* weight, int64_t groups, const QuantizedRows& rows, float (*y)[kPanelOutputs]) {
  constexpr QuantFormat kFormat = QuantFormat::k4Bit;
  const __m512i low_mask = _mm512_set1_epi8(0x0F);
  const uint8_t* x = rows.values;
  __m512 total[kRows];
  PAGEDKERN_UNROLL
  for (int r = 0; r < kRows; ++r) total[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    __m512i sum[kRows];
    fetch_ahead<group_bytes(kFormat)>(weight);
    const __m512i sums = sums_of(weight + sums_at(kFormat));
    PAGEDKERN_UNROLL
    for (int r = 0; r < kRows; ++r) sum[r] = minus_zeros(sums, rows.zeros[g * kRows + r]);
    PAGEDKERN_UNROLL
    for (int i = 0; i < 4; ++i) {
      const __m512i packed = _mm512_loadu_si512(weight + values_at(kFormat) + 64 * i);
      const __m512i low = _mm512_and_si512(packed, low_mask);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(packed, 4), low_mask);
      PAGEDKERN_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const uint8_t* row = x + r * kQuantGroup + 4 * i;
        sum[r] = _mm512_dpbusd_epi32(sum[r], broadcast_word(row), low);
        sum[r] = _mm512_dpbusd_epi32(sum[r], broadcast_word(row + 16), high);
      }
    }
    const __m512 scale = load(reinterpret_cast<const Half*>(weight));
    const __m512 minimum = load(reinterpret_cast<const Half*>(weight) + kPanelOutputs);
    PAGEDKERN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = g * kRows + r;
      const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r]), _mm512_set1_ps(rows.scales[at]));
      total[r] = _mm512_fmadd_ps(scaled, scale, total[r]);
      total[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(rows.totals[at]), total[r]);
    }
    weight += group_bytes(kFormat);
    x += kRows * kQuantGroup;
  }
  PAGEDKERN_UNROLL
  for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(y[r], total[r]);
}

template <int kRows>
void multiply_8bit(const uint8_t* weight, int64_t groups, const QuantizedRows& rows, float (*y)[kPanelOutputs]) {
  constexpr QuantFormat kFormat = QuantFormat::k8Bit;
  const uint8_t* x = rows.values;
  __m512 total[kRows];
  PAGEDKERN_UNROLL
  for (int r = 0; r < kRows; ++r) total[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    __m512i sum[kRows];
    fetch_ahead<group_bytes(kFormat)>(weight);
    const __m512i sums = sums_of(weight + sums_at(kFormat));
    PAGEDKERN_UNROLL
    for (int r = 0; r < kRows; ++r) sum[r] = minus_zeros(sums, rows.zeros[g * kRows + r]);
    PAGEDKERN_UNROLL
    for (int i = 0; i < 8; ++i) {
      const __m512i values = _mm512_loadu_si512(weight + values_at(kFormat) + 64 * i);
      PAGEDKERN_UNROLL
      for (int r = 0; r < kRows; ++r) {
        sum[r] = _mm512_dpbusd_epi32(sum[r], broadcast_word(x + r * kQuantGroup + 4 * i), values);
      }
    }
    const __m512 scale = load(reinterpret_cast<const Half*>(weight));
    PAGEDKERN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r]), _mm512_set1_ps(rows.scales[g * kRows + r]));
      total[r] = _mm512_fmadd_ps(scaled, scale, total[r]);
    }
    weight += group_bytes(kFormat);
    x += kRows * kQuantGroup;
  }
  PAGEDKERN_UNROLL
  for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(y[r], total[r]);
}

template <int kRows>
void multiply_rows(QuantFormat format, const uint8_t* weight, int64_t groups, const QuantizedRows& rows, int64_t count,
                   float (*y)[kPanelOutputs]) {
  if constexpr (kRows > 1) {
    if (count < kRows) return multiply_rows<kRows - 1>(format, weight, groups, rows, count, y);
  }
  if (format == QuantFormat::k4Bit) return multiply_4bit<kRows>(weight, groups, rows, y);
  multiply_8bit<kRows>(weight, groups, rows, y);
}

inline void multiply_panel(QuantFormat format, const uint8_t* weight, int64_t groups, const QuantizedRows& rows,
                           int64_t count, float (*y)[kPanelOutputs]) {
  multiply_rows<kTileRows>(format, weight, groups, rows, count, y);
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
