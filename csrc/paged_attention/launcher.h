// paged_attention on the device: one op, its kernels in paged_decode/ and paged_prefill/.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/status.h"

namespace pagedkern {

// Bytes a launch needs in params.workspace, 0 for none. The pointer is 64-byte aligned.
int64_t paged_attention_workspace_bytes(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                        int64_t num_seqs, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                        int64_t num_splits);

// `stream` is a cudaStream_t of the current device.
Status launch_paged_attention(const PagedAttentionParams& params, void* stream);

}  // namespace pagedkern
