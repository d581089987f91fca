// One item of paged attention (attention_plan.h), at one SIMD level; one source file per element of the cache.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "cpu/simd/attention_direct.h"
#include "cpu/simd/attention_output.h"
#include "cpu/simd/attention_packed.h"

namespace pagedkern::cpu::PAGEDKERN_SIMD {
namespace {

constexpr int kStateLanes = 16;  // floats of maximum and sum for a row in AttentionScratch

int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

template <class Mode, class T>
class ItemRunner {
 public:
  ItemRunner(const AttentionTask& task, const AttentionItem& item, const AttentionScratch& scratch)
      : task_(task),
        params_(*task.params),
        item_(item),
        scratch_(scratch),
        stride_(scratch.padded_dim),
        num_rows_(item.num_tokens * task.group),
        block_rows_(num_rows_ == 1   ? 1
                    : num_rows_ == 2 ? 2
                                     : 4) {}

  void run() {
    start();
    if (item_.key_begin < item_.key_end) {
      TileOffsets tiles[2];
      int64_t key = item_.key_begin / kKeyTile * kKeyTile;
      locate_tile(params_, item_, key, tiles[0]);
      for (int turn = 0; key < item_.key_end; key += kKeyTile, turn ^= 1) {
        const bool more = key + kKeyTile < item_.key_end;
        if (more) locate_tile(params_, item_, key + kKeyTile, tiles[turn ^ 1]);
        run_tile(tiles[turn], more ? &tiles[turn ^ 1] : nullptr);
      }
    }
    finish();
  }

 private:
  float* query(int64_t head, int64_t row) const {
    return scratch_.query + ((head - item_.head_begin) * scratch_.rows + row) * stride_;
  }
  float* output(int64_t head, int64_t row) const {
    return scratch_.output + ((head - item_.head_begin) * scratch_.rows + row) * stride_;
  }
  // State of a row, or of a block of rows where the item is direct.
  float* state(float* buffer, int64_t head, int64_t row) const {
    return buffer + ((head - item_.head_begin) * scratch_.rows + row) * kStateLanes;
  }
  int64_t position(int64_t row) const { return item_.first_position + row / task_.group; }

  void start() {
    const int64_t padded_rows = num_rows_ + kRowPadding;
    for (int64_t row = 0; row < padded_rows; ++row) {
      const int64_t p = position(row < num_rows_ ? row : num_rows_ - 1);
      scratch_.row_begin[row] = clamp(p - task_.window_left, item_.key_begin, item_.key_end);
      scratch_.row_end[row] = clamp(p + task_.window_right + 1, item_.key_begin, item_.key_end);
    }
    for (int64_t head = item_.head_begin; head < item_.head_end; ++head) {
      for (int64_t row = 0; row < num_rows_; ++row) {
        const int64_t offset = (item_.first_token + row / task_.group) * params_.query_stride_token +
                               (head * task_.group + row % task_.group) * params_.query_stride_head;
        load_query<Mode>(params_, offset, stride_, query(head, row));
        if constexpr (Mode::template kOwnOrder<T>) {
          if (item_.direct) Mode::order_query(query(head, row), params_.cache.head_dim);
        }
      }
      std::memset(query(head, num_rows_), 0, kRowPadding * stride_ * sizeof(float));
      std::memset(output(head, 0), 0, padded_rows * stride_ * sizeof(float));
      std::memset(state(scratch_.sum, head, 0), 0, padded_rows * kStateLanes * sizeof(float));
      float* maximum = state(scratch_.maximum, head, 0);
      for (int64_t i = 0; i < padded_rows * kStateLanes; ++i) maximum[i] = -kInfinity;
    }
  }

  void run_tile(const TileOffsets& tile, const TileOffsets* next) {
    const int64_t first_key = tile.first_key;
    // Later rows begin and end later.
    const bool mixed =
        scratch_.row_begin[num_rows_ - 1] > first_key + tile.begin || scratch_.row_end[0] < first_key + tile.end;
    TileRows<T> rows;
    Ahead ahead;
    for (int64_t head = item_.head_begin; head < item_.head_end; ++head) {
      point_at_head(params_, tile, head, rows);
      if (mixed) set_lone_values_apart(params_, tile, rows);
      if (item_.direct) {
        if (next != nullptr) look_ahead(params_, item_, *next, static_cast<int>(head - item_.head_begin), ahead);
        run_direct(tile, rows, head, mixed, next != nullptr ? &ahead : nullptr);
      } else {
        run_packed(tile, rows, head);
      }
    }
  }

  void run_direct(const TileOffsets& tile, const TileRows<T>& rows, int64_t head, bool mixed, const Ahead* ahead) {
    const ScoreRule rule(params_, head);
    for (int64_t row = 0; row < num_rows_; row += block_rows_) {
      constexpr int kLargestGroup = kLanes * Mode::kStep;
      DirectBlock<T> block;
      block.query = query(head, row);
      block.output = output(head, row);
      block.maximum = state(scratch_.maximum, head, row);
      block.sum = state(scratch_.sum, head, row);
      block.masked = mixed || tile.begin % kLargestGroup != 0 || tile.end % kLargestGroup != 0;
      block.alibi = params_.alibi_slopes != nullptr;
      RowLanes lanes;
      if (block.masked || block.alibi) fill_lanes(tile, head, row, lanes);
      block.lanes = &lanes;
      const T* keys = static_cast<const T*>(params_.key_cache.data);
      block.next_keys = head + 1 < item_.head_end ? keys + (head + 1) * params_.key_cache.stride_head : nullptr;
      switch (block_rows_) {
        case 1: direct_tile<Mode, T, 1>(params_, rule, tile, rows, block, stride_, row == 0 ? ahead : nullptr); break;
        case 2: direct_tile<Mode, T, 2>(params_, rule, tile, rows, block, stride_, row == 0 ? ahead : nullptr); break;
        default: direct_tile<Mode, T, 4>(params_, rule, tile, rows, block, stride_, row == 0 ? ahead : nullptr); break;
      }
    }
  }

  void fill_lanes(const TileOffsets& tile, int64_t head, int64_t row, RowLanes& lanes) const {
    for (int i = 0; i < kLanes; ++i) {
      const int64_t r = row + i % block_rows_;
      lanes.begin[i] = place_in_tile(scratch_.row_begin[r], tile.first_key);
      lanes.end[i] = place_in_tile(scratch_.row_end[r], tile.first_key);
      lanes.distance[i] = static_cast<float>(tile.first_key - position(r));
      lanes.slope[i] = params_.alibi_slopes == nullptr || r >= num_rows_
                           ? 0.0f
                           : params_.alibi_slopes[head * task_.group + r % task_.group] * kLog2E;
    }
  }

  void run_packed(const TileOffsets& tile, const TileRows<T>& rows, int64_t head) {
    constexpr int kStep = Mode::kStep;
    const ScoreRule rule(params_, head);
    const int head_dim = params_.cache.head_dim;
    const float* value_scales = params_.v_scale.per_token() ? rows.value_scales : nullptr;
    pack_keys<Mode>(rows, tile, head_dim, scratch_.packed_keys);
    pack_values<Mode>(rows, tile, head_dim, stride_, scratch_.packed_values);
    const int vecs = (head_dim + kLanes - 1) / kLanes;
    for (int64_t row = 0; row < num_rows_; row += kTileRows) {
      const int count = static_cast<int>(num_rows_ - row < kTileRows ? num_rows_ - row : kTileRows);
      const int begin = place(scratch_.row_begin[row], tile), end = place(scratch_.row_end[row + count - 1], tile);
      const int first = begin / kLanes / kStep * kStep, last = (end + kLanes - 1) / kLanes;
      if (begin >= end) continue;

      alignas(64) float scores[kTileRows * kKeyTile];
      float rescale[kTileRows], unit[kTileRows];
      multiply<Mode>(count, last - first, query(head, row), stride_, scratch_.packed_keys + first * kLanes, kKeyTile, 0,
                     head_dim / kStep, scores + first * kLanes, kKeyTile, nullptr, nullptr);
      float* words = scratch_.weights;
      for (int r = 0; r < count; ++r) {
        PackedRow packed;
        packed.begin = place(scratch_.row_begin[row + r], tile);
        packed.end = place(scratch_.row_end[row + r], tile);
        packed.alibi = params_.alibi_slopes != nullptr;
        packed.slope =
            packed.alibi ? params_.alibi_slopes[head * task_.group + (row + r) % task_.group] * kLog2E : 0.0f;
        packed.distance = static_cast<float>(tile.first_key - position(row + r));
        rescale[r] = weigh_row<Mode>(rule, packed, rows.key_scales, value_scales, first, last, scores + r * kKeyTile,
                                     words + r * kKeyTile, *state(scratch_.maximum, head, row + r),
                                     state(scratch_.sum, head, row + r), unit[r]);
      }
      multiply<Mode>(count, vecs, words, kKeyTile, scratch_.packed_values, stride_, first * kLanes / kStep,
                     last * kLanes / kStep, output(head, row), stride_, rescale,
                     value_scales == nullptr ? nullptr : unit);
      for (int r = 0; rows.num_lone > 0 && r < count; ++r) {
        add_lone_values(
            rows, head_dim, place(scratch_.row_begin[row + r], tile), place(scratch_.row_end[row + r], tile),
            [&](int key) { return scores[r * kKeyTile + key]; }, output(head, row + r));
      }
    }
  }

  static int place(int64_t key, const TileOffsets& tile) {
    return static_cast<int>(clamp(key - tile.first_key, 0, kKeyTile));
  }

  // Maximum and sum of a finished row.
  void row_state(int64_t head, int64_t row, float& maximum, float& sum) const {
    const int64_t block = item_.direct ? row / block_rows_ * block_rows_ : row;
    const int lane = static_cast<int>(row - block);
    const int step = item_.direct ? block_rows_ : 1;
    const float* sums = state(scratch_.sum, head, block);
    maximum = state(scratch_.maximum, head, block)[lane];
    sum = 0.0f;
    for (int i = lane; i < kLanes; i += step) sum += sums[i];
  }

  void finish() {
    const int head_dim = params_.cache.head_dim;
    for (int64_t head = item_.head_begin; head < item_.head_end; ++head) {
      for (int row = 0; row < num_rows_; ++row) {
        float maximum, sum;
        row_state(head, row, maximum, sum);
        if constexpr (Mode::template kOwnOrder<T>) {
          if (item_.direct) Mode::order_output(output(head, row), head_dim);
        }
        if (item_.num_splits == 1) {
          write(head, row, output(head, row), maximum, sum);
        } else {
          write_partial(partial_row(task_, item_, item_.split, head, row), head_dim, output(head, row), maximum, sum);
        }
      }
    }
    if (item_.num_splits == 1) return;
    if (task_.counters[item_.counter].fetch_add(1, std::memory_order_acq_rel) != item_.num_splits - 1) return;
    for (int64_t head = item_.head_begin; head < item_.head_end; ++head) {
      for (int row = 0; row < num_rows_; ++row) {
        alignas(64) float merged[kMaxHeadDim + kLanes];
        float maximum, sum;
        merge_row(task_, item_, head, row, merged, maximum, sum);
        write(head, row, merged, maximum, sum);
      }
    }
  }

  void write(int64_t head, int row, const float* output, float maximum, float sum) const {
    write_row(params_, item_.first_token + row / task_.group, head * task_.group + row % task_.group, head, output,
              maximum, sum);
  }

  const AttentionTask& task_;
  const PagedAttentionParams& params_;
  const AttentionItem& item_;
  const AttentionScratch& scratch_;
  const int64_t stride_;
  const int num_rows_;
  const int block_rows_;
};

template <class Mode, class T>
void run_as(const AttentionTask& task, const AttentionItem& item, const AttentionScratch& scratch) {
  ItemRunner<Mode, T>(task, item, scratch).run();
}

// T: an element of the cache. bfloat16 queries over a cache of at most 16 bits use the machine's bfloat16 products.
template <class T>
void run_item(const AttentionTask& task, const AttentionItem& item, const AttentionScratch& scratch) {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
  if constexpr (!std::is_same_v<T, float> && !std::is_same_v<T, Half>) {
    if (task.params->dtype == DType::kBFloat16) return run_as<BFloat16Mode, T>(task, item, scratch);
  }
#endif
  run_as<FloatMode, T>(task, item, scratch);
}

}  // namespace
}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
