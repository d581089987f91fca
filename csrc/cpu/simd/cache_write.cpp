// Rotation, FP8 conversion and row stores of reshape_and_cache, reshape_and_cache_dynamic and rope_reshape_and_cache.
#include "cpu/simd/cache_write.h"

#include <cstring>

#include "cpu/simd/lanes.h"

namespace pagedkern::cpu::PAGEDKERN_SIMD {
namespace {

using namespace lanes;

// Writes n elements of one row (or of several that lie end to end); scale is null for 1. `next` is the row that will be
// read after it, or the row itself: conversions fetch it meanwhile, as memory is slower to answer than they are to
// work.
using StoreRow = void (*)(const void* source, void* destination, int64_t n, float* scale, const void* next);
// Rotates one row in place: `half` pairs, with half cosines and half sines.
using RotateRow = void (*)(void* row, const void* cosines, const void* sines, int64_t half);

template <int kItemSize>
void copy_row(const void* source, void* destination, int64_t n, float*, const void*) {
  std::memcpy(destination, source, static_cast<size_t>(n * kItemSize));
}

template <class In, class Out, class Transform>
inline void convert_row(const In* source, Out* destination, int64_t n, const In* next, Transform transform) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    __builtin_prefetch(next + i);
    store(destination + i, transform(load(source + i)));
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    store_part(destination + i, transform(load_part(source + i, rest)), rest);
  }
}

// A power of two whose reciprocal is a normal float: multiplying by that is the same as dividing, exactly.
inline bool has_exact_reciprocal(float scale) {
  const uint32_t bits = float_to_bits(scale);
  return (bits & 0x807FFFFFu) == 0 && bits >= 0x00800000u && bits <= 0x7E800000u;
}

template <class In, class Out>
inline void quantise(const In* source, Out* destination, int64_t n, float scale, const In* next) {
  if (scale == 1.0f) {
    convert_row(source, destination, n, next, [](Vec x) { return x; });
  } else if (has_exact_reciprocal(scale)) {
    const Vec reciprocal = broadcast(1.0f / scale);
    convert_row(source, destination, n, next, [&](Vec x) { return mul(x, reciprocal); });
  } else {
    const Vec divisor = broadcast(scale);
    convert_row(source, destination, n, next, [&](Vec x) { return div(x, divisor); });
  }
}

template <class In, class Out>
void quantise_row(const void* source, void* destination, int64_t n, float* scale, const void* next) {
  quantise(static_cast<const In*>(source), static_cast<Out*>(destination), n, scale != nullptr ? *scale : 1.0f,
           static_cast<const In*>(next));
}

template <class In, class Format>
void quantise_row_dynamic(const void* source, void* destination, int64_t n, float* scale, const void* next) {
  const In* row = static_cast<const In*>(source);
  MaxVec running = max_zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) running = max_finite(running, load(row + i));
  if (i < n) running = max_finite(running, load_part(row + i, static_cast<int>(n - i)));
  const float amax = max_value(running);
  *scale = (amax > 1e-10f ? amax : 1e-10f) / Format::kMax;
  quantise(row, static_cast<Fp8<Format>*>(destination), n, *scale, static_cast<const In*>(next));
}

template <class In>
StoreRow choose_fp8_store(DType cache_dtype, bool dynamic) {
  if (cache_dtype == DType::kFloat8E4M3) {
    return dynamic ? quantise_row_dynamic<In, E4M3> : quantise_row<In, Fp8<E4M3>>;
  }
  return dynamic ? quantise_row_dynamic<In, E5M2> : quantise_row<In, Fp8<E5M2>>;
}

StoreRow choose_store(DType dtype, DType cache_dtype, bool dynamic) {
  if (!is_fp8(cache_dtype)) return size_of(cache_dtype) == 4 ? copy_row<4> : copy_row<2>;
  switch (dtype) {
    case DType::kFloat16: return choose_fp8_store<Half>(cache_dtype, dynamic);
    case DType::kBFloat16: return choose_fp8_store<BFloat16>(cache_dtype, dynamic);
    default: return choose_fp8_store<float>(cache_dtype, dynamic);
  }
}

// x' = x cos - y sin, y' = y cos + x sin in float32, each product rounded on its own (no fused multiply-add), then
// rounded to the row's dtype: the expression every backend keeps to, bit for bit.
inline void rotate(Vec& x, Vec& y, Vec cosine, Vec sine) {
  const Vec rotated = sub(mul_rounded(x, cosine), mul_rounded(y, sine));
  y = add(mul_rounded(y, cosine), mul_rounded(x, sine));
  x = rotated;
}

template <class T, class C>
void rotate_halves(void* row, const void* cosines, const void* sines, int64_t half) {
  T* first = static_cast<T*>(row);
  T* second = first + half;
  const C* c = static_cast<const C*>(cosines);
  const C* s = static_cast<const C*>(sines);
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    Vec x = load(first + i), y = load(second + i);
    rotate(x, y, load(c + i), load(s + i));
    store(first + i, x);
    store(second + i, y);
  }
  if (i < half) {
    const int rest = static_cast<int>(half - i);
    Vec x = load_part(first + i, rest), y = load_part(second + i, rest);
    rotate(x, y, load_part(c + i, rest), load_part(s + i, rest));
    store_part(first + i, x, rest);
    store_part(second + i, y, rest);
  }
}

template <class T, class C>
void rotate_pairs(void* row, const void* cosines, const void* sines, int64_t half) {
  T* pairs = static_cast<T*>(row);
  const C* c = static_cast<const C*>(cosines);
  const C* s = static_cast<const C*>(sines);
  Vec x, y;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    load_pairs(pairs + 2 * i, x, y);
    rotate(x, y, load(c + i), load(s + i));
    store_pairs(pairs + 2 * i, x, y);
  }
  if (i < half) {
    const int rest = static_cast<int>(half - i);
    load_pairs_part(pairs + 2 * i, rest, x, y);
    rotate(x, y, load_part(c + i, rest), load_part(s + i, rest));
    store_pairs_part(pairs + 2 * i, rest, x, y);
  }
}

template <class T>
RotateRow choose_rotate_of(bool interleaved, bool float_cos_sin) {
  if (interleaved) return float_cos_sin ? rotate_pairs<T, float> : rotate_pairs<T, T>;
  return float_cos_sin ? rotate_halves<T, float> : rotate_halves<T, T>;
}

RotateRow choose_rotate(DType dtype, const RopeParams& rope) {
  const bool float_cos_sin = rope.cos_sin_dtype == DType::kFloat32;
  switch (dtype) {
    case DType::kFloat16: return choose_rotate_of<Half>(rope.interleaved, float_cos_sin);
    case DType::kBFloat16: return choose_rotate_of<BFloat16>(rope.interleaved, float_cos_sin);
    default: return choose_rotate_of<float>(rope.interleaved, true);
  }
}

// The rotation of one token; inactive where there is none.
struct Rotation {
  RotateRow rotate = nullptr;
  const char* cosines = nullptr;
  const char* sines = nullptr;
  int64_t half = 0;

  void apply(char* row) const { rotate(row, cosines, sines, half); }
};

// The heads of query, key or value that this call works on.
struct HeadRange {
  int64_t begin, end;

  HeadRange(int64_t unit_begin, int64_t unit_end, int64_t first_unit, int64_t num_heads)
      : begin(unit_begin > first_unit ? unit_begin - first_unit : 0),
        end(unit_end - first_unit < num_heads ? unit_end - first_unit : num_heads) {}
};

// key into key_cache, or value into value_cache.
struct Side {
  const char* rows;
  int64_t stride_token, stride_head;  // bytes
  const PagedCache& cache;
  const KvScale& scale;
  HeadRange heads;
  bool joined;  // the heads of a token lie end to end on both sides and share a scale

  // `last`: there is no row after it.
  void write(StoreRow store_row, int64_t row, bool last, int64_t block, int64_t offset, int64_t head_dim,
             int64_t cache_item) const {
    const int64_t to_next = last ? 0 : stride_token;
    const char* source = rows + row * stride_token + heads.begin * stride_head;
    char* destination = static_cast<char*>(cache.data) + cache.offset(block, offset, heads.begin) * cache_item;
    float* head_scale = scale.data;
    if (head_scale != nullptr) head_scale += scale.offset(block, offset, heads.begin);
    if (joined) {
      store_row(source, destination, (heads.end - heads.begin) * head_dim, head_scale, source + to_next);
      return;
    }
    for (int64_t head = heads.begin; head < heads.end; ++head) {
      store_row(source, destination, head_dim, head_scale, source + to_next);
      source += stride_head;
      destination += cache.stride_head * cache_item;
      if (head_scale != nullptr) head_scale += scale.stride_head;
    }
  }
};

inline int64_t read_index(const void* data, bool is_int32, int64_t index) {
  return is_int32 ? static_cast<const int32_t*>(data)[index] : static_cast<const int64_t*>(data)[index];
}

void rotate_heads(const Rotation& rotation, char* row, int64_t stride_head, const HeadRange& heads) {
  for (int64_t head = heads.begin; head < heads.end; ++head) rotation.apply(row + head * stride_head);
}

}  // namespace

void write_cache_units(const CacheWriteParams& params, const RopeParams* rope, bool dynamic, int64_t unit_begin,
                       int64_t unit_end) {
  const PagedCacheShape& shape = params.cache;
  const int64_t item = size_of(params.dtype), cache_item = size_of(shape.dtype);
  const int64_t head_dim = shape.head_dim, kv_heads = shape.num_kv_heads;
  const int64_t query_heads = rope != nullptr ? rope->num_heads : 0;
  const auto joinable = [&](int64_t stride_head, const PagedCache& cache, const KvScale& scale) {
    return !dynamic && stride_head == head_dim && cache.stride_head == head_dim && scale.stride_head == 0;
  };
  const HeadRange query(unit_begin, unit_end, 0, query_heads);
  const Side key{static_cast<const char*>(params.key),
                 params.key_stride_token * item,
                 params.key_stride_head * item,
                 params.key_cache,
                 params.k_scale,
                 HeadRange(unit_begin, unit_end, query_heads, kv_heads),
                 joinable(params.key_stride_head, params.key_cache, params.k_scale)};
  const Side value{static_cast<const char*>(params.value),
                   params.value_stride_token * item,
                   params.value_stride_head * item,
                   params.value_cache,
                   params.v_scale,
                   HeadRange(unit_begin, unit_end, query_heads + kv_heads, kv_heads),
                   joinable(params.value_stride_head, params.value_cache, params.v_scale)};
  const StoreRow store_row = choose_store(params.dtype, shape.dtype, dynamic);
  Rotation rotation;
  int64_t cos_sin_item = 0;
  if (rope != nullptr) {
    rotation.rotate = choose_rotate(params.dtype, *rope);
    rotation.half = rope->rotary_dim / 2;
    cos_sin_item = size_of(rope->cos_sin_dtype);
  }

  for (int64_t row = 0; row < params.num_slots; ++row) {
    if (rope != nullptr && unit_begin < query_heads + kv_heads) {
      const int64_t position = read_index(rope->positions, rope->position_is_int32, row * rope->position_stride);
      if (position >= 0 && position < rope->max_position) {
        rotation.cosines =
            static_cast<const char*>(rope->cos_sin_cache) + position * rope->cos_sin_stride * cos_sin_item;
        rotation.sines = rotation.cosines + rotation.half * cos_sin_item;
        rotate_heads(rotation, static_cast<char*>(rope->query) + row * rope->query_stride_token * item,
                     rope->query_stride_head * item, query);
        rotate_heads(rotation, static_cast<char*>(rope->key) + row * key.stride_token, key.stride_head, key.heads);
      }
    }
    const int64_t slot = read_index(params.slot_mapping, params.slot_is_int32, row * params.slot_stride);
    if (slot < 0) continue;
    const int64_t block = slot / shape.block_size, offset = slot % shape.block_size;
    if (block >= shape.num_blocks) continue;
    const bool last = row + 1 == params.num_slots;
    if (key.heads.begin < key.heads.end) key.write(store_row, row, last, block, offset, head_dim, cache_item);
    if (value.heads.begin < value.heads.end) value.write(store_row, row, last, block, offset, head_dim, cache_item);
  }
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
