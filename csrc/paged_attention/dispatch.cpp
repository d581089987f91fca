// Which kernel takes which sequence of a call.
#include <algorithm>

#include "paged_attention/launcher.h"
#include "paged_decode/launcher.h"
#include "paged_prefill/launcher.h"

namespace pagedkern {

// Sequences whose rows of a KV head, query tokens times group, fit one tile of the decode kernel go there: it reads
// keys and values once for all of them. In the larger tiles of the prefill kernel more rows share each reading. The
// rule asks for nothing but the sequence's own length, so that the kernel that computes a row never depends on the
// batch.
int64_t paged_attention_workspace_bytes(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                        int64_t num_seqs, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                        int64_t num_splits) {
  if (num_tokens == 0 || num_seqs == 0) return 0;
  const int64_t decode_len = max_decode_query_len(num_heads / num_kv_heads);
  int64_t bytes = 0;
  if (decode_len > 0) {
    bytes = paged_decode_workspace_size(num_tokens, num_heads, num_kv_heads, head_dim, num_seqs, max_seqlen_q,
                                        max_seqlen_k, num_splits);
  }
  if (std::max<int64_t>(max_seqlen_q, 1) > decode_len) {
    bytes = std::max(bytes, paged_prefill_workspace_size(num_tokens, num_heads, num_kv_heads, head_dim, num_seqs,
                                                         max_seqlen_q, max_seqlen_k, num_splits, decode_len + 1));
  }
  return bytes;
}

// A launch for each kernel that the bounds allow any sequence. They follow each other on the stream and share the
// workspace.
Status launch_paged_attention(const PagedAttentionParams& params, void* stream) {
  PagedAttentionParams part = params;
  const int64_t decode_len = max_decode_query_len(params.num_heads / params.cache.num_kv_heads);
  const int64_t longest = params.cu_seqlens_q == nullptr ? 1 : std::min(params.max_seqlen_q, params.num_tokens);
  if (longest > decode_len) {
    part.first_query_len = decode_len + 1;
    part.last_query_len = params.num_tokens;
    const Status status = launch_paged_prefill(part, stream);
    if (!status.ok()) return status;
  }
  if (decode_len == 0) return {};
  part.first_query_len = 1;
  part.last_query_len = decode_len;
  return launch_paged_decode(part, stream);
}

}  // namespace pagedkern
