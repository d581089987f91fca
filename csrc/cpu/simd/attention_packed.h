// One tile for many query rows: keys and values are packed once as the right-hand sides of two small matrix products,
// whose left-hand sides (queries, weights) are broadcast word by word.
#pragma once

#include "cpu/simd/attention_tile.h"

namespace pagedkern::cpu::PAGEDKERN_SIMD {

// Rows and vectors of the register tile: accumulators, one row of the right-hand side and a broadcast fit in the
// registers.
#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileVecs = 4;
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kTileVecs = 2;
#else
constexpr int kTileRows = 2, kTileVecs = 1;
#endif
static_assert(kTileRows <= kRowPadding);

// c = rescale * c + unit * (a . b) over words [begin, end), the product summed from zero; without rescale c is not
// read, without unit it is 1.
template <class Mode, int kRows, int kVecs>
inline void multiply_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int begin, int end,
                          float* c, int64_t c_stride, const float* rescale, const float* unit) {
  Vec sums[kRows][kVecs];
  PAGEDKERN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PAGEDKERN_UNROLL
    for (int v = 0; v < kVecs; ++v) sums[r][v] = broadcast(0.0f);
  }
  for (int k = begin; k < end; ++k) {
    Vec words[kVecs];
    PAGEDKERN_UNROLL
    for (int v = 0; v < kVecs; ++v) words[v] = load(b + k * b_stride + v * kLanes);
    PAGEDKERN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Vec word = broadcast(a[r * a_stride + k]);
      PAGEDKERN_UNROLL
      for (int v = 0; v < kVecs; ++v) sums[r][v] = Mode::multiply_add(sums[r][v], word, words[v]);
    }
  }
  PAGEDKERN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PAGEDKERN_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      float* sum = c + r * c_stride + v * kLanes;
      const Vec product = unit == nullptr ? sums[r][v] : mul(broadcast(unit[r]), sums[r][v]);
      store(sum, rescale == nullptr ? product : fma(broadcast(rescale[r]), load(sum), product));
    }
  }
}

template <class Mode, int kRows, int kVecs = kTileVecs>
inline void multiply_columns(int vecs, const float* a, int64_t a_stride, const float* b, int64_t b_stride, int begin,
                             int end, float* c, int64_t c_stride, const float* rescale, const float* unit) {
  for (; vecs >= kVecs; vecs -= kVecs, b += kVecs * kLanes, c += kVecs * kLanes) {
    multiply_tile<Mode, kRows, kVecs>(a, a_stride, b, b_stride, begin, end, c, c_stride, rescale, unit);
  }
  if constexpr (kVecs > 1) {
    if (vecs > 0)
      multiply_columns<Mode, kRows, kVecs - 1>(vecs, a, a_stride, b, b_stride, begin, end, c, c_stride, rescale, unit);
  }
}

// At most kTileRows rows, `vecs` vectors of columns.
template <class Mode, int kRows = kTileRows>
inline void multiply(int rows, int vecs, const float* a, int64_t a_stride, const float* b, int64_t b_stride, int begin,
                     int end, float* c, int64_t c_stride, const float* rescale, const float* unit) {
  if (rows == kRows) {
    multiply_columns<Mode, kRows>(vecs, a, a_stride, b, b_stride, begin, end, c, c_stride, rescale, unit);
  } else if constexpr (kRows > 1) {
    multiply<Mode, kRows - 1>(rows, vecs, a, a_stride, b, b_stride, begin, end, c, c_stride, rescale, unit);
  }
}

// [word of head_dim, key], for the scores.
template <class Mode, class T>
inline void pack_keys(const TileRows<T>& rows, const TileOffsets& tile, int head_dim, float* packed) {
  constexpr int kElements = kLanes * Mode::kStep;
  const int begin = tile.begin / kElements * kElements;
  for (int j = begin; j < tile.end; j += kLanes) {
    for (int d = 0; d < head_dim; d += kElements) {
      Vec block[kLanes];
      PAGEDKERN_UNROLL
      for (int i = 0; i < kLanes; ++i) {
        block[i] = d + kElements <= head_dim ? Mode::load_words(rows.keys[j + i] + d)
                                             : Mode::load_words_part(rows.keys[j + i] + d, head_dim - d);
      }
      transpose(block);
      PAGEDKERN_UNROLL
      for (int i = 0; i < kLanes; ++i) store(packed + (d / Mode::kStep + i) * kKeyTile + j, block[i]);
    }
  }
}

// [word of kStep keys, column], for the output; columns up to a multiple of kStep * kLanes.
template <class Mode, class T>
inline void pack_values(const TileRows<T>& rows, const TileOffsets& tile, int head_dim, int64_t stride, float* packed) {
  constexpr int kElements = kLanes * Mode::kStep;
  const int begin = tile.begin / kElements * kElements;
  const int end = (tile.end + kLanes - 1) / kLanes * kLanes;
  for (int j = begin; j < end; j += Mode::kStep) {
    float* row = packed + j / Mode::kStep * stride;
    for (int d = 0; d < head_dim; d += kElements) {
      Vec words[Mode::kStep];
      if (d + kElements <= head_dim) {
        Mode::load_values(rows.values + j, d, words);
      } else {
        Mode::load_values_part(rows.values + j, d, head_dim - d, words);
      }
      PAGEDKERN_UNROLL
      for (int i = 0; i < Mode::kStep; ++i) store(row + d + i * kLanes, words[i]);
    }
  }
}

// Online softmax of one row over vectors [first, last) of its scores, which become weights.
struct PackedRow {
  int begin;  // places in the tile that the row sees
  int end;
  float slope;     // in units of log2
  float distance;  // from the row's position to the tile's first key
  bool alibi;
};

// Scores become weights. Scaled ones are in `unit`, the heaviest of them (attention_tile.h).
template <class Mode>
inline float weigh_row(const ScoreRule& rule, const PackedRow& row, const float* key_scales, const float* value_scales,
                       int first, int last, float* scores, float* words, float& maximum, float* sums, float& unit) {
  constexpr int kStep = Mode::kStep;
  const bool masked = row.begin > first * kLanes || row.end < last * kLanes;
  const Vec lanes = lane_numbers();
  const Vec row_begin = broadcast(static_cast<float>(row.begin)), row_end = broadcast(static_cast<float>(row.end));
  Vec largest = broadcast(-kInfinity);
  for (int i = first; i < last; ++i) {
    Vec score = load(scores + i * kLanes);
    if (rule.token_scales) score = mul(score, load(key_scales + i * kLanes));
    score = rule(score);
    const Vec place = add(lanes, broadcast(static_cast<float>(i * kLanes)));
    if (row.alibi) score = fma(broadcast(row.slope), add(place, broadcast(row.distance)), score);
    if (masked) score = mask_outside(score, place, row_begin, row_end);
    store(scores + i * kLanes, score);
    largest = max_else(score, largest);
  }
  const float tile_maximum = max_of_lanes(largest);
  const float m = tile_maximum > maximum ? tile_maximum : maximum;
  const float base = m == -kInfinity ? 0.0f : m;
  const Vec rescale = exp2_of(broadcast(maximum - base));
  maximum = m;
  Vec sum = broadcast(0.0f), heaviest = broadcast(kLeastUnit);
  for (int i = first; i < last; i += kStep) {
    PAGEDKERN_UNROLL
    for (int s = 0; s < kStep; ++s) {
      const Vec weight =
          i + s < last ? exp2_of(sub(load(scores + (i + s) * kLanes), broadcast(base))) : broadcast(0.0f);
      sum = add(sum, weight);
      store(scores + (i + s) * kLanes, weight);
      if (value_scales != nullptr) heaviest = max_else(mul(weight, load(value_scales + (i + s) * kLanes)), heaviest);
    }
  }
  unit = value_scales == nullptr ? 1.0f : max_of_lanes(heaviest);
  const Vec inverse = broadcast(1.0f / unit);
  for (int i = first; i < last; i += kStep) {
    Vec weights[kStep] = {};
    PAGEDKERN_UNROLL
    for (int s = 0; s < kStep; ++s) {
      weights[s] = load(scores + (i + s) * kLanes);
      if (value_scales != nullptr) {
        weights[s] = mul(mul(weights[s], load(value_scales + (i + s) * kLanes)), inverse);
      }
    }
    Mode::template pack_weights<1>(weights, words + i / kStep * kLanes);
  }
  store(sums, fma(load(sums), rescale, sum));
  return first_lane(rescale);
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
