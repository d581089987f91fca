// Tile, thread and stage numbers of the prefill kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pagedkern {

// kDim: head_dim, padded to 64, 96, 128, 192 or 256. kFp8: the cache is FP8.
template <int kDim, bool kFp8>
struct PagedPrefillConfig {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 16;                            // query rows of a warp: the M of one mma
  static constexpr int kRows = kWarps * kWarpRows;                // (query token, query head) pairs of one KV head
  static constexpr int kKeys = kDim <= 128 ? 64 : 32;             // keys of a tile
  static constexpr int kStages = 2;                               // tiles in flight or in use
  static constexpr int kMinBlocks = kDim <= 64 && !kFp8 ? 3 : 2;  // of a multiprocessor, for the register allocation
  static constexpr int kPieces = kDim / 8;                        // 16-byte pieces of a row of 16-bit elements
  static constexpr bool kQueryInRegisters = kDim <= 128;

  static_assert(kDim % 32 == 0 && kDim <= 256);
  static_assert(2 * kKeys <= kThreads, "a thread looks up the page of one key or value");
};

// Rows of 16-bit elements have their pieces permuted (swizzle_piece), so that ldmatrix and 16-byte stores meet no bank
// twice.
template <int kDim, bool kFp8>
struct PagedPrefillShared {
  using Config = PagedPrefillConfig<kDim, kFp8>;
  using Element = std::conditional_t<kFp8, uint8_t, uint16_t>;        // of the cache
  static constexpr int kTile = Config::kKeys * kDim;                  // elements
  alignas(128) uint16_t query[Config::kRows * kDim];                  // the output on its way out, in the end
  alignas(128) uint16_t tiles[kFp8 ? 1 : Config::kStages][2][kTile];  // keys, values
  alignas(128) uint8_t codes[kFp8 ? Config::kStages : 1][2][kFp8 ? kTile : 16];
  const Element* row[2][2][Config::kKeys];  // of keys and values in their cache
  float scale[2][2][Config::kKeys];         // per token: k_scale, v_scale
  int32_t row_token[Config::kRows];         // of the sequence
  int32_t row_head[Config::kRows];          // query head
};

constexpr size_t kMaxSharedBytesOfBlock = 227 * 1024;
static_assert(sizeof(PagedPrefillShared<256, true>) <= kMaxSharedBytesOfBlock / 2, "two blocks on a multiprocessor");
static_assert(sizeof(PagedPrefillShared<256, false>) <= kMaxSharedBytesOfBlock / 2, "two blocks on a multiprocessor");

}  // namespace pagedkern
