#pragma once

#include "common/attention_params.h"
#include "common/status.h"

namespace pagedkern {

// The sequences of first_query_len to last_query_len query tokens; any such length is right. `stream` is a cudaStream_t
// of the current device.
Status launch_paged_prefill(const PagedAttentionParams& params, void* stream);

}  // namespace pagedkern
