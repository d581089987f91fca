// Tile, thread and stage numbers of the prefill kernel.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/split_schedule.h"

namespace pagedkern {

constexpr int kPrefillRows = 64;         // (query token, query head) pairs of one KV head that a block takes
constexpr int kPrefillManyRows = 128;    // where a KV head has more query heads than that: one block loads for all
constexpr int kPrefillMostBlocks = 8;    // where it has more than that: a cluster of blocks, each loads a share for all
constexpr int kPrefillThreadsOfRow = 2;  // a warp takes 16 rows

// Threads of a multiprocessor, for the register allocation.
constexpr int prefill_resident_threads(int64_t dim, bool fp8) {
  return dim <= 64 && !fp8 ? 384 : 256;
}

// Blocks that share what they load, as a power of two: enough of them for all query heads of a KV head, up to 1,024.
inline int prefill_cluster_log(int64_t group) {
  int log = 0;
  while (1 << log < kPrefillMostBlocks && group > kPrefillManyRows << log) ++log;
  return log;
}

inline int prefill_block_rows(int64_t group) {
  return group > kPrefillRows ? kPrefillManyRows : kPrefillRows;
}

// Of a unit of the schedule.
inline int prefill_rows(int64_t group) {
  return prefill_block_rows(group) << prefill_cluster_log(group);
}

// Of a full GPC of a GH100; some have fewer.
constexpr int64_t kMultiprocessorsOfGroup = 18;

// Of 16 bytes: what a thread keeps of a partial result.
constexpr int prefill_slot_vectors(int64_t dim) {
  return static_cast<int>(dim / 8 + 1);
}

// Keys below which a part is not worth a partial result, written and waited for.
constexpr int32_t kPrefillLeastKeys = 128;

// kDim: head_dim, padded to 64, 96, 128, 192 or 256. kFp8: the cache is FP8.
template <int kDim, bool kFp8>
struct PagedPrefillConfig {
  static constexpr int kWarpRows = 32 / kPrefillThreadsOfRow;  // query rows of a warp: the M of one mma
  static constexpr int kMaxRows = kPrefillManyRows;
  static constexpr int kMaxThreads = kMaxRows * kPrefillThreadsOfRow;
  static constexpr int kKeys = kDim <= 128 ? 64 : 32;  // keys of a tile
  static constexpr int kTileKeys = kKeys;              // the unit of the schedule
  static constexpr bool kManyRowTiles = true;
  static constexpr int kStages = 2;  // tiles in flight or in use
  static constexpr int kResidentThreads = prefill_resident_threads(kDim, kFp8);
  static constexpr int kPieces = kDim / 8;  // 16-byte pieces of a row of 16-bit elements
  static constexpr int kSlotVectors = prefill_slot_vectors(kDim);
  static constexpr bool kQueryInRegisters = kDim <= 128;

  // Tiles worth a bucket of their own. The last block of a unit reads the partial results of all parts, each in about a
  // third of the time that a tile takes (predicted from their bytes): of n tiles, more than sqrt(3 n) parts take longer
  // to merge than they save.
  PAGEDKERN_HOST_DEVICE static int64_t least_tiles(int64_t pieces, int64_t units, int64_t keys) {
    const float tiles = static_cast<float>(pieces) / static_cast<float>(units < 1 ? 1 : units);
    const auto balanced = static_cast<int64_t>(sqrtf(tiles / 3.0f));
    const int64_t least = ceil_div<int64_t>(keys, kTileKeys);
    return balanced < least ? least : balanced;
  }

  static_assert(kDim % 32 == 0 && kDim <= 256);
  static_assert(2 * kKeys <= kPrefillRows * kPrefillThreadsOfRow, "a thread looks up the page of one key or value");
};

// Rows of 16-bit elements have their pieces permuted (swizzle_piece), so that ldmatrix and 16-byte stores meet no bank
// twice.
template <int kDim, bool kFp8>
struct PagedPrefillShared {
  using Config = PagedPrefillConfig<kDim, kFp8>;
  using Element = std::conditional_t<kFp8, uint8_t, uint16_t>;        // of the cache
  static constexpr int kTile = Config::kKeys * kDim;                  // elements
  alignas(128) uint16_t tiles[kFp8 ? 1 : Config::kStages][2][kTile];  // keys, values
  alignas(128) uint8_t codes[kFp8 ? Config::kStages : 1][2][kFp8 ? kTile : 16];
  const Element* row[2][2][Config::kKeys];        // of keys and values in their cache
  float scale[2][2][Config::kKeys];               // per token: k_scale, v_scale
  int32_t row_token[Config::kMaxRows];            // of the sequence
  int32_t row_head[Config::kMaxRows];             // query head
  float row_factor[kFp8 ? Config::kMaxRows : 1];  // that brings a row's scores back from its shift, see row_shift.cuh
  SplitShared<Config::kMaxThreads / 32, 1> split;
  alignas(128) uint16_t query[Config::kMaxRows * kDim];  // as many rows as a block takes; in the end the output

  static constexpr size_t bytes(int rows) {
    return sizeof(PagedPrefillShared) - (Config::kMaxRows - rows) * kDim * sizeof(uint16_t);
  }
};

constexpr size_t kMaxSharedBytesOfBlock = 227 * 1024;
template <bool kFp8>
constexpr bool kTwoBlocksFit = PagedPrefillShared<256, kFp8>::bytes(kPrefillRows) <= kMaxSharedBytesOfBlock / 2;
static_assert(kTwoBlocksFit<true> && kTwoBlocksFit<false>, "on a multiprocessor");
static_assert(sizeof(PagedPrefillShared<256, true>) <= kMaxSharedBytesOfBlock);

}  // namespace pagedkern
