// Tile, thread and stage numbers of the decode kernel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/dtypes.h"
#include "common/split_schedule.h"

namespace pagedkern {

constexpr int kMaxDecodeBlocksPerMultiprocessor = 2;
constexpr int kMaxDecodeBlocks = kMaxMultiprocessors * kMaxDecodeBlocksPerMultiprocessor;
constexpr size_t kSharedBytesOfMultiprocessor = 228 * 1024;
constexpr size_t kReservedSharedBytesOfBlock = 1024;

// Below so many bytes of keys and values a call waits for memory's latency, not its bandwidth: it pays to split it
// finely.
constexpr int64_t kShortCallBytes = 6 << 20;
constexpr int64_t kShortCallShare = 4;  // of the length that is worth a bucket otherwise

// kCache: dtype of the cache; queries are of the same dtype, or either 16-bit one where it is FP8. kDim: head_dim,
// padded to 64, 96, 128, 192 or 256. kRows: (query token, query head) pairs of a tile, 8 or 16. kGeneral: with every
// option and any strides; without, only what most calls need is compiled in.
template <DType kCache_, int kDim_, int kRows_, bool kGeneral_>
struct PagedDecodeConfig {
  static constexpr DType kCache = kCache_;
  static constexpr int kDim = kDim_;
  static constexpr int kRows = kRows_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr bool kFp8 = is_fp8(kCache);
  static constexpr bool kManyRowTiles = false;  // the rows of a sequence are one tile

  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps, kMaxThreads = kThreads;
  static constexpr int kRowBytes = kDim * static_cast<int>(size_of(kCache));  // of one key or value
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kSlabKeys = 16;  // the k of an mma over keys; pages are looked up once a slab
  static constexpr int kSlabBytes = kSlabKeys * kRowBytes;
  // A warp takes about 4 KiB of keys, then of values at a time: enough to hide the cost of a turn.
  static constexpr int kSlabs = std::max(1, 4096 / kSlabBytes);
  static constexpr int kWarpKeys = kSlabs * kSlabKeys;
  static constexpr int kTileKeys = kWarps * kWarpKeys;  // keys of a block's turn, the unit of the schedule
  static constexpr int kSlotBytes = kSlabs * kSlabBytes;

  static constexpr int kColumns = kRows / 8;  // n of the mma over values, in eights
  static constexpr int kSumPitch = kDim + 4;  // floats; a multiple of 4 that spreads rows over the banks
  static constexpr int kQueryPitch = kDim + (kFp8 ? 16 : 8);  // elements, likewise: 8 or 4 bytes a lane
  static constexpr int kRowThreads = kThreads / kRows;
  static constexpr bool kQueryInRegisters = kDim * kRows <= 2048;
  // Parts listed ahead: the one in work, those that loads have reached (each has a step, of two slots), and one
  // between.
  static constexpr int kParts = 8;

  static constexpr int kFixedBytes = kWarps * kRows * (kSumPitch + 2) * 4 + kRows * kQueryPitch * 2 + kRows * 20 + 1280;
  static constexpr int kBytesOfSlots(int blocks) {
    return static_cast<int>(kSharedBytesOfMultiprocessor / blocks - kReservedSharedBytesOfBlock) - kFixedBytes;
  }
  static constexpr int kStageBytes = kWarps * (kSlotBytes + (kGeneral ? 2 * kWarpKeys * 4 : 0));
  static constexpr int kSlotsWith(int blocks) { return std::min(8, kBytesOfSlots(blocks) / kStageBytes); }
  // Two blocks of a multiprocessor where three slots of each fit: one in use, two under way.
  static constexpr int kBlocksPerMultiprocessor = kSlotsWith(2) >= 3 ? 2 : 1;
  static constexpr int kSlots = kSlotsWith(kBlocksPerMultiprocessor);

  // Tiles worth a bucket of their own in a call of `pieces` tiles, where `keys` keys are in a long one.
  PAGEDKERN_HOST_DEVICE static int64_t least_tiles(int64_t pieces, int64_t /*units*/, int64_t keys) {
    const bool is_short = pieces * (2 * kTileKeys * kRowBytes) <= kShortCallBytes;
    return ceil_div<int64_t>(is_short ? ceil_div(keys, kShortCallShare) : keys, kTileKeys);
  }

  static_assert(kDim % 32 == 0 && kDim <= 256 && (kRows == 8 || kRows == 16) && kChunks % 4 == 0);
  static_assert(kSlots / 2 + 3 <= kParts);
  static_assert(kSlots >= 3 && kBlocksPerMultiprocessor <= kMaxDecodeBlocksPerMultiprocessor);
};

}  // namespace pagedkern
