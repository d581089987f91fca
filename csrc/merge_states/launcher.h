#pragma once

#include "common/status.h"
#include "merge_states/params.h"

namespace pagedkern {

// out is bfloat16 or float16. `stream` is a cudaStream_t of the current device.
Status launch_merge_attention_states(const MergeStatesParams& params, void* stream);

}  // namespace pagedkern
