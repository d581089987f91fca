// Which rows a block has, and the 16-byte pieces its tiles are made of.
#pragma once

#include "arch/cp_async.cuh"
#include "arch/ldmatrix.cuh"
#include "paged_prefill/config.h"
#include "paged_prefill/params.h"

namespace pagedkern {

// Piece `piece` (16 bytes) of row `row` of a tile whose rows have kPieces pieces stands at this piece. Eight rows of
// one piece, and eight neighbours of one row, lie in eight different 16-byte columns of the 128 bytes of the banks.
template <int kPieces>
static __device__ __forceinline__ int swizzle_piece(int row, int piece) {
  if constexpr (kPieces % 8 == 0) return piece ^ (row & 7);
  static_assert(kPieces % 4 == 0);
  return piece ^ ((row >> 1) & 3);  // rows are an odd number of half bank widths apart
}

// One 16-byte piece to shared memory: `bytes` of it (a multiple of 8 elements, 0 or less: none) from `source`, zeros
// behind. `width` is the access that every piece of the tensor allows.
template <class Element>
static __device__ __forceinline__ void copy_piece(void* shared, const Element* source, int bytes, int width) {
  const uint32_t address = shared_address(shared);
  if (width == 16) {
    cp_async<16>(address, source, bytes > 0 ? (bytes < 16 ? bytes : 16) : 0);
  } else if (width == 8) {
    cp_async<8>(address, source, bytes >= 8 ? 8 : 0);
    cp_async<8>(address + 8, reinterpret_cast<const char*>(source) + 8, bytes >= 16 ? 8 : 0);
  } else {
    constexpr int kCount = 16 / sizeof(Element);
    alignas(16) Element elements[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      elements[i] = i * static_cast<int>(sizeof(Element)) < bytes ? source[i] : Element{0};
    }
    *reinterpret_cast<uint4*>(shared) = *reinterpret_cast<const uint4*>(elements);
  }
}

// Up to tile_rows rows of one sequence; row r is query token r / group of the sequence, query head r % group of the KV
// head. Tiles start at the sequence's own first row, so that what is in one depends on its sequence alone.
struct QueryTile {
  int64_t sequence;
  int64_t first_token;  // of the sequence, in query
  int64_t first_row;    // of the tile, in the sequence
  int32_t query_len;
  int32_t num_rows;
};

// The last tile of a sequence comes first: the longest work of a causal mask goes ahead.
static __device__ __forceinline__ QueryTile query_tile(const PagedPrefillParams& p, const Part& part) {
  const int64_t rows = static_cast<int64_t>(part.query_len) * p.group;
  const int64_t first_row = (ceil_div<int64_t>(rows, p.tile_rows) - 1 - part.row_tile) * p.tile_rows;
  return {part.seq, part.query_begin, first_row, part.query_len,
          static_cast<int32_t>(min(rows - first_row, static_cast<int64_t>(p.tile_rows)))};
}

// Keys that some row of the tile sees, of those of the part.
template <class Config>
static __device__ __forceinline__ KeyRange keys_of(const PagedPrefillParams& p, const QueryTile& tile,
                                                   const Part& part) {
  const int64_t before = static_cast<int64_t>(part.seq_len) - tile.query_len;
  const int64_t first = before + tile.first_row / p.group;
  const int64_t last = before + (tile.first_row + tile.num_rows - 1) / p.group;
  return {max(visible_keys(first, p.window, part.seq_len).begin, part.tile_begin * Config::kTileKeys),
          static_cast<int32_t>(min(static_cast<int64_t>(visible_keys(last, p.window, part.seq_len).end),
                                   part.tile_end * int64_t{Config::kTileKeys}))};
}

// A block without a cluster is one of its own.
struct ClusterPlace {
  uint32_t rank;
  uint32_t bucket;
  uint32_t buckets;

  static __device__ __forceinline__ ClusterPlace of(const PagedPrefillParams& p) {
    return {blockIdx.x & ((1u << p.cluster_log) - 1), blockIdx.x >> p.cluster_log, gridDim.x >> p.cluster_log};
  }
};

// Keys of a tile that a block loads for its cluster.
template <class Config>
static __device__ __forceinline__ uint32_t own_keys(const PagedPrefillParams& p) {
  return static_cast<uint32_t>(Config::kKeys) >> p.cluster_log;
}

// The block's own rows of the cluster's tile; there may be none.
static __device__ __forceinline__ QueryTile rows_of_block(const PagedPrefillParams& p, QueryTile tile, uint32_t rank) {
  const int32_t before = static_cast<int32_t>(rank) * p.block_rows;
  tile.first_row += before;
  tile.num_rows = max(min(tile.num_rows - before, p.block_rows), 0);
  return tile;
}

}  // namespace pagedkern
