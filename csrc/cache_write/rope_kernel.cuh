// rope_reshape_and_cache: query and key rotated in place, the rounded key and the value to their slots.
#pragma once

#include "cache_write/kernel_params.h"
#include "cache_write/slots.cuh"
#include "common/elements.cuh"

namespace pagedkern {

// What a thread takes of a row: two runs of kCount elements, one in each half of the rotated part or of the rest, so
// that neighbouring lanes have neighbouring runs. Of neox halves they are the two elements of kCount pairs, of
// interleaved pairs kCount / 2 pairs each. (A run of one element has no pair of its own: interleaved, both runs are one
// pair.)
template <int kCount>
struct RopeUnit {
  int first, second;  // where the runs begin
  int pair;           // the first pair of the first run, also where its cosines begin
  int next;           // interleaved: the first pair of the second run
  bool rotated;

  __device__ __forceinline__ RopeUnit(int unit, int head_dim, const RopeParams& rope) {
    const int rotated_units = rope.rotary_dim / (2 * kCount);
    rotated = unit < rotated_units;
    const int begin = rotated ? 0 : rope.rotary_dim, size = rotated ? rope.rotary_dim : head_dim - rope.rotary_dim;
    const int in_part = rotated ? unit : unit - rotated_units;
    first = begin + in_part * kCount;
    second = first + size / 2;
    pair = first;
    next = second / 2;
    if (!rotated || !rope.interleaved) return;
    pair = first / 2;
    if constexpr (kCount == 1) {
      pair = unit;
      first = 2 * unit;
      second = first + 1;
    }
  }
};

template <class T, int kCount>
struct RopeRuns {
  Chunk<T, kCount> first, second;

  __device__ __forceinline__ void load(const T* row, int first_element, int second_element) {
    first.load(row + first_element);
    second.load(row + second_element);
  }
  __device__ __forceinline__ void store(T* row, int first_element, int second_element) const {
    first.store(row + first_element);
    second.store(row + second_element);
  }
};

// Cosines and sines of a unit's pairs at one position.
template <int kCount>
struct Turn {
  float cosine[kCount], sine[kCount];

  template <class Table>
  __device__ __forceinline__ void load(const RopeParams& rope, int64_t position, const RopeUnit<kCount>& unit) {
    const Table* cosines = static_cast<const Table*>(rope.cos_sin_cache) + position * rope.cos_sin_stride;
    const Table* sines = cosines + rope.rotary_dim / 2;
    if (kCount > 1 && rope.interleaved) {
      load_part<Table, kCount / 2>(cosines + unit.pair, sines + unit.pair, 0);
      load_part<Table, kCount / 2>(cosines + unit.next, sines + unit.next, kCount / 2);
    } else {
      load_part<Table, kCount>(cosines + unit.pair, sines + unit.pair, 0);
    }
  }

  template <class Table, int kPart>
  __device__ __forceinline__ void load_part(const Table* cosines, const Table* sines, int at) {
    constexpr int kSize = kPart > 0 ? kPart : 1;
    Chunk<Table, kSize> chunk;
    float x[kSize];
    chunk.load(cosines);
    chunk.get(x);
#pragma unroll
    for (int i = 0; i < kSize; ++i) cosine[at + i] = x[i];
    chunk.load(sines);
    chunk.get(x);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sine[at + i] = x[i];
  }

  // x' = x cos - y sin, y' = y cos + x sin, each product rounded on its own, as every backend does it.
  static __device__ __forceinline__ void rotate(float& x, float& y, float c, float s) {
    const float turned = __fsub_rn(__fmul_rn(x, c), __fmul_rn(y, s));
    y = __fadd_rn(__fmul_rn(y, c), __fmul_rn(x, s));
    x = turned;
  }

  template <class T>
  __device__ __forceinline__ void apply(RopeRuns<T, kCount>& runs, bool interleaved) const {
    float a[kCount], b[kCount];
    runs.first.get(a);
    runs.second.get(b);
    if (kCount == 1 || !interleaved) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) rotate(a[i], b[i], cosine[i], sine[i]);
    } else {
#pragma unroll
      for (int i = 0; i + 1 < kCount; i += 2) {
        rotate(a[i], a[i + 1], cosine[i / 2], sine[i / 2]);
        rotate(b[i], b[i + 1], cosine[(kCount + i) / 2], sine[(kCount + i) / 2]);
      }
    }
    runs.first.set(a);
    runs.second.set(b);
  }
};

// Elements as they are.
struct CopyCode {
  static constexpr int kBytes = 2;  // of an element

  template <class T, int kCount>
  static __device__ __forceinline__ void store(const RopeRuns<T, kCount>& runs, void* row, const RopeUnit<kCount>& unit,
                                               float, bool, bool write) {
    if (write) runs.store(static_cast<T*>(row), unit.first, unit.second);
  }
};

// Rounded to FP8. Eight codes are half an access: neighbouring lanes trade where the runs of both begin on one.
template <class Format>
struct QuantizeCode {
  static constexpr int kBytes = 1;

  template <class T, int kCount>
  static __device__ __forceinline__ Codes<Format, kCount> encode(const Chunk<T, kCount>& chunk, const Quotient& scale) {
    float x[kCount];
    chunk.get(x);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = scale(x[i]);
    Codes<Format, kCount> codes;
    codes.encode(x);
    return codes;
  }

  // All lanes of a warp call it.
  template <class T, int kCount>
  static __device__ __forceinline__ void store(const RopeRuns<T, kCount>& runs, void* row, const RopeUnit<kCount>& unit,
                                               float scale, bool trade, bool write) {
    const Quotient quotient(scale);
    const auto first = encode(runs.first, quotient), second = encode(runs.second, quotient);
    auto* codes = static_cast<uint8_t*>(row);
    if constexpr (kCount == 8) {
      if (trade) {
        const bool odd = threadIdx.x % 2 != 0;
        const uint4 both = trade_halves(first.vector[0], second.vector[0], odd);
        if (write) *reinterpret_cast<uint4*>(codes + (odd ? unit.second - kCount : unit.first)) = both;
        return;
      }
    }
    if (write) first.store(codes + unit.first);
    if (write) second.store(codes + unit.second);
  }
};

static __device__ __forceinline__ int64_t load_position(const RopeParams& rope, int64_t token) {
  const int64_t offset = token * rope.position_stride;
  return rope.position_is_int32 ? static_cast<const int32_t*>(rope.positions)[offset]
                                : static_cast<const int64_t*>(rope.positions)[offset];
}

static __device__ __forceinline__ float load_scale(const KvScale& scale, int64_t block, int64_t offset, int head) {
  return scale.data == nullptr ? 1.0f : scale.data[scale.offset(block, offset, head)];
}

// One token, by one of its warps.
template <class T, class Code, int kCount>
class RopeToken {
 public:
  __device__ __forceinline__ RopeToken(const RopeKernelParams& p, int64_t token, bool live, int64_t block,
                                       int64_t offset)
      : p_(p), token_(token), live_(live), block_(block), offset_(offset) {
    position_ = load_position(p.rope, token);
    turned_ = position_ >= 0 && position_ < p.rope.max_position;
  }

  // Rows are those of the query's heads, the key's, the value's; warp `part` of the token's takes every so many.
  __device__ __forceinline__ void run(int part) {
    const int lane = threadIdx.x % 32, rows_of_warp = 32 / p_.lanes_of_row;
    const int num_rows = p_.rope.num_heads + 2 * p_.cache.num_kv_heads;
    const int num_units = p_.cache.head_dim / (2 * kCount);
    for (int base = 0; base < num_units; base += p_.lanes_of_row) {
      const int index = base + (lane & (p_.lanes_of_row - 1));
      const RopeUnit<kCount> unit(index, p_.cache.head_dim, p_.rope);
      const bool inside = index < num_units;
      rotate_ = inside && unit.rotated && turned_;
      if (rotate_ && p_.rope.cos_sin_dtype == DType::kFloat32) {
        turn_.template load<float>(p_.rope, position_, unit);
      } else if (rotate_) {
        turn_.template load<T>(p_.rope, position_, unit);
      }
      for (int row = part * rows_of_warp; row < num_rows; row += p_.warps_of_token * rows_of_warp) {
        const int mine = row + lane / p_.lanes_of_row;
        take_row(mine, mine - p_.rope.num_heads,
                 inside && mine<num_rows, index, unit, row + rows_of_warp> p_.rope.num_heads);
      }
    }
  }

 private:
  // `stored`: some lane of the warp has a key or a value.
  __device__ __forceinline__ void take_row(int row, int kv_row, bool inside, int index, const RopeUnit<kCount>& unit,
                                           bool stored) {
    const bool is_query = kv_row < 0, is_key = !is_query && kv_row < p_.cache.num_kv_heads;
    const int head = is_query ? row : is_key ? kv_row : kv_row - p_.cache.num_kv_heads;
    T* const rows = static_cast<T*>(is_query ? p_.rope.query : is_key ? p_.rope.key : const_cast<void*>(p_.value));
    const int64_t stride_token = is_query ? p_.rope.query_stride_token
                                 : is_key ? p_.key_stride_token
                                          : p_.value_stride_token;
    const int64_t stride_head = is_query ? p_.rope.query_stride_head
                                : is_key ? p_.key_stride_head
                                         : p_.value_stride_head;
    T* const source = rows + token_ * stride_token + head * stride_head;
    RopeUnit<kCount> place = unit;
    if (!is_query && !is_key) {
      place.first = index * kCount;
      place.second = place.first + p_.cache.head_dim / 2;
    }
    const bool rotate = inside && rotate_ && (is_query || is_key);
    const bool write = inside && live_ && !is_query;
    RopeRuns<T, kCount> runs = {};
    if (rotate || write) runs.load(source, place.first, place.second);
    if (rotate) {
      turn_.apply(runs, p_.rope.interleaved);
      runs.store(source, place.first, place.second);
    }
    if (!stored || !live_) return;
    const PagedCache& cache = is_key ? p_.key_cache : p_.value_cache;
    const float scale = write ? load_scale(is_key ? p_.k_scale : p_.v_scale, block_, offset_, head) : 1.0f;
    const int64_t target = write ? cache.offset(block_, offset_, head) * Code::kBytes : 0;
    Code::store(runs, static_cast<char*>(cache.data) + target, place, scale, p_.trade, write);
  }

  const RopeKernelParams& p_;
  const int64_t token_;
  const bool live_;  // its slot is written
  const int64_t block_, offset_;
  int64_t position_;
  bool turned_;  // the position is one of the table's
  bool rotate_;
  Turn<kCount> turn_;
};

// grid: teams of blocks. warps_of_token warps take a token.
template <class T, class Code, int kCount>
__global__ void __launch_bounds__(CacheWriteConfig::kTeamThreads)
    rope_reshape_and_cache_kernel(const __grid_constant__ RopeKernelParams p) {
  __shared__ SlotTable slots;
  const Team team;
  const int warp = team.thread() / 32;

  for (int64_t first = team.index() * p.team_tokens; first < p.num_slots; first += team.num_teams() * p.team_tokens) {
    const int64_t left = p.num_slots - first;
    const TokenRange range{first, static_cast<int>(left < p.team_tokens ? left : p.team_tokens)};
    slots.build(p, range, team);
    for (int t = warp / p.warps_of_token; t < range.count; t += team.num_threads() / 32 / p.warps_of_token) {
      const bool live = slots.live(t);
      RopeToken<T, Code, kCount> token(p, first + t, live, live ? slots.block(t) : 0, live ? slots.offset(t) : 0);
      token.run(warp % p.warps_of_token);
    }
    __syncthreads();  // the table is built anew for the next tokens
  }
}

}  // namespace pagedkern
