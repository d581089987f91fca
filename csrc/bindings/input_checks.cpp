// Check mode's look at the inputs themselves: NaN where a live row is read, scales that are finite and positive.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "bindings/checks.h"
#include "bindings/value_checks.h"

namespace pagedkern::bindings {
namespace {

bool is_nan(const char* element, DType dtype) {
  switch (dtype) {
    case DType::kFloat32: {
      float value;
      std::memcpy(&value, element, sizeof(value));
      return std::isnan(value);
    }
    case DType::kFloat16:
    case DType::kBFloat16: {
      uint16_t bits;
      std::memcpy(&bits, element, sizeof(bits));
      return (bits & 0x7FFF) > (dtype == DType::kFloat16 ? 0x7C00 : 0x7F80);
    }
    case DType::kFloat8E4M3: return (*element & 0x7F) == 0x7F;
    case DType::kFloat8E5M2: return (*element & 0x7F) > 0x7C;
  }
  return false;
}

// A contiguous row of `count` elements at `row`, an element offset into `base`. `place` names the row, as in "3, 0".
template <class Place>
void check_row(const char* op, const char* argument, const void* base, int64_t row, int64_t count, DType dtype,
               const Place& place) {
  const char* element = static_cast<const char*>(base) + row * size_of(dtype);
  for (int64_t i = 0; i < count; ++i, element += size_of(dtype)) {
    if (is_nan(element, dtype)) fail_value(op, argument, text(place(), ", ", i), "NaN", "a number");
  }
}

// Rows of a [tokens, heads, dim] tensor.
struct Rows {
  const char* name;
  const void* data;
  int64_t stride_token;
  int64_t stride_head;
  int64_t heads;
  int64_t count;  // elements of a row that are looked at
  DType dtype;
};

void check_token(const char* op, const Rows& rows, int64_t token) {
  for (int64_t head = 0; head < rows.heads; ++head) {
    check_row(op, rows.name, rows.data, token * rows.stride_token + head * rows.stride_head, rows.count, rows.dtype,
              [&] { return text(token, ", ", head); });
  }
}

bool usable_scale(float value) {
  return std::isfinite(value) && value > 0;
}

void check_scale_heads(const char* op, const char* name, const KvScale& scale, int64_t num_kv_heads) {
  if (scale.data == nullptr || scale.per_token()) return;
  for (int64_t head = 0; head < (scale.stride_head == 0 ? 1 : num_kv_heads); ++head) {
    const float value = scale.data[scale.offset(0, 0, head)];
    if (!usable_scale(value)) fail_value(op, name, text(head), text(value), "finite and positive");
  }
}

void check_scale_token(const char* op, const char* name, const KvScale& scale, int64_t block, int64_t token,
                       int64_t num_kv_heads) {
  if (scale.data == nullptr || !scale.per_token()) return;
  for (int64_t head = 0; head < num_kv_heads; ++head) {
    const float value = scale.data[scale.offset(block, token, head)];
    if (!usable_scale(value)) {
      fail_value(op, name, text(block, ", ", token, ", ", head), text(value), "finite and positive");
    }
  }
}

void check_vector(const char* op, const char* name, const float* values, int64_t count) {
  for (int64_t i = 0; values != nullptr && i < count; ++i) {
    if (std::isnan(values[i])) fail_value(op, name, text(i), "NaN", "a number");
  }
}

int64_t slot_at(const CacheWriteParams& params, int64_t i) {
  return params.slot_is_int32 ? static_cast<const int32_t*>(params.slot_mapping)[i * params.slot_stride]
                              : static_cast<const int64_t*>(params.slot_mapping)[i * params.slot_stride];
}

// One side of the cache as a sequence sees it, keys first_key..length-1.
struct CacheSide {
  const char* name;
  const char* scale_name;
  CacheRows& rows;
  const KvScale& scale;
};

void check_cache_rows(const char* op, const CacheSide& side, const PagedCacheShape& shape, const int32_t* pages,
                      int64_t first_key, int64_t length) {
  for (int64_t key = first_key; key < length; ++key) {
    const int64_t block = pages[key / shape.block_size];
    const int64_t token = key % shape.block_size;
    for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
      check_row(op, side.name, side.rows.row(block, token, head), 0, shape.head_dim, shape.dtype,
                [&] { return text(block, ", ", token, ", ", head); });
    }
    check_scale_token(op, side.scale_name, side.scale, block, token, shape.num_kv_heads);
  }
}

}  // namespace

void check_scales(const char* op, const KvScale& k_scale, const KvScale& v_scale, int64_t num_kv_heads) {
  check_scale_heads(op, "k_scale", k_scale, num_kv_heads);
  check_scale_heads(op, "v_scale", v_scale, num_kv_heads);
}

void check_write_inputs(const char* op, const CacheWriteParams& params) {
  const PagedCacheShape& cache = params.cache;
  const Rows key{"key",          params.key,  params.key_stride_token, params.key_stride_head, cache.num_kv_heads,
                 cache.head_dim, params.dtype};
  const Rows value{
      "value",        params.value, params.value_stride_token, params.value_stride_head, cache.num_kv_heads,
      cache.head_dim, params.dtype};
  for (int64_t i = 0; i < params.num_slots; ++i) {
    const int64_t slot = slot_at(params, i);
    if (slot < 0) continue;
    check_token(op, key, i);
    check_token(op, value, i);
    const int64_t block = slot / cache.block_size;
    check_scale_token(op, "k_scale", params.k_scale, block, slot % cache.block_size, cache.num_kv_heads);
    check_scale_token(op, "v_scale", params.v_scale, block, slot % cache.block_size, cache.num_kv_heads);
  }
}

void check_rope_inputs(const char* op, const CacheWriteParams& params, const RopeParams& rope) {
  const Rows query{
      "query",     rope.query, rope.query_stride_token, rope.query_stride_head, rope.num_heads, params.cache.head_dim,
      params.dtype};
  for (int64_t i = 0; i < params.num_slots; ++i) {
    if (slot_at(params, i) < 0) continue;
    check_token(op, query, i);
    const int64_t position = rope.position_is_int32
                                 ? static_cast<const int32_t*>(rope.positions)[i * rope.position_stride]
                                 : static_cast<const int64_t*>(rope.positions)[i * rope.position_stride];
    check_row(op, "cos_sin_cache", rope.cos_sin_cache, position * rope.cos_sin_stride, rope.rotary_dim,
              rope.cos_sin_dtype, [&] { return text(position); });
  }
}

void check_attention_inputs(const char* op, const PagedAttentionParams& params, CacheRows& key_rows,
                            CacheRows& value_rows) {
  const PagedCacheShape& cache = params.cache;
  const Rows query{"query",        params.query, params.query_stride_token, params.query_stride_head, params.num_heads,
                   cache.head_dim, params.dtype};
  check_vector(op, "alibi_slopes", params.alibi_slopes, params.num_heads);
  check_vector(op, "sinks", params.sinks, params.num_heads);
  for (int64_t sequence = 0; sequence < params.num_seqs; ++sequence) {
    const int64_t begin = params.cu_seqlens_q == nullptr ? sequence : params.cu_seqlens_q[sequence];
    const int64_t end = params.cu_seqlens_q == nullptr ? sequence + 1 : params.cu_seqlens_q[sequence + 1];
    const int64_t length = params.seq_lens[sequence];
    if (begin == end || length == 0) continue;
    for (int64_t token = std::max(begin, end - length); token < end; ++token) check_token(op, query, token);
    const int64_t first_query = std::max<int64_t>(length - (end - begin), 0);
    const int64_t first_key = params.window_left < 0 ? 0 : std::max<int64_t>(first_query - params.window_left, 0);
    const int32_t* pages = params.block_table + sequence * params.block_table_stride;
    check_cache_rows(op, {"key_cache", "k_scale", key_rows, params.k_scale}, cache, pages, first_key, length);
    check_cache_rows(op, {"value_cache", "v_scale", value_rows, params.v_scale}, cache, pages, first_key, length);
  }
}

void check_gather_inputs(const char* op, const GatherCacheParams& params, CacheRows& key_rows, CacheRows& value_rows) {
  for (int64_t sequence = 0; sequence < params.num_seqs; ++sequence) {
    const int32_t* pages = params.block_table + sequence * params.block_table_stride;
    const int64_t length = params.seq_lens[sequence];
    check_cache_rows(op, {"key_cache", "k_scale", key_rows, params.k_scale}, params.cache, pages, 0, length);
    check_cache_rows(op, {"value_cache", "v_scale", value_rows, params.v_scale}, params.cache, pages, 0, length);
  }
}

void check_merge_inputs(const char* op, const MergeStatesParams& params) {
  struct Part {
    Rows rows;
    const char* lse_name;
    const float* lse;
    int64_t lse_stride_token, lse_stride_head;
  };
  const Part parts[] = {{{"out_a", params.out_a, params.a_stride_token, params.a_stride_head, params.num_heads,
                          params.head_dim, params.a_dtype},
                         "lse_a",
                         params.lse_a,
                         params.lse_a_stride_token,
                         params.lse_a_stride_head},
                        {{"out_b", params.out_b, params.b_stride_token, params.b_stride_head, params.num_heads,
                          params.head_dim, params.b_dtype},
                         "lse_b",
                         params.lse_b,
                         params.lse_b_stride_token,
                         params.lse_b_stride_head}};
  for (const Part& part : parts) {
    for (int64_t token = 0; token < params.num_tokens; ++token) {
      for (int64_t head = 0; head < params.num_heads; ++head) {
        const float lse = part.lse[token * part.lse_stride_token + head * part.lse_stride_head];
        if (std::isnan(lse)) fail_value(op, part.lse_name, text(token, ", ", head), "NaN", "a number");
        if (std::isinf(lse)) continue;  // an empty part, whose values are not read
        check_row(op, part.rows.name, part.rows.data, token * part.rows.stride_token + head * part.rows.stride_head,
                  part.rows.count, part.rows.dtype, [&] { return text(token, ", ", head); });
      }
    }
  }
}

}  // namespace pagedkern::bindings
