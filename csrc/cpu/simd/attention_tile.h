// The keys of one tile: where their rows lie, what may be read of them, and how a dot product becomes a score.
#pragma once

#include "cpu/attention_plan.h"
#include "cpu/simd/attention_modes.h"

namespace pagedkern::cpu::PAGEDKERN_SIMD {

// Weights with a value scale for each token are multiplied in a unit of their own for each row and tile, the heaviest
// of them: a row that one key dominates keeps it exactly, as a weight of 1, where products round weights to bfloat16.
// The least unit has a finite inverse.
constexpr float kLeastUnit = 1e-30f;

constexpr float kLog2E = 1.4426950408889634f;

// Offsets in elements of a tile's rows for KV head 0. Only [begin, end) of the tile's keys may be read.
struct TileOffsets {
  int64_t first_key;
  int begin;
  int end;
  int64_t keys[kKeyTile];
  int64_t values[kKeyTile];
  int64_t key_scales[kKeyTile];
  int64_t value_scales[kKeyTile];
};

inline void locate_tile(const PagedAttentionParams& params, const AttentionItem& item, int64_t first_key,
                        TileOffsets& tile) {
  tile.first_key = first_key;
  tile.begin = static_cast<int>(item.key_begin > first_key ? item.key_begin - first_key : 0);
  tile.end = static_cast<int>(item.key_end - first_key < kKeyTile ? item.key_end - first_key : kKeyTile);
  const int64_t block_size = params.cache.block_size;
  const int32_t* pages = params.block_table + item.seq * params.block_table_stride;
  int64_t page = (first_key + tile.begin) / block_size;
  int64_t token = (first_key + tile.begin) % block_size;
  const bool key_scales = params.k_scale.per_token(), value_scales = params.v_scale.per_token();
  for (int j = tile.begin; j < tile.end; ++page, token = 0) {
    const int64_t block = pages[page];
    for (; j < tile.end && token < block_size; ++j, ++token) {
      tile.keys[j] = params.key_cache.offset(block, token, 0);
      tile.values[j] = params.value_cache.offset(block, token, 0);
      if (key_scales) tile.key_scales[j] = params.k_scale.offset(block, token, 0);
      if (value_scales) tile.value_scales[j] = params.v_scale.offset(block, token, 0);
    }
  }
}

// Functions that only fetch ahead: GCC takes them for pure and drops calls that it has not inlined by then.
#define PAGEDKERN_FETCH [[gnu::always_inline]] inline

// Rows of the next tile to bring near while this one is worked on, one for each key of the present tile and head.
struct Ahead {
  int count;
  int row_bytes;
  const char* keys[kKeyTile];
  const char* values[kKeyTile];

  PAGEDKERN_FETCH static void touch(const char* row, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
  }
  PAGEDKERN_FETCH void touch_keys(int begin, int end) const {
    for (int j = begin; j < end && j < count; ++j) touch(keys[j], row_bytes);
  }
  PAGEDKERN_FETCH void touch_values(int begin, int end) const {
    for (int j = begin; j < end && j < count; ++j) touch(values[j], row_bytes);
  }
};

// The share of the tile's rows that goes with the item's head number `turn`. Where the heads of a token lie side by
// side the rows come in the order of memory, and a whole token's heads come together.
inline void look_ahead(const PagedAttentionParams& params, const AttentionItem& item, const TileOffsets& tile, int turn,
                       Ahead& ahead) {
  const int heads = item.head_end - item.head_begin;
  const int64_t size = size_of(params.cache.dtype);
  const bool by_token = params.key_cache.stride_head < params.key_cache.stride_token;
  ahead.row_bytes = static_cast<int>(params.cache.head_dim * size);
  ahead.count = tile.end - tile.begin;
  const char* keys = static_cast<const char*>(params.key_cache.data);
  const char* values = static_cast<const char*>(params.value_cache.data);
  int token = by_token ? turn * ahead.count / heads : 0;
  int head = by_token ? turn * ahead.count % heads : turn;
  for (int j = 0; j < ahead.count; ++j) {
    const int64_t h = item.head_begin + head;
    ahead.keys[j] = keys + (tile.keys[tile.begin + token] + h * params.key_cache.stride_head) * size;
    ahead.values[j] = values + (tile.values[tile.begin + token] + h * params.value_cache.stride_head) * size;
    if (!by_token) {
      ++token;
    } else if (++head == heads) {
      head = 0;
      ++token;
    }
  }
}

// Keys between a row's use and the call for its lines from the second-level cache. Loads that miss the first level wait
// for a place among the outstanding misses, which the fetches from memory fill; called for early, they are there.
constexpr int kNearKeys = 8;

template <class T>
PAGEDKERN_FETCH void bring_near(const T* row, int elements) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (int i = 0; i < elements * static_cast<int>(sizeof(T)); i += 64) __builtin_prefetch(bytes + i, 0, 3);
}

// A value row that is not finite and that some row of the tile must not see: 0 * NaN would reach it.
template <class T>
struct LoneValue {
  int key;
  float scale;
  const T* row;
};

// The same for one KV head. Rows outside [begin, end) are zeros, scales there too.
template <class T>
struct TileRows {
  const T* keys[kKeyTile];
  const T* values[kKeyTile];
  float key_scales[kKeyTile];
  float value_scales[kKeyTile];
  int num_lone;
  LoneValue<T> lone[kKeyTile];
};

alignas(64) static const float kZeroRow[kMaxHeadDim] = {};

template <class T>
inline void point_at_head(const PagedAttentionParams& params, const TileOffsets& tile, int64_t head,
                          TileRows<T>& rows) {
  const T* zeros = reinterpret_cast<const T*>(kZeroRow);
  const T* keys = static_cast<const T*>(params.key_cache.data) + head * params.key_cache.stride_head;
  const T* values = static_cast<const T*>(params.value_cache.data) + head * params.value_cache.stride_head;
  for (int j = 0; j < tile.begin; ++j) rows.keys[j] = rows.values[j] = zeros;
  for (int j = tile.begin; j < tile.end; ++j) {
    rows.keys[j] = keys + tile.keys[j];
    rows.values[j] = values + tile.values[j];
  }
  for (int j = tile.end; j < kKeyTile; ++j) rows.keys[j] = rows.values[j] = zeros;
  rows.num_lone = 0;
  const auto gather = [&](const KvScale& scale, const int64_t* offsets, float* out) {
    if (!scale.per_token()) return;
    const float* scales = scale.data + head * scale.stride_head;
    for (int j = 0; j < kKeyTile; ++j) out[j] = j >= tile.begin && j < tile.end ? scales[offsets[j]] : 0.0f;
  };
  gather(params.k_scale, tile.key_scales, rows.key_scales);
  gather(params.v_scale, tile.value_scales, rows.value_scales);
}

template <class T>
inline bool all_finite(const T* row, int head_dim, float scale) {
  Vec sum = broadcast(scale * 0.0f);
  const Vec zero = broadcast(0.0f);
  int d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) sum = fma(load(row + d), zero, sum);
  if (d < head_dim) sum = fma(load_part(row + d, head_dim - d), zero, sum);
  return sum_of_lanes(sum) == 0.0f;
}

// For tiles that some rows see only in part: takes the rows that are not finite out of the common product.
template <class T>
inline void set_lone_values_apart(const PagedAttentionParams& params, const TileOffsets& tile, TileRows<T>& rows) {
  const bool scaled = params.v_scale.per_token();
  for (int j = tile.begin; j < tile.end; ++j) {
    const float scale = scaled ? rows.value_scales[j] : 1.0f;
    if (all_finite(rows.values[j], params.cache.head_dim, scale)) continue;
    rows.lone[rows.num_lone++] = {j, scale, rows.values[j]};
    rows.values[j] = reinterpret_cast<const T*>(kZeroRow);
    rows.value_scales[j] = 0.0f;
  }
}

// Adds the values set apart to one row that sees keys [begin, end) of the tile; weight(key) is the softmax numerator.
template <class T, class Weight>
inline void add_lone_values(const TileRows<T>& rows, int head_dim, int begin, int end, Weight weight, float* output) {
  for (int i = 0; i < rows.num_lone; ++i) {
    const LoneValue<T>& lone = rows.lone[i];
    if (lone.key < begin || lone.key >= end) continue;
    const Vec factor = broadcast(weight(lone.key) * lone.scale);
    int d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) store(output + d, fma(factor, load(lone.row + d), load(output + d)));
    if (d < head_dim) {
      store(output + d, fma(factor, load_part(lone.row + d, head_dim - d), load(output + d)));
    }
  }
}

// A key's place in its tile as a float: exact, and comparable lane by lane.
inline float place_in_tile(int64_t key, int64_t first_key) {
  const int64_t place = key - first_key;
  return place < 0 ? 0.0f : place > kKeyTile ? static_cast<float>(kKeyTile) : static_cast<float>(place);
}

inline Vec mask_outside(Vec score, Vec place, Vec begin, Vec end) {
  const Vec dead = broadcast(-kInfinity);
  return where_less(place, begin, dead, where_less(place, end, score, dead));
}

// Scores in units of log2, so that the weights are plain powers of two.
struct ScoreRule {
  float factor;  // of the dot product; with a soft cap it leads to the argument of tanh
  float cap;     // 0: none
  bool token_scales;

  ScoreRule(const PagedAttentionParams& params, int64_t head) {
    token_scales = params.k_scale.per_token();
    factor = params.scale;
    if (params.k_scale.data != nullptr && !token_scales)
      factor *= params.k_scale.data[params.k_scale.offset(0, 0, head)];
    cap = params.softcap * kLog2E;
    factor = params.softcap != 0.0f ? factor / params.softcap : factor * kLog2E;
  }

  Vec operator()(Vec dot) const {
    const Vec scaled = mul(dot, broadcast(factor));
    return cap == 0.0f ? scaled : mul(tanh_of(scaled), broadcast(cap));
  }
};

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
