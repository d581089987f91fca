// Queries, keys, values and per-token scales to shared memory.
#pragma once

#include "arch/cluster.cuh"
#include "arch/fp8x4.cuh"
#include "common/row_shift.cuh"
#include "paged_prefill/tile.cuh"

namespace pagedkern {

// Token and head of every row of the tile, and its query rows; zeros in rows there are not and behind head_dim.
template <class Config, class Shared>
static __device__ __forceinline__ void load_queries(const PagedPrefillParams& p, const QueryTile& tile, int kv_head,
                                                    Shared& s) {
  constexpr int kPieces = Config::kPieces;
  if (static_cast<int>(threadIdx.x) < p.block_rows) {
    const int64_t row = tile.first_row + threadIdx.x;
    const int64_t token = row / p.group;
    s.row_token[threadIdx.x] = static_cast<int32_t>(token);
    s.row_head[threadIdx.x] = kv_head * p.group + static_cast<int32_t>(row - token * p.group);
  }
  __syncthreads();
  const auto* query = static_cast<const uint16_t*>(p.op.query) + tile.first_token * p.op.query_stride_token;
#pragma unroll 4
  for (int i = threadIdx.x; i < p.block_rows * kPieces; i += blockDim.x) {
    const int row = i / kPieces, piece = i - row * kPieces;
    const int bytes = row < tile.num_rows ? p.op.cache.head_dim * 2 - piece * 16 : 0;
    const int64_t offset =
        bytes <= 0 ? 0
                   : s.row_token[row] * p.op.query_stride_token + s.row_head[row] * p.op.query_stride_head + piece * 8;
    copy_piece(s.query + (row * kPieces + swizzle_piece<kPieces>(row, piece)) * 8, query + offset, bytes,
               p.query_width);
  }
  cp_async_commit();
}

// The warp's query rows in shared memory become float16, if they are not, and their factors known: lanes l and l + 16
// have row l. Ends behind a barrier of the warp.
template <class Config, class Shared>
static __device__ __forceinline__ void shift_queries(bool bfloat16, Shared& s) {
  constexpr int kPieces = Config::kPieces;
  const int row = threadIdx.x / 32 * Config::kWarpRows + threadIdx.x % 16, half = threadIdx.x % 32 / 16;
  RowShift shift = {1.0f, 1.0f};
  if (bfloat16) {
    uint4* pieces = reinterpret_cast<uint4*>(s.query) + row * kPieces;
    uint32_t greatest = 0;
#pragma unroll 4
    for (int i = half; i < kPieces; i += 2) {
      const uint4 piece = pieces[swizzle_piece<kPieces>(row, i)];
      greatest = max(greatest, greatest_bits(piece));
    }
    shift = RowShift::of(max(greatest, __shfl_xor_sync(0xFFFFFFFFu, greatest, 16)));
#pragma unroll 4
    for (int i = half; i < kPieces; i += 2) {
      uint4* place = pieces + swizzle_piece<kPieces>(row, i);
      const uint4 piece = *place;
      *place = shifted_to_half(piece, shift.up);
    }
  }
  if (half == 0) s.row_factor[row] = shift.down;
  __syncwarp();
}

// Which page a key lies on: threads 0..kKeys-1 look up the keys of a tile, the next kKeys their values.
struct PageLookup {
  int32_t block = -1;  // -1: no row sees the key, or another block loads it, so its table entry is not read
  uint32_t token = 0;  // in the block
};

template <class Config>
static __device__ __forceinline__ PageLookup look_up(const PagedPrefillParams& p, int64_t sequence, KeyRange keys,
                                                     int key_tile, uint32_t rank) {
  PageLookup found;
  const uint32_t place = threadIdx.x % Config::kKeys;
  const int key = key_tile * Config::kKeys + static_cast<int>(place);
  const bool own = place / own_keys<Config>(p) == rank;
  if (threadIdx.x < 2 * Config::kKeys && own && key >= keys.begin && key < keys.end) {
    const uint32_t page = static_cast<uint32_t>(key) / p.block_size;
    found.token = static_cast<uint32_t>(key) - page * p.block_size;
    found.block = p.op.block_table[sequence * p.op.block_table_stride + page];
  }
  return found;
}

// Where the row of the key or value begins; of keys nobody sees, an address that is not read.
template <class Config, class Shared>
static __device__ __forceinline__ void store_row(const PagedPrefillParams& p, const PageLookup& found, int kv_head,
                                                 int buffer, Shared& s) {
  if (threadIdx.x >= 2 * Config::kKeys) return;
  const int side = threadIdx.x / Config::kKeys;
  const PagedCache& cache = side == 0 ? p.op.key_cache : p.op.value_cache;
  const int64_t offset = found.block < 0 ? 0 : cache.offset(found.block, found.token, kv_head);
  s.row[buffer][side][threadIdx.x % Config::kKeys] = static_cast<const typename Shared::Element*>(cache.data) + offset;
}

// The key's k_scale or v_scale where that is per token; 0 for keys nobody sees.
template <class Config>
static __device__ __forceinline__ float load_scale(const PagedPrefillParams& p, const PageLookup& found, int kv_head) {
  const KvScale& scale = threadIdx.x < Config::kKeys ? p.op.k_scale : p.op.v_scale;
  return found.block < 0 || !scale.per_token() ? 0.0f : scale.data[scale.offset(found.block, found.token, kv_head)];
}

template <class Config, class Shared>
static __device__ __forceinline__ void store_scale(float scale, int buffer, Shared& s) {
  if (threadIdx.x < 2 * Config::kKeys)
    s.scale[buffer][threadIdx.x / Config::kKeys][threadIdx.x % Config::kKeys] = scale;
}

// Starts the copies of the block's own share of a tile whose rows are known. Rows nobody sees and columns behind
// head_dim become zeros.
template <class Config, bool kFp8, class Shared>
static __device__ __forceinline__ void start_tile(const PagedPrefillParams& p, KeyRange keys, int key_tile,
                                                  uint32_t rank, Shared& s) {
  using Element = typename Shared::Element;
  constexpr int kElements = 16 / sizeof(Element);
  constexpr int kRowPieces = Config::kPieces * sizeof(Element) / 2;
  const int stage = key_tile % 2;
  const int row_bytes = p.op.cache.head_dim * sizeof(Element);
  const int first = keys.begin - key_tile * Config::kKeys, last = keys.end - key_tile * Config::kKeys - 1;
  const int own = own_keys<Config>(p), end = (rank + 1) * own * kRowPieces;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
#pragma unroll 4
    for (int i = rank * own * kRowPieces + threadIdx.x; i < end; i += blockDim.x) {
      const int row = i / kRowPieces, piece = i - row * kRowPieces;
      const int bytes = row < first || row > last ? 0 : row_bytes - piece * 16;
      const Element* source = s.row[stage][side][row] + piece * kElements;
      if constexpr (kFp8) {
        copy_piece(s.codes[stage][side] + i * kElements, source, bytes, p.cache_width);
      } else {
        const int place = row * kRowPieces + swizzle_piece<kRowPieces>(row, piece);
        copy_piece(s.tiles[stage][side] + place * kElements, source, bytes, p.cache_width);
      }
    }
  }
}

// What the other blocks of the cluster have loaded of a tile, behind a barrier of the cluster. The next one must come
// before a block loads to this stage again, or ends.
template <class Config, bool kFp8, class Shared>
static __device__ __forceinline__ void take_from_cluster(const PagedPrefillParams& p, bool token_scales, int stage,
                                                         uint32_t rank, Shared& s) {
  constexpr int kKeys = Config::kKeys;
  constexpr int kRowPieces = Config::kPieces * sizeof(typename Shared::Element) / 2;
  const int own = own_keys<Config>(p);
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    uint4* tile;
    if constexpr (kFp8) {
      tile = reinterpret_cast<uint4*>(s.codes[stage][side]);
    } else {
      tile = reinterpret_cast<uint4*>(s.tiles[stage][side]);
    }
#pragma unroll 4
    for (int i = threadIdx.x; i < (kKeys - own) * kRowPieces; i += blockDim.x) {
      const int row = ((rank + 1) * own + i / kRowPieces) % kKeys;  // each block begins with another
      uint4* piece = tile + row * kRowPieces + i % kRowPieces;
      *piece = load_from_cluster_16(address_in_block(shared_address(piece), row / own));
    }
  }
  const uint32_t key = threadIdx.x % kKeys;
  if (token_scales && threadIdx.x < 2 * kKeys && key / own != rank) {
    float& scale = s.scale[stage][threadIdx.x / kKeys][key];
    scale = load_from_cluster_float(address_in_block(shared_address(&scale), key / own));
  }
}

template <class Config, bool kE5M2, class Shared>
static __device__ __forceinline__ void decode_codes(int stage, Shared& s) {
  constexpr int kPieces = Config::kPieces;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
#pragma unroll 4
    for (int i = threadIdx.x; i < Config::kKeys * kPieces; i += blockDim.x) {
      const int row = i / kPieces, piece = i - row * kPieces;
      const uint2 codes = *reinterpret_cast<const uint2*>(s.codes[stage][side] + i * 8);
      const int place = row * kPieces + swizzle_piece<kPieces>(row, piece);
      uint4 halves;
      if constexpr (kE5M2) {
        e5m2x4_to_f16x4(codes.x, halves.x, halves.y);
        e5m2x4_to_f16x4(codes.y, halves.z, halves.w);
      } else {
        e4m3x4_to_f16x4(codes.x, halves.x, halves.y);
        e4m3x4_to_f16x4(codes.y, halves.z, halves.w);
      }
      *reinterpret_cast<uint4*>(s.tiles[0][side] + place * 8) = halves;
    }
  }
}

// The FP8 codes of a stage as float16 in tiles[0].
template <class Config, class Shared>
static __device__ __forceinline__ void decode_tile(bool e5m2, int stage, Shared& s) {
  if (e5m2) {
    decode_codes<Config, true>(stage, s);
  } else {
    decode_codes<Config, false>(stage, s);
  }
}

}  // namespace pagedkern
