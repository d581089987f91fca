// Keys and values on their way to shared memory: each warp fills a ring of its own, through all parts of the bucket
// without a stop, so that no barrier of the block stands in its way.
#pragma once

#include "arch/cp_async.cuh"
#include "arch/ldmatrix.cuh"
#include "paged_decode/params.h"
#include "paged_decode/shared.cuh"

namespace pagedkern {

// Where a 16-byte chunk of a row lies in a slab: chunks are permuted so that neither 8 rows of one chunk (ldmatrix) nor
// 128 bytes in a row (copies) meet a bank twice.
template <class Config>
static __device__ __forceinline__ int swizzled(int row, int chunk) {
  const int turn = Config::kChunks % 8 == 0 ? row & 7 : row >> 1 & 3;
  return row * Config::kRowBytes + ((chunk ^ turn) << 4);
}

template <class Config>
class LoadStream {
 public:
  // Lanes to a row of one copy instruction: 16, 8 or 4 rows' worth where a row is shorter than the warp.
  static constexpr int kChunks = Config::kChunks;
  static constexpr int kLanes = kChunks % 32 == 0 ? 32 : kChunks % 16 == 0 ? 16 : kChunks % 8 == 0 ? 8 : 4;
  static constexpr int kRowsAtOnce = 32 / kLanes;
  static constexpr int kElementBytes = static_cast<int>(size_of(Config::kCache));

  __device__ __forceinline__ void start(const PagedDecodeParams& p, const Part* parts, int warp, int lane) {
    parts_ = parts;
    warp_ = warp;
    lane_ = lane;
    target_ = swizzled<Config>(lane / kLanes, lane % kLanes);
    begin_part(p);
  }

  // Keys, then values of each step: into `slot` (shared address), one group of copies a call, empty in the end.
  template <bool kValues>
  __device__ __forceinline__ void issue(const PagedDecodeParams& p, uint32_t slot, uint32_t scales) {
    int64_t offsets[Config::kSlabs];
#pragma unroll
    for (int slab = 0; slab < Config::kSlabs; ++slab) {  // here, where the warp is whole
      offsets[slab] = __shfl_sync(0xFFFFFFFFu, kValues ? value_offset_ : key_offset_, slab_ + slab);
    }
    if (static_cast<uint32_t>(key_ - live_begin_) < live_length_) {
#pragma unroll
      for (int slab = 0; slab < Config::kSlabs; ++slab) {
        const uint32_t to = slot + slab * Config::kSlabBytes;
        if (!Config::kGeneral || p.slabs_in_pages) {
          copy_slab<kValues>(p, to, offsets[slab]);
        } else {
          copy_rows<kValues>(p, to, key_ + slab * Config::kSlabKeys);
        }
        if constexpr (Config::kGeneral && !kValues) {
          copy_scales(p, scales + slab * Config::kSlabKeys * 4, key_ + slab * Config::kSlabKeys);
        }
      }
    }
    cp_async_commit();
    if constexpr (kValues) advance(p);
  }

 private:
  __device__ __forceinline__ void advance(const PagedDecodeParams& p) {
    key_ += Config::kTileKeys;
    slab_ += Config::kSlabs;
    if (__builtin_expect(--steps_ <= 0, 0)) {
      if (steps_ == 0) begin_part(p);
    } else if (__builtin_expect(slab_ == 32, 0)) {
      look_up(p);
    }
  }

  __device__ __forceinline__ void begin_part(const PagedDecodeParams& p) {
    const Part& part = parts_[next_++ % Config::kParts];
    steps_ = part.tile_end - part.tile_begin;
    live_length_ = 0;
    if (steps_ == 0) return;
    key_ = part.tile_begin * Config::kTileKeys + warp_ * Config::kWarpKeys;
    begin_ = part.keys.begin;
    end_ = part.keys.end;
    if (begin_ >= end_) return;
    live_begin_ = begin_ / Config::kWarpKeys * Config::kWarpKeys;
    live_length_ = static_cast<uint32_t>(end_ - live_begin_);
    head_ = part.head;
    table_ = p.op.block_table + part.seq * p.op.block_table_stride;
    const int row = lane_ / kLanes, chunk = lane_ % kLanes;
    const PagedCache &k = p.op.key_cache, &v = p.op.value_cache;
    keys_ =
        static_cast<const char*>(k.data) + (row * k.stride_token + head_ * k.stride_head) * kElementBytes + chunk * 16;
    values_ =
        static_cast<const char*>(v.data) + (row * v.stride_token + head_ * v.stride_head) * kElementBytes + chunk * 16;
    look_up(p);
  }

  // Each lane finds one of the warp's next 32 slabs. In place of one that no row sees it takes the nearest that some
  // row does: its page may not be touched, and the copy, which comes as one piece with others, harms nobody.
  __device__ __forceinline__ void look_up(const PagedDecodeParams& p) {
    slab_ = 0;
    if ((Config::kGeneral && !p.slabs_in_pages) || lane_ / Config::kSlabs >= steps_) return;
    const int32_t key = key_ + lane_ / Config::kSlabs * Config::kTileKeys + lane_ % Config::kSlabs * Config::kSlabKeys;
    const auto seen = static_cast<uint32_t>(min(max(key, begin_), end_ - 1) & ~(Config::kSlabKeys - 1));
    const uint32_t column = seen / p.block_size;
    const int64_t block = table_[column];
    key_offset_ = p.op.key_cache.offset(block, seen - column * p.block_size, 0) * kElementBytes;
    value_offset_ = p.op.value_cache.offset(block, seen - column * p.block_size, 0) * kElementBytes;
  }

  // 16 rows of one page, 16 bytes a lane.
  template <bool kValues>
  __device__ __forceinline__ void copy_slab(const PagedDecodeParams& p, uint32_t slot, int64_t offset) {
    const char* source = (kValues ? values_ : keys_) + offset;
    const int64_t step = (kValues ? p.op.value_cache : p.op.key_cache).stride_token * (kRowsAtOnce * kElementBytes);
    const uint32_t lane_target = slot + target_;
#pragma unroll
    for (int row = 0; row < Config::kSlabKeys; row += kRowsAtOnce) {
      // Rows of a copy are numbered by the lane's low bits, so that further rows turn the chunks by one constant.
      const uint32_t turn = Config::kChunks % 8 == 0 ? row & 7 : row >> 1 & 3;
      const uint32_t target = (lane_target ^ (turn << 4)) + row * Config::kRowBytes;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += kLanes) cp_async<16>(target + chunk * 16, source + chunk * 16, 16);
      source += step;
    }
  }

  // 16 rows wherever they are, in the widest pieces that their addresses allow.
  template <bool kValues>
  __device__ __forceinline__ void copy_rows(const PagedDecodeParams& p, uint32_t slot, int32_t first) {
    const PagedCache& cache = kValues ? p.op.value_cache : p.op.key_cache;
    int64_t offset = -1;
    bool seen = false;
    const int32_t key = first + lane_ % Config::kSlabKeys;
    if (key >= begin_ && key < end_) {
      const uint32_t column = static_cast<uint32_t>(key) / p.block_size;
      offset = cache.offset(table_[column], static_cast<uint32_t>(key) - column * p.block_size, head_) * kElementBytes;
      seen = true;
    }
    const uint32_t rows = __ballot_sync(0xFFFFFFFFu, seen);
    const int bytes = p.op.cache.head_dim * kElementBytes;
#pragma unroll 1
    for (int row = lane_ / 16; row < Config::kSlabKeys; row += 2) {
      const char* source = static_cast<const char*>(cache.data) + __shfl_sync(0xFFFFFFFFu, offset, row);
      if ((rows >> row & 1) == 0) continue;
#pragma unroll 1
      for (int byte = lane_ % 16 * p.cache_width; byte < bytes; byte += 16 * p.cache_width) {
        copy_piece(slot + swizzled<Config>(row, byte >> 4) + (byte & 15), source + byte, p.cache_width);
      }
    }
  }

  static __device__ __forceinline__ void copy_piece(uint32_t target, const char* source, int width) {
    switch (width) {
      case 16: cp_async<16>(target, source, 16); break;
      case 8: cp_async<8>(target, source, 8); break;
      case 4: cp_async<4>(target, source, 4); break;
      case 2: *static_cast<uint16_t*>(generic(target)) = *reinterpret_cast<const uint16_t*>(source); break;
      default: *static_cast<char*>(generic(target)) = *source; break;
    }
  }
  static __device__ __forceinline__ void* generic(uint32_t shared) { return __cvta_shared_to_generic(shared); }

  // Scales of the slab's keys, where each has its own: those of keys, then those of values.
  __device__ __forceinline__ void copy_scales(const PagedDecodeParams& p, uint32_t to, int32_t first) const {
    const bool of_values = lane_ >= Config::kSlabKeys;
    const KvScale& scale = of_values ? p.op.v_scale : p.op.k_scale;
    const int32_t key = first + lane_ % Config::kSlabKeys;
    if (!scale.per_token() || key < begin_ || key >= end_) return;
    const uint32_t column = static_cast<uint32_t>(key) / p.block_size;
    const float* source =
        scale.data + scale.offset(table_[column], static_cast<uint32_t>(key) - column * p.block_size, head_);
    cp_async<4>(to + (of_values ? Config::kWarpKeys * 4 : 0) + lane_ % Config::kSlabKeys * 4, source, 4);
  }

  const Part* parts_;
  uint32_t next_ = 0;
  const int32_t* table_;
  const char* keys_;  // the lane's first chunk in the slab at offset 0
  const char* values_;
  int64_t key_offset_ = 0;  // bytes, of the lane's slab
  int64_t value_offset_ = 0;
  int32_t key_;  // first of the step
  int32_t begin_, end_;
  int32_t live_begin_ = 0;  // steps from here on touch keys that some row sees
  uint32_t live_length_ = 0;
  int32_t steps_;  // left in the part
  int32_t slab_;   // looked up, used up
  int32_t head_;
  int warp_, lane_;
  uint32_t target_;
};

// Keys of a slab that nobody sees become zeros: they weigh nothing, but nothing times NaN is NaN.
template <class Config>
static __device__ __forceinline__ void zero_dead_keys(uint32_t slot, int32_t first, KeyRange keys, int lane) {
#pragma unroll 1
  for (int row = 0; row < Config::kWarpKeys; ++row) {
    if (first + row >= keys.begin && first + row < keys.end) continue;
    for (int chunk = lane; chunk < Config::kChunks; chunk += 32) {
      const uint32_t to = slot + row * Config::kRowBytes + chunk * 16;
      *static_cast<uint4*>(__cvta_shared_to_generic(to)) = make_uint4(0, 0, 0, 0);
    }
  }
  __syncwarp();
}

}  // namespace pagedkern
