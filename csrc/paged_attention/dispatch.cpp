// Which kernel takes which sequence of a call.
#include <algorithm>

#include "paged_attention/launcher.h"
#include "paged_decode/launcher.h"
#include "paged_prefill/launcher.h"

namespace pagedkern {

int64_t paged_attention_workspace_bytes(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                        int64_t num_seqs, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                        int64_t num_splits) {
  return paged_decode_workspace_size(num_tokens, num_heads, num_kv_heads, head_dim, num_seqs, max_seqlen_q,
                                     max_seqlen_k, num_splits);
}

// A launch for the sequences of few query tokens, and one for the others where the bounds allow any.
Status launch_paged_attention(const PagedAttentionParams& params, void* stream) {
  PagedAttentionParams part = params;
  part.first_query_len = kMaxDecodeQueryLen + 1;
  part.last_query_len = params.num_tokens;
  const int64_t longest = params.cu_seqlens_q == nullptr ? 1 : std::min(params.max_seqlen_q, params.num_tokens);
  if (longest > kMaxDecodeQueryLen) {
    const Status status = launch_paged_prefill(part, stream);
    if (!status.ok()) return status;
  }
  part.first_query_len = 1;
  part.last_query_len = kMaxDecodeQueryLen;
  return launch_paged_decode(part, stream);
}

}  // namespace pagedkern
