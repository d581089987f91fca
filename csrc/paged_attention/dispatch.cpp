// Which kernel takes which sequence of a call.
#include "paged_attention/launcher.h"
#include "paged_prefill/launcher.h"

namespace pagedkern {

int64_t paged_attention_workspace_bytes(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t) {
  return 0;
}

Status launch_paged_attention(const PagedAttentionParams& params, void* stream) {
  PagedAttentionParams all = params;
  all.first_query_len = 1;
  all.last_query_len = params.num_tokens;
  return launch_paged_prefill(all, stream);
}

}  // namespace pagedkern
