// quantized_panel.h for AVX2: eight outputs side by side, products in pairs of 16 bits.
#pragma once

namespace pagedkern::cpu::PAGEDKERN_SIMD {

// The range is that from the least to the largest value and holds 0: where one value is far from the others, half as
// wide as one that is the same on both sides.
inline void quantize_group(const float* x, int64_t at, const QuantizedRows& rows) {
  const __m256 none = _mm256_setzero_ps();
  __m256 v[4], high = none, low = none, beyond = none;
  PAGEDKERN_UNROLL
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    high = _mm256_max_ps(high, v[i]);
    low = _mm256_min_ps(low, v[i]);
    beyond = _mm256_or_ps(beyond, _mm256_sub_ps(v[i], v[i]));  // NaN where a value is not finite
  }
  // Lane by lane the highs and the negated lows, and each half to one.
  low = _mm256_sub_ps(none, low);
  __m256 most = _mm256_max_ps(_mm256_permute2f128_ps(high, low, 0x20), _mm256_permute2f128_ps(high, low, 0x31));
  most = _mm256_max_ps(most, _mm256_permute_ps(most, 0x4E));
  most = _mm256_max_ps(most, _mm256_permute_ps(most, 0xB1));
  const float below = _mm_cvtss_f32(_mm256_extractf128_ps(most, 1));
  float range = _mm256_cvtss_f32(most) + below;
  const float inverse = range < kSmallestRange ? 0.0f : kSteps / range;
  if (_mm256_movemask_ps(_mm256_cmp_ps(beyond, beyond, _CMP_UNORD_Q)) != 0) range = NAN;
  const __m256i zero = _mm256_cvtps_epi32(_mm256_set1_ps(below * inverse));
  __m256i values[4];
  PAGEDKERN_UNROLL
  for (int i = 0; i < 4; ++i) {
    values[i] = _mm256_add_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(v[i], _mm256_set1_ps(inverse))), zero);
  }
  // To bytes with saturation, half by half of each vector, then back in order.
  const __m256i bytes = _mm256_permutevar8x32_epi32(
      _mm256_packus_epi16(_mm256_packus_epi32(values[0], values[1]), _mm256_packus_epi32(values[2], values[3])),
      _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows.values + at * kQuantGroup), bytes);
  const __m256i sums = _mm256_sad_epu8(bytes, _mm256_setzero_si256());
  const __m128i pair = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  const int32_t sum = _mm_cvtsi128_si32(pair) + _mm_extract_epi32(pair, 2);
  store_group(range / kSteps, _mm256_cvtsi256_si32(zero), sum, at, rows);
}

inline __m256i load_bytes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline __m256 load_halves(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Sums of four inputs times the weights of `kWords` words, in pairs of 16 bits.
template <int kWords>
inline __m256i multiply_words(const uint8_t* x, const __m256i* weights) {
  __m256i sum = _mm256_setzero_si256();
  PAGEDKERN_UNROLL
  for (int i = 0; i < kWords; ++i) {
    int32_t word;
    std::memcpy(&word, x + 4 * i, sizeof(word));
    const __m256i product = _mm256_maddubs_epi16(_mm256_set1_epi32(word), weights[i]);
    sum = i == 0 ? product : _mm256_add_epi16(sum, product);
  }
  return sum;
}

// Inputs are 0 to 255 and halves of weights at most 15, so that a pair of products is at most 7,650: four of them fit
// 16 bits. The upper halves of signed weights are -8 to 7, and eight of their pairs fit.
template <QuantFormat kFormat>
struct HalfPanel {
  static constexpr bool k4Bit = kFormat == QuantFormat::k4Bit;
  static constexpr int kWords = k4Bit ? 4 : 8;
  __m256i low[kWords], high[kWords];

  explicit HalfPanel(const uint8_t* values) {
    const __m256i mask = _mm256_set1_epi8(0x0F), sign = _mm256_set1_epi8(8);
    PAGEDKERN_UNROLL
    for (int i = 0; i < kWords; ++i) {
      const __m256i packed = load_bytes(values + 64 * i);
      low[i] = _mm256_and_si256(packed, mask);
      high[i] = _mm256_and_si256(_mm256_srli_epi16(packed, 4), mask);
      if (!k4Bit) high[i] = _mm256_sub_epi8(_mm256_xor_si256(high[i], sign), sign);
    }
  }

  // The sums of the products with a row's 32 inputs.
  __m256i multiply(const uint8_t* x) const {
    const __m256i one = _mm256_set1_epi16(1);
    const __m256i first = _mm256_madd_epi16(multiply_words<4>(x, low), one);
    if constexpr (k4Bit) {
      return _mm256_add_epi32(first, _mm256_madd_epi16(multiply_words<4>(x + 16, high), one));
    } else {
      const __m256i second = _mm256_madd_epi16(multiply_words<4>(x + 16, low + 4), one);
      const __m256i upper = _mm256_madd_epi16(multiply_words<8>(x, high), _mm256_set1_epi16(16));
      return _mm256_add_epi32(_mm256_add_epi32(first, second), upper);
    }
  }
};

template <QuantFormat kFormat>
void multiply_panel_of(const uint8_t* weight, int64_t groups, const QuantizedRows& rows, int64_t count,
                       float (*y)[kPanelOutputs]) {
  for (int64_t r = 0; r < count; ++r) {
    _mm256_storeu_ps(y[r], _mm256_setzero_ps());
    _mm256_storeu_ps(y[r] + 8, _mm256_setzero_ps());
  }
  for (int64_t g = 0; g < groups; ++g, weight += group_bytes(kFormat)) {
    fetch_ahead<group_bytes(kFormat)>(weight);
    for (int half = 0; half < 2; ++half) {
      const HalfPanel<kFormat> values(weight + values_at(kFormat) + 32 * half);
      const __m256i sums = _mm256_cvtepi16_epi32(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(weight + sums_at(kFormat) + 16 * half)));
      const __m256 scale = load_halves(weight + 16 * half);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t at = g * count + r;
        float* out = y[r] + 8 * half;
        // -zero * sum: the upper halves of `zeros` are 0, whatever those of the sums are.
        const __m256i shift = _mm256_madd_epi16(sums, _mm256_set1_epi32(rows.zeros[at]));
        const __m256i sum = _mm256_add_epi32(values.multiply(rows.values + at * kQuantGroup), shift);
        const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(rows.scales[at]));
        __m256 total = _mm256_fmadd_ps(scaled, scale, _mm256_loadu_ps(out));
        if (kFormat == QuantFormat::k4Bit) {
          const __m256 minimum = load_halves(weight + 2 * kPanelOutputs + 16 * half);
          total = _mm256_fmadd_ps(minimum, _mm256_set1_ps(rows.totals[at]), total);
        }
        _mm256_storeu_ps(out, total);
      }
    }
  }
}

inline void multiply_panel(QuantFormat format, const uint8_t* weight, int64_t groups, const QuantizedRows& rows,
                           int64_t count, float (*y)[kPanelOutputs]) {
  if (format == QuantFormat::k4Bit) {
    multiply_panel_of<QuantFormat::k4Bit>(weight, groups, rows, count, y);
  } else {
    multiply_panel_of<QuantFormat::k8Bit>(weight, groups, rows, count, y);
  }
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
