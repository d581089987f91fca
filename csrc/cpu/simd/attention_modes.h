// How keys, values, queries and weights meet. Products are of 32-bit words: one float32, or a pair of bfloat16 where
// the machine multiplies those and query and cache fit in them.
//   kStep                 elements of a word
//   multiply_add          acc + a * b, all elements of a word into one float32
//   load_words            kLanes words of consecutive elements of a row
//   load_values           kStep rows, kStep * kLanes columns: out[i] holds columns i * kLanes.., a word of all rows
//   each kOwnOrder<T>          whether rows of T are cheapest two vectors of words at a time, in an order of their own;
//   then
//                         load_words_pair and load_values_pair, with queries and outputs brought into it and back
//   pack_weights          words of kStep consecutive keys from float32 weights laid out [key, rows]
#pragma once

#include "cpu/simd/attention_vec.h"

namespace pagedkern::cpu::PAGEDKERN_SIMD {

struct FloatMode {
  static constexpr int kStep = 1;
  template <class T>
  static constexpr bool kOwnOrder = false;

  static Vec multiply_add(Vec acc, Vec a, Vec b) { return fma(a, b, acc); }

  template <class T>
  static Vec load_words(const T* row) {
    return load(row);
  }
  template <class T>
  static Vec load_words_part(const T* row, int elements) {
    return load_part(row, elements);
  }

  template <class T>
  static void load_values(const T* const* rows, int64_t column, Vec (&out)[kStep]) {
    out[0] = load(rows[0] + column);
  }
  template <class T>
  static void load_values_part(const T* const* rows, int64_t column, int elements, Vec (&out)[kStep]) {
    out[0] = load_part(rows[0] + column, elements);
  }

  template <int kRows>
  static void pack_weights(const Vec (&weights)[kStep], float* words) {
    store(words, weights[0]);
  }
};

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

// The bfloat16 of each FP8 code without its sign, by bytes: exact, NaN and infinity included.
template <class Format>
struct Fp8ToBFloat16 {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];

  constexpr Fp8ToBFloat16() : low(), high() {
    constexpr bool kHasInfinity = Format::kMantissaBits == 2;
    constexpr int kMantissa = Format::kMantissaBits;
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> kMantissa;
      int mantissa = code & ((1 << kMantissa) - 1);
      int bits = 0;
      if (kHasInfinity ? code >= 0x7C : code == 0x7F) {
        bits = kHasInfinity && code == 0x7C ? 0x7F80 : 0x7FC0;
      } else if (code != 0) {
        if (exponent == 0) {
          exponent = 1;
          for (; mantissa < (1 << kMantissa); mantissa *= 2) --exponent;
          mantissa -= 1 << kMantissa;
        }
        bits = (exponent - Format::kBias + 127) * 128 + (mantissa << (7 - kMantissa));
      }
      low[code] = static_cast<uint8_t>(bits);
      high[code] = static_cast<uint8_t>(bits >> 8);
    }
  }
};

struct BFloat16Mode {
  static constexpr int kStep = 2;
  template <class T>
  static constexpr bool kOwnOrder = sizeof(T) == 1;

  static Vec multiply_add(Vec acc, Vec a, Vec b) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }

  static Vec load_words(const BFloat16* row) { return _mm512_loadu_ps(row); }
  static Vec load_words_part(const BFloat16* row, int elements) {
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16((1u << elements) - 1, row));
  }
  template <class Format>
  static Vec load_words(const Fp8<Format>* row) {
    return from_fp8<Format>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)));
  }
  template <class Format>
  static Vec load_words_part(const Fp8<Format>* row, int elements) {
    return from_fp8<Format>(_mm256_maskz_loadu_epi8((1u << elements) - 1, row));
  }

  template <class T>
  static void load_values(const T* const* rows, int64_t column, Vec (&out)[kStep]) {
    interleave(load_words(rows[0] + column), load_words(rows[1] + column), out);
  }
  template <class T>
  static void load_values_part(const T* const* rows, int64_t column, int elements, Vec (&out)[kStep]) {
    interleave(load_words_part(rows[0] + column, elements), load_words_part(rows[1] + column, elements), out);
  }

  // 64 elements: of each 16, the first eight go to out[0] and the rest to out[1].
  template <class Format>
  static void load_words_pair(const Fp8<Format>* row, Vec (&out)[2]) {
    const Fp8ToBFloat16<Format>& table = kTable<Format>;
    const __m512i codes = _mm512_loadu_si512(row);
    const __m512i low =
        _mm512_permutex2var_epi8(_mm512_load_si512(table.low), codes, _mm512_load_si512(table.low + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(table.high), codes, _mm512_load_si512(table.high + 64));
    high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xF8);
    out[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high));
    out[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
  }
  // 64 columns: of each 16, four go to each of out[0..3].
  template <class T>
  static void load_values_pair(const T* const* rows, int64_t column, Vec (&out)[4]) {
    Vec first[2], second[2];
    load_words_pair(rows[0] + column, first);
    load_words_pair(rows[1] + column, second);
    for (int i = 0; i < 2; ++i) {
      const __m512i a = _mm512_castps_si512(first[i]), b = _mm512_castps_si512(second[i]);
      out[2 * i] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b));
      out[2 * i + 1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b));
    }
  }
  // Only whole blocks of 64 elements have an order of their own.
  static void order_query(float* words, int head_dim) {
    for (int d = 0; d + 64 <= head_dim; d += 64) {
      const Vec a = load(words + d / 2), b = load(words + d / 2 + kLanes);
      store(words + d / 2, _mm512_shuffle_f32x4(a, b, 0x88));
      store(words + d / 2 + kLanes, _mm512_shuffle_f32x4(a, b, 0xDD));
    }
  }
  // A transpose of 4 x 4 quarters of vectors: there and back are the same.
  static void order_output(float* output, int head_dim) {
    for (int d = 0; d + 64 <= head_dim; d += 64) {
      float* o = output + d;
      const Vec a = load(o), b = load(o + 16), c = load(o + 32), e = load(o + 48);
      const Vec ab_even = _mm512_shuffle_f32x4(a, b, 0x88), ab_odd = _mm512_shuffle_f32x4(a, b, 0xDD);
      const Vec ce_even = _mm512_shuffle_f32x4(c, e, 0x88), ce_odd = _mm512_shuffle_f32x4(c, e, 0xDD);
      store(o, _mm512_shuffle_f32x4(ab_even, ce_even, 0x88));
      store(o + 16, _mm512_shuffle_f32x4(ab_odd, ce_odd, 0x88));
      store(o + 32, _mm512_shuffle_f32x4(ab_even, ce_even, 0xDD));
      store(o + 48, _mm512_shuffle_f32x4(ab_odd, ce_odd, 0xDD));
    }
  }

  // weights: two vectors of [key, kRows]; words: [pair of keys, kRows].
  template <int kRows>
  static void pack_weights(const Vec (&weights)[kStep], float* words) {
    __m512i packed = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(weights[1], weights[0]));
    if constexpr (kRows > 1) packed = _mm512_permutexvar_epi16(pair_order<kRows>(), packed);
    _mm512_storeu_si512(words, packed);
  }

 private:
  template <class Format>
  static constexpr Fp8ToBFloat16<Format> kTable{};

  template <class Format>
  static Vec from_fp8(__m256i codes) {
    const Fp8ToBFloat16<Format>& table = kTable<Format>;
    constexpr __mmask64 kHighBytes = 0xAAAAAAAAAAAAAAAAull;
    // Every code twice, once for each byte of its word; the table look-up takes the low seven bits of an index.
    const __m512i twice = _mm512_permutexvar_epi8(each_twice(), _mm512_castsi256_si512(codes));
    __m512i words = _mm512_mask2_permutex2var_epi8(_mm512_load_si512(table.high), twice, kHighBytes,
                                                   _mm512_load_si512(table.high + 64));
    words = _mm512_mask2_permutex2var_epi8(_mm512_load_si512(table.low), words, ~kHighBytes,
                                           _mm512_load_si512(table.low + 64));
    const __m512i signs = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(words, twice, signs, 0xF8));  // words | (twice & signs)
  }

  static __m512i each_twice() {
    alignas(64) static constexpr auto kOrder = [] {
      struct {
        uint8_t v[64];
      } order{};
      for (int i = 0; i < 64; ++i) order.v[i] = static_cast<uint8_t>(i / 2);
      return order;
    }();
    return _mm512_load_si512(&kOrder);
  }

  // Word (pair, row) from elements (2 pair, row) and (2 pair + 1, row) of [key, kRows].
  template <int kRows>
  static __m512i pair_order() {
    alignas(64) static constexpr auto kOrder = [] {
      struct {
        uint16_t v[32];
      } order{};
      for (int i = 0; i < 32; ++i) {
        const int word = i / 2;
        order.v[i] = static_cast<uint16_t>((word / kRows * 2 + i % 2) * kRows + word % kRows);
      }
      return order;
    }();
    return _mm512_load_si512(&kOrder);
  }

  static void interleave(Vec first, Vec second, Vec (&out)[kStep]) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i a = _mm512_castps_si512(first), b = _mm512_castps_si512(second);
    out[0] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, low, b));
    out[1] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, high, b));
  }
};

#endif

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
