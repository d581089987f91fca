// What csrc/cpu/attention.cpp decides and csrc/cpu/simd/attention.cpp carries out. Plain structs only: both are
// compiled with different instruction sets, and no inline function may be shared between them.
#pragma once

#include <atomic>
#include <cstdint>

#include "common/attention_params.h"
#include "cpu/simd.h"

namespace pagedkern::cpu {

constexpr int kKeyTile = 64;  // keys of one online-softmax step; tiles start at multiples of it
constexpr int kMaxHeadDim = 256;
constexpr int kMaxDirectRows = 8;    // rows of a KV head that read the cache in place; more are worth a packed tile
constexpr int kPackedRows = 96;      // rows of a query tile that packs its keys and values
constexpr int kRowPadding = 8;       // spare rows behind a tile's own, for kernels that take several at once
constexpr int kAutoSplitKeys = 256;  // least keys of a split where num_splits = 0
constexpr int kMaxAutoSplits = 16;
constexpr int kMaxAutoSplitTokens =
    16;  // of one sequence's query, on any backend: more tokens fill the machine unsplit

// One unit of work: a query tile of one sequence, some of its KV heads, one range of keys.
// Rows of a KV head: row = token in tile * group + query head in group.
struct AttentionItem {
  int64_t seq;
  int64_t first_token;     // of the tile, a row of query and out
  int64_t first_position;  // of that token among the sequence's keys, negative where q_len > seq_len
  int64_t seq_len;
  int64_t key_begin;  // keys of this split that some row of the tile sees
  int64_t key_end;
  int64_t partial_row;  // of the tile's first row in AttentionTask::partials, [split, kv_head, row]
  int64_t counter;      // of the tile and head range in AttentionTask::counters
  int32_t num_tokens;
  int32_t head_begin;  // KV heads
  int32_t head_end;
  int32_t split;
  int32_t num_splits;  // that have keys; 1: the item writes out and lse itself
  bool direct;
};

struct AttentionTask {
  const PagedAttentionParams* params;
  int32_t group;         // query heads of a KV head
  int64_t window_left;   // a negative window has become one longer than any sequence
  int64_t window_right;  // causal included
  float* partials;       // rows of head_dim + 2 floats: unscaled output, maximum (log2), sum
  std::atomic<int32_t>* counters;
};

// Buffers of one worker. `padded_dim` is head_dim rounded up to a multiple of 64, `rows` includes kRowPadding.
struct AttentionScratch {
  int64_t padded_dim;
  int64_t rows;
  float* query;          // [heads, rows, padded_dim]
  float* output;         // [heads, rows, padded_dim], relative to maximum
  float* maximum;        // [heads, rows, 16]
  float* sum;            // [heads, rows, 16], partial sums of each lane
  float* packed_keys;    // [padded_dim, kKeyTile]
  float* packed_values;  // [kKeyTile, padded_dim]
  float* weights;        // [kRowPadding, kKeyTile]
  int64_t* row_begin;    // [rows], first key that the row sees
  int64_t* row_end;      // [rows], behind the last
};

}  // namespace pagedkern::cpu

PAGEDKERN_DECLARE_SIMD(void, run_attention_item,
                       (const AttentionTask& task, const AttentionItem& item, const AttentionScratch& scratch))
