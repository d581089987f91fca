// Dequantisation and row copies of gather_cache.
#include "cpu/simd/gather.h"

#include <cstring>

#include "cpu/simd/lanes.h"

namespace pagedkern::cpu::PAGEDKERN_SIMD {
namespace {

using namespace lanes;

using LoadRow = void (*)(const void* source, void* destination, int64_t n, const float* scale);

template <int kItemSize>
void copy_row(const void* source, void* destination, int64_t n, const float*) {
  std::memcpy(destination, source, static_cast<size_t>(n * kItemSize));
}

template <class In, class Out>
void dequantise_row(const void* source, void* destination, int64_t n, const float* scale) {
  const In* codes = static_cast<const In*>(source);
  Out* out = static_cast<Out*>(destination);
  const Vec factor = broadcast(scale != nullptr ? *scale : 1.0f);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, mul(load(codes + i), factor));
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    store_part(out + i, mul(load_part(codes + i, rest), factor), rest);
  }
}

template <class In>
LoadRow choose_dequantise(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return dequantise_row<In, Half>;
    case DType::kBFloat16: return dequantise_row<In, BFloat16>;
    default: return dequantise_row<In, float>;
  }
}

LoadRow choose_load(DType cache_dtype, DType dtype) {
  switch (cache_dtype) {
    case DType::kFloat8E4M3: return choose_dequantise<Fp8<E4M3>>(dtype);
    case DType::kFloat8E5M2: return choose_dequantise<Fp8<E5M2>>(dtype);
    default: return size_of(cache_dtype) == 4 ? copy_row<4> : copy_row<2>;
  }
}

// key_cache into key, or value_cache into value.
struct Side {
  char* rows;
  int64_t stride_token, stride_head;  // bytes
  const PagedCache& cache;
  const KvScale& scale;
  bool joined_heads;   // the heads of a token lie end to end on both sides and share a scale
  bool joined_tokens;  // so do the tokens of a block

  Side(void* data, int64_t token_elements, int64_t head_elements, const PagedCache& cache_, const KvScale& scale_,
       const GatherCacheParams& params)
      : rows(static_cast<char*>(data)),
        stride_token(token_elements * size_of(params.dtype)),
        stride_head(head_elements * size_of(params.dtype)),
        cache(cache_),
        scale(scale_) {
    const int64_t head_dim = params.cache.head_dim, heads = params.cache.num_kv_heads;
    joined_heads = (heads == 1 || (head_elements == head_dim && cache.stride_head == head_dim)) &&
                   (heads == 1 || scale.stride_head == 0);
    joined_tokens = joined_heads && token_elements == heads * head_dim && cache.stride_token == heads * head_dim &&
                    scale.stride_token == 0;
  }

  // `count` tokens of one block, from token `offset` in it, to the rows from `row`.
  void load(LoadRow load_row, int64_t row, int64_t block, int64_t offset, int64_t count,
            const PagedCacheShape& shape) const {
    const int64_t item = size_of(shape.dtype), head_dim = shape.head_dim, heads = shape.num_kv_heads;
    const int64_t steps = joined_tokens ? 1 : count;
    const int64_t row_heads = joined_heads ? 1 : heads;
    const int64_t elements = head_dim * (joined_heads ? heads : 1) * (joined_tokens ? count : 1);
    for (int64_t token = 0; token < steps; ++token) {
      char* destination = rows + (row + token) * stride_token;
      for (int64_t head = 0; head < row_heads; ++head) {
        const char* source = static_cast<const char*>(cache.data) + cache.offset(block, offset + token, head) * item;
        const float* factor = scale.data;
        if (factor != nullptr) factor += scale.offset(block, offset + token, head);
        load_row(source, destination + head * stride_head, elements, factor);
      }
    }
  }
};

// The last sequence that starts at or before `row`.
int64_t sequence_of(const GatherCacheParams& params, int64_t row) {
  int64_t low = 0, high = params.num_seqs;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (params.cu_seqlens[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace

void gather_rows(const GatherCacheParams& params, int64_t row_begin, int64_t row_end) {
  const PagedCacheShape& shape = params.cache;
  const Side key(params.key, params.key_stride_token, params.key_stride_head, params.key_cache, params.k_scale, params);
  const Side value(params.value, params.value_stride_token, params.value_stride_head, params.value_cache,
                   params.v_scale, params);
  const LoadRow load_row = choose_load(shape.dtype, params.dtype);

  for (int64_t seq = sequence_of(params, row_begin); seq < params.num_seqs; ++seq) {
    const int64_t first_row = params.cu_seqlens[seq];
    if (first_row >= row_end) break;
    const int64_t capacity = params.max_blocks * shape.block_size;
    const int64_t length = params.seq_lens[seq] < capacity ? params.seq_lens[seq] : capacity;
    const int64_t end = first_row + length < row_end ? first_row + length : row_end;
    int64_t row = first_row > row_begin ? first_row : row_begin;
    while (row < end) {
      const int64_t token = row - first_row;
      const int64_t offset = token % shape.block_size;
      const int64_t left_in_block = shape.block_size - offset;
      const int64_t count = left_in_block < end - row ? left_in_block : end - row;
      const int64_t block = params.block_table[seq * params.block_table_stride + token / shape.block_size];
      if (block >= 0 && block < shape.num_blocks) {
        key.load(load_row, row, block, offset, count, shape);
        value.load(load_row, row, block, offset, count, shape);
      }
      row += count;
    }
  }
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
