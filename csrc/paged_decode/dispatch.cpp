// Which decode kernel, on how many blocks, with what workspace.
#include <algorithm>
#include <cstdint>

#include "common/cache_rows.h"
#include "paged_decode/config.h"
#include "paged_decode/instances.h"
#include "paged_decode/launcher.h"
#include "paged_decode/schedule.h"

namespace pagedkern {
namespace {

constexpr int64_t kLeastTileKeys = 64;  // of all configs
constexpr int64_t kCounterAlignment = 64;

// Rows of the query tile; results do not depend on it.
int tile_rows(int64_t group, int64_t max_seqlen_q) {
  return group * std::min(max_seqlen_q, kMaxDecodeQueryLen) <= 8 ? 8 : 16;
}

struct Workspace {
  int64_t token_tiles;
  int64_t max_splits;
  int64_t slot_rows;
  int64_t counter_bytes;
  int64_t bytes;
};

// `places`: query tokens that may have partial results.
Workspace workspace_of(int64_t places, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t max_seqlen_q,
                       int64_t max_seqlen_k, int64_t num_splits, int rows) {
  const int64_t group = num_heads / num_kv_heads;
  Workspace w;
  w.token_tiles = ceil_div<int64_t>(group, rows);
  w.slot_rows = std::min<int64_t>(rows, group * std::max<int64_t>(max_seqlen_q, 1));
  w.max_splits = std::max<int64_t>(1, std::min(num_splits, ceil_div(max_seqlen_k, kLeastTileKeys)));
  int64_t counters = kMaxDecodeBlocks, slots = 2 * kMaxDecodeBlocks;
  if (num_splits > 0) {
    counters = places * w.token_tiles * num_kv_heads;
    slots = counters * w.max_splits;
    if (w.max_splits == 1) counters = slots = 0;  // nothing is ever merged
  }
  w.counter_bytes = ceil_div<int64_t>(counters * 8, kCounterAlignment) * kCounterAlignment;
  w.bytes = w.counter_bytes + slots * slot_floats(w.slot_rows, head_dim) * 4;
  return w;
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

bool paged_decode_takes(const PagedAttentionParams&) {
  return true;
}

int64_t paged_decode_workspace_size(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                    int64_t num_seqs, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t num_splits) {
  if (num_tokens == 0 || num_seqs == 0) return 0;
  const int64_t places = std::min(num_tokens, num_seqs * kMaxDecodeQueryLen);
  const auto bytes = [&](int rows) {
    return workspace_of(places, num_heads, num_kv_heads, head_dim, max_seqlen_q, max_seqlen_k, num_splits, rows).bytes;
  };
  return std::max(bytes(8), bytes(16));
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
  const int64_t seq_places = op.num_seqs * op.last_query_len;  // the others' tokens have none
  const Workspace w = workspace_of(std::min(op.num_tokens, seq_places), op.num_heads, op.cache.num_kv_heads,
                                   op.cache.head_dim, op.max_seqlen_q, op.max_seqlen_k, op.num_splits, rows);
  if (w.bytes > op.workspace_bytes) return {"the workspace is smaller than paged_attention_workspace_size says"};
  p.token_tiles = static_cast<int32_t>(w.token_tiles);
  p.seq_tokens = seq_places < op.num_tokens ? static_cast<int32_t>(op.last_query_len) : 0;
  p.max_splits = static_cast<int32_t>(w.max_splits);
  p.slot_rows = static_cast<int32_t>(w.slot_rows);
  p.counters = static_cast<uint64_t*>(op.workspace);
  p.partials = reinterpret_cast<float*>(static_cast<char*>(op.workspace) + w.counter_bytes);
  p.least_keys = static_cast<int32_t>(least_part_keys(w.slot_rows, op.cache.dtype));
  return with_instance(op.cache.dtype, dim, [&]<DType kCache, int kDim>() {
    return launch_paged_decode_instance<kCache, kDim>(p, rows, general, stream);
  });
}

}  // namespace pagedkern
