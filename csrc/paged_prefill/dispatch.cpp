// From the op's arguments to one instance of the kernel: pure arithmetic on the host, nothing of it per sequence.
#include <algorithm>
#include <cstdint>

#include "common/cache_rows.h"
#include "paged_prefill/bounds.h"
#include "paged_prefill/instances.h"
#include "paged_prefill/launcher.h"

namespace pagedkern {
namespace {

int32_t rows_width(const void* data, int64_t stride_token, int64_t stride_head) {
  return AccessWidth().pointer(data).bytes(stride_token * 2).bytes(stride_head * 2).width();
}

template <DType kType, bool kFp8>
Status launch_head_dim(const PagedPrefillParams& params, void* stream) {
  const int32_t head_dim = params.op.cache.head_dim;
  if (head_dim <= 64) return launch_paged_prefill_instance<kType, kFp8, 64>(params, stream);
  if (head_dim <= 96) return launch_paged_prefill_instance<kType, kFp8, 96>(params, stream);
  if (head_dim <= 128) return launch_paged_prefill_instance<kType, kFp8, 128>(params, stream);
  if (head_dim <= 192) return launch_paged_prefill_instance<kType, kFp8, 192>(params, stream);
  return launch_paged_prefill_instance<kType, kFp8, 256>(params, stream);
}

}  // namespace

int64_t paged_prefill_workspace_size(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                     int64_t num_seqs, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t num_splits,
                                     int64_t first_query_len) {
  const PrefillBounds bounds = prefill_bounds(num_tokens, num_heads, num_kv_heads, head_dim, num_seqs, max_seqlen_q,
                                              max_seqlen_k, num_splits, first_query_len);
  return split_workspace(bounds.split).bytes;
}

Status launch_paged_prefill(const PagedAttentionParams& op, void* stream) {
  if (op.num_tokens == 0 || op.num_seqs == 0) return {};
  PagedPrefillParams params = {};
  params.op = op;
  params.window = key_window(op);
  params.group = op.num_heads / op.cache.num_kv_heads;
  params.block_size = static_cast<uint32_t>(std::min<int64_t>(op.cache.block_size, INT32_MAX));
  params.query_width = rows_width(op.query, op.query_stride_token, op.query_stride_head);
  params.out_width = rows_width(op.out, op.out_stride_token, op.out_stride_head);
  params.cache_width = cache_starts(op.cache.dtype, op.key_cache, op.value_cache).width();
  const PrefillBounds bounds =
      prefill_bounds(op.num_tokens, op.num_heads, op.cache.num_kv_heads, op.cache.head_dim, op.num_seqs,
                     op.max_seqlen_q, op.max_seqlen_k, op.num_splits, op.first_query_len);
  if (!place_prefill_bounds(bounds, params)) {
    return {"the workspace is smaller than paged_attention_workspace_size says"};
  }
  if (is_fp8(op.cache.dtype)) return launch_head_dim<DType::kFloat16, true>(params, stream);
  return op.dtype == DType::kBFloat16 ? launch_head_dim<DType::kBFloat16, false>(params, stream)
                                      : launch_head_dim<DType::kFloat16, false>(params, stream);
}

}  // namespace pagedkern
