// Which decode kernel, on how many blocks, with what workspace.
#include <algorithm>
#include <cstdint>

#include "common/cache_rows.h"
#include "common/split_workspace.h"
#include "paged_decode/config.h"
#include "paged_decode/instances.h"
#include "paged_decode/launcher.h"

namespace pagedkern {
namespace {

constexpr int64_t kLeastTileKeys = 64;  // of all configs

// Rows of the query tile; results do not depend on it.
int tile_rows(int64_t group, int64_t max_seqlen_q) {
  return group * std::min(max_seqlen_q, max_decode_query_len(group)) <= 8 ? 8 : 16;
}

int64_t rows_of_slot(int64_t group, int64_t max_seqlen_q, int rows) {
  return std::min<int64_t>(rows, group * std::max<int64_t>(max_seqlen_q, 1));
}

// Of rows of 16-bit elements.
int row_width(const void* data, int64_t stride_token, int64_t stride_head) {
  return AccessWidth().pointer(data).bytes(2 * stride_token).bytes(2 * stride_head).width();
}

bool needs_general(const PagedAttentionParams& p, bool slabs_in_pages) {
  const bool fits = slabs_in_pages && padded_head_dim(p.cache.head_dim, false) == p.cache.head_dim;
  return !fits || p.softcap > 0.0f || p.alibi_slopes != nullptr || p.k_scale.per_token() || p.v_scale.per_token() ||
         (is_fp8(p.cache.dtype) && p.cache.head_dim == 96);  // its rows of 96 bytes have no swizzle
}

}  // namespace

int64_t paged_decode_workspace_size(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                    int64_t num_seqs, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t num_splits) {
  const int64_t slot = slot_floats(rows_of_slot(num_heads / num_kv_heads, max_seqlen_q, kMaxDecodeRows), head_dim);
  return split_workspace(
             {num_tokens, num_seqs, max_seqlen_k, num_splits, 1, kLeastTileKeys, num_kv_heads, kMaxDecodeBlocks, slot})
      .bytes;
}

Status launch_paged_decode(const PagedAttentionParams& op, void* stream) {
  if (op.num_tokens == 0 || op.num_seqs == 0) return {};
  PagedDecodeParams p{};
  p.op = op;
  p.window = key_window(op);
  p.group = op.num_heads / op.cache.num_kv_heads;
  p.block_size = static_cast<uint32_t>(std::clamp<int64_t>(op.cache.block_size, 1, INT32_MAX));
  p.query_width = row_width(op.query, op.query_stride_token, op.query_stride_head);
  p.cache_width = cache_width(op);
  p.out_width = row_width(op.out, op.out_stride_token, op.out_stride_head) >= 8 ? 8 : 2;
  p.slabs_in_pages = op.cache.block_size % 16 == 0 && p.cache_width == 16;
  const bool general = needs_general(op, p.slabs_in_pages);
  const int dim = padded_head_dim(op.cache.head_dim, general);
  p.slabs_in_pages = p.slabs_in_pages && dim == op.cache.head_dim;
  const int rows = general ? 16 : tile_rows(p.group, op.max_seqlen_q);
  p.slot_rows = static_cast<int32_t>(rows_of_slot(p.group, op.max_seqlen_q, rows));
  const SplitBounds bounds = {op.num_tokens,
                              op.num_seqs,
                              op.max_seqlen_k,
                              op.num_splits,
                              1,
                              kLeastTileKeys,
                              op.cache.num_kv_heads,
                              kMaxDecodeBlocks,
                              slot_floats(p.slot_rows, op.cache.head_dim)};
  if (!place_split_workspace(bounds, p)) return {"the workspace is smaller than paged_attention_workspace_size says"};
  p.least_keys = static_cast<int32_t>(least_part_keys(p.slot_rows, op.cache.dtype));
  return with_instance(op.cache.dtype, dim, [&]<DType kCache, int kDim>() {
    return launch_paged_decode_instance<kCache, kDim>(p, rows, general, stream);
  });
}

}  // namespace pagedkern
