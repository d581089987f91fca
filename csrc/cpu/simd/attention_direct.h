// One tile for a few query rows: keys and values are used where they lie, each load for all rows of the KV head.
// Scores stand as [key, kRows]: a vector holds kLanes / kRows keys for the block's kRows rows.
#pragma once

#include "cpu/simd/attention_tile.h"

namespace pagedkern::cpu::PAGEDKERN_SIMD {

// What the lanes of a block of rows stand for, expanded to [key, kRows]. Read where the block is masked or has ALiBi.
struct RowLanes {
  alignas(64) float begin[kLanes];  // places in the tile
  alignas(64) float end[kLanes];
  alignas(64) float slope[kLanes];     // in units of log2
  alignas(64) float distance[kLanes];  // from the row's position to the tile's first key
};

// Dot products of kLanes / kRows keys with the block's rows.
template <class Mode, class T, int kRows>
inline Vec dot_products(const float* query, int64_t query_stride, const T* const* keys, int head_dim) {
  constexpr int kKeys = kLanes / kRows;
  constexpr int kElements = kLanes * Mode::kStep;
  Vec sums[kLanes];
  PAGEDKERN_UNROLL
  for (int i = 0; i < kLanes; ++i) sums[i] = broadcast(0.0f);
  int d = 0;
  if constexpr (Mode::template kOwnOrder<T>) {
    for (; d + 2 * kElements <= head_dim; d += 2 * kElements) {
      PAGEDKERN_UNROLL
      for (int k = 0; k < kKeys; ++k) {
        Vec words[2];
        Mode::load_words_pair(keys[k] + d, words);
        PAGEDKERN_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const float* q = query + r * query_stride + d / Mode::kStep;
          Vec& sum = sums[k * kRows + r];
          sum = Mode::multiply_add(Mode::multiply_add(sum, load(q), words[0]), load(q + kLanes), words[1]);
        }
      }
    }
  }
  for (; d + kElements <= head_dim; d += kElements) {
    Vec words[kKeys];
    PAGEDKERN_UNROLL
    for (int k = 0; k < kKeys; ++k) words[k] = Mode::load_words(keys[k] + d);
    PAGEDKERN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Vec q = load(query + r * query_stride + d / Mode::kStep);
      PAGEDKERN_UNROLL
      for (int k = 0; k < kKeys; ++k) sums[k * kRows + r] = Mode::multiply_add(sums[k * kRows + r], q, words[k]);
    }
  }
  if (d < head_dim) {
    PAGEDKERN_UNROLL
    for (int k = 0; k < kKeys; ++k) {
      const Vec word = Mode::load_words_part(keys[k] + d, head_dim - d);
      PAGEDKERN_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const Vec q = load(query + r * query_stride + d / Mode::kStep);
        sums[k * kRows + r] = Mode::multiply_add(sums[k * kRows + r], q, word);
      }
    }
  }
  return sums_of_rows(sums);
}

template <class T>
struct DirectBlock {
  const float* query;
  float* output;
  float* maximum;  // [kLanes], expanded to [key, kRows]
  float* sum;      // [kLanes], partial sums of [key, kRows]
  const RowLanes* lanes;
  const T* next_keys;  // of the KV head that comes next, or null
  bool masked;
  bool alibi;
};

// What one pass over a tile's values brings nearer on its way: its share of the next tile's values, in the first pass
// the values a few keys on, in the last pass the first keys of the next head.
template <class T>
struct ValuePass {
  const TileOffsets& tile;
  const Ahead* ahead;
  const T* next_keys;
  int head_dim;
  int index;
  int count;

  PAGEDKERN_FETCH void fetch(const T* const* values, int key, int keys) const {
    if (ahead != nullptr) {
      const int place = index * kKeyTile + key;
      ahead->touch_values(place / count, (place + keys) / count);
    }
    for (int k = key + kNearKeys; k < key + kNearKeys + keys; ++k) {
      if (k < kKeyTile) {
        if (index == 0) bring_near(values[k], head_dim);
      } else if (index == count - 1 && next_keys != nullptr) {
        const int first = k - kKeyTile;
        if (first >= tile.begin && first < tile.end) bring_near(next_keys + tile.keys[first], head_dim);
      }
    }
  }
};

// output[row] = rescale[row] * output[row] + unit[row] * (weights . values) over kBlocks * kStep vectors of columns; no
// unit: 1. The tile's sum is formed from zero: rounding grows with the tiles and the keys of one, not with all keys.
template <class Mode, class T, int kRows, int kBlocks>
inline void add_values(const float* words, const T* const* values, int begin, int end, int64_t column, int elements,
                       const float* rescale, const float* unit, float* output, int64_t output_stride,
                       const ValuePass<T>& pass) {
  constexpr int kStep = Mode::kStep;
  constexpr int kVecs = kBlocks * kStep;
  constexpr int kElements = kLanes * kStep;
  Vec sums[kRows][kVecs];
  PAGEDKERN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PAGEDKERN_UNROLL
    for (int v = 0; v < kVecs; ++v) sums[r][v] = broadcast(0.0f);
  }
  const bool whole = elements == kBlocks * kElements;
  for (int j = begin; j < end; j += kStep) {
    pass.fetch(values, j, kStep);
    Vec words_of_values[kVecs];
    if constexpr (Mode::template kOwnOrder<T> && kVecs == 4) {
      Mode::load_values_pair(values + j, column, words_of_values);
    } else {
      PAGEDKERN_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        Vec loaded[kStep];
        if (whole) {
          Mode::load_values(values + j, column + b * kElements, loaded);
        } else {
          Mode::load_values_part(values + j, column, elements, loaded);
        }
        PAGEDKERN_UNROLL
        for (int i = 0; i < kStep; ++i) words_of_values[b * kStep + i] = loaded[i];
      }
    }
    PAGEDKERN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = broadcast(words[j / kStep * kRows + r]);
      PAGEDKERN_UNROLL
      for (int v = 0; v < kVecs; ++v) sums[r][v] = Mode::multiply_add(sums[r][v], weight, words_of_values[v]);
    }
  }
  PAGEDKERN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Vec factor = broadcast(rescale[r]);
    PAGEDKERN_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      float* sum = output + r * output_stride + column + v * kLanes;
      const Vec product = unit == nullptr ? sums[r][v] : mul(broadcast(unit[r]), sums[r][v]);
      store(sum, fma(factor, load(sum), product));
    }
  }
}

template <class Mode, class T, int kRows>
inline void direct_tile(const PagedAttentionParams& params, const ScoreRule& rule, const TileOffsets& tile,
                        const TileRows<T>& rows, const DirectBlock<T>& block, int64_t stride, const Ahead* ahead) {
  constexpr int kStep = Mode::kStep;
  constexpr int kKeys = kLanes / kRows;
  constexpr int kGroup = kKeys * kStep > kStep ? kKeys * kStep : kStep;  // keys whose weights are packed together
  const int head_dim = params.cache.head_dim;
  const int begin = tile.begin / kGroup * kGroup, end = (tile.end + kGroup - 1) / kGroup * kGroup;
  const RowLanes& lanes = *block.lanes;

  alignas(64) float scores[kKeyTile * kRows];
  alignas(64) float place[kLanes];
  PAGEDKERN_UNROLL
  for (int i = 0; i < kLanes; ++i) place[i] = static_cast<float>(i / kRows);
  const Vec places = load(place);
  Vec largest = broadcast(-kInfinity);
  for (int j = begin; j < end; j += kKeys) {
    if (ahead != nullptr) ahead->touch_keys(j, j + kKeys);
    constexpr int kNear = kNearKeys > kKeys ? kNearKeys : kKeys;
    for (int k = j + kNear; k < j + kNear + kKeys; ++k) {
      bring_near(k < kKeyTile ? rows.keys[k] : rows.values[k - kKeyTile], head_dim);
    }
    Vec score = dot_products<Mode, T, kRows>(block.query, stride, rows.keys + j, head_dim);
    if (rule.token_scales) {
      alignas(64) float scales[kLanes];
      PAGEDKERN_UNROLL
      for (int i = 0; i < kLanes; ++i) scales[i] = rows.key_scales[j + i / kRows];
      score = mul(score, load(scales));
    }
    score = rule(score);
    const Vec here = add(places, broadcast(static_cast<float>(j)));
    if (block.alibi) score = fma(load(lanes.slope), add(here, load(lanes.distance)), score);
    if (block.masked) score = mask_outside(score, here, load(lanes.begin), load(lanes.end));
    store(scores + j * kRows, score);
    largest = max_else(score, largest);
  }

  alignas(64) float lane_values[kLanes];
  store(lane_values, largest);
  float rescale[kRows];
  alignas(64) float base[kLanes];
  PAGEDKERN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    float m = block.maximum[r];
    PAGEDKERN_UNROLL
    for (int k = 0; k < kKeys; ++k) m = lane_values[k * kRows + r] > m ? lane_values[k * kRows + r] : m;
    PAGEDKERN_UNROLL
    for (int k = 0; k < kKeys; ++k) lane_values[k * kRows + r] = m;
    PAGEDKERN_UNROLL
    for (int k = 0; k < kKeys; ++k) base[k * kRows + r] = m == -kInfinity ? 0.0f : m;
  }
  const Vec bases = load(base);
  const Vec factors = exp2_of(sub(load(block.maximum), bases));
  store(block.maximum, load(lane_values));
  store(lane_values, factors);
  PAGEDKERN_UNROLL
  for (int r = 0; r < kRows; ++r) rescale[r] = lane_values[r];

  alignas(64) float words[kKeyTile * kRows], scaled[kKeyTile * kRows];
  float units[kRows];
  Vec sum = broadcast(0.0f), heaviest = broadcast(kLeastUnit);
  const bool value_scales = params.v_scale.per_token();
  for (int j = begin; j < end; j += kGroup) {
    Vec weights[kStep] = {};
    PAGEDKERN_UNROLL
    for (int i = 0; i < kStep; ++i) {
      const int key = j + i * kKeys;
      weights[i] = exp2_of(sub(load(scores + key * kRows), bases));
      sum = add(sum, weights[i]);
      if (rows.num_lone > 0) store(scores + key * kRows, weights[i]);
      if (value_scales) {
        alignas(64) float scales[kLanes];
        PAGEDKERN_UNROLL
        for (int l = 0; l < kLanes; ++l) scales[l] = rows.value_scales[key + l / kRows];
        weights[i] = mul(weights[i], load(scales));
        store(scaled + key * kRows, weights[i]);
        heaviest = max_else(weights[i], heaviest);
      }
    }
    if (!value_scales) Mode::template pack_weights<kRows>(weights, words + j / kStep * kRows);
  }
  store(block.sum, fma(load(block.sum), factors, sum));
  if (value_scales) {
    store(lane_values, heaviest);
    PAGEDKERN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float most = lane_values[r];
      PAGEDKERN_UNROLL
      for (int k = 1; k < kKeys; ++k) most = lane_values[k * kRows + r] > most ? lane_values[k * kRows + r] : most;
      PAGEDKERN_UNROLL
      for (int k = 0; k < kKeys; ++k) lane_values[k * kRows + r] = 1.0f / most;
      units[r] = most;
    }
    const Vec inverse = load(lane_values);
    for (int j = begin; j < end; j += kGroup) {
      Vec weights[kStep] = {};
      PAGEDKERN_UNROLL
      for (int i = 0; i < kStep; ++i) weights[i] = mul(load(scaled + (j + i * kKeys) * kRows), inverse);
      Mode::template pack_weights<kRows>(weights, words + j / kStep * kRows);
    }
  }
  const float* unit = value_scales ? units : nullptr;

  constexpr int kElements = kLanes * kStep;
  constexpr int kBlocks = kLanes == 16 && kRows <= 4 ? 4 / kStep : 2;
  constexpr int kColumns = kBlocks * kElements;
  ValuePass<T> pass{tile, ahead, block.next_keys, head_dim, 0, 0};
  pass.count = head_dim / kColumns + (head_dim % kColumns + kElements - 1) / kElements;
  int column = 0;
  for (; column + kColumns <= head_dim; column += kColumns, ++pass.index) {
    add_values<Mode, T, kRows, kBlocks>(words, rows.values, begin, end, column, kColumns, rescale, unit, block.output,
                                        stride, pass);
  }
  for (; column < head_dim; column += kElements, ++pass.index) {
    const int elements = head_dim - column < kElements ? head_dim - column : kElements;
    add_values<Mode, T, kRows, 1>(words, rows.values, begin, end, column, elements, rescale, unit, block.output, stride,
                                  pass);
  }
  for (int r = 0; rows.num_lone > 0 && r < kRows; ++r) {
    float* output = block.output + r * stride;
    if constexpr (Mode::template kOwnOrder<T>) Mode::order_output(output, head_dim);
    add_lone_values(
        rows, head_dim, static_cast<int>(lanes.begin[r]), static_cast<int>(lanes.end[r]),
        [&](int key) { return scores[key * kRows + r]; }, output);
    if constexpr (Mode::template kOwnOrder<T>) Mode::order_output(output, head_dim);
  }
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
