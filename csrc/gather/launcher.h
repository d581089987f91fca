#pragma once

#include "common/status.h"
#include "gather/params.h"

namespace pagedkern {

// key and value are bfloat16 or float16. `stream` is a cudaStream_t of the current device.
Status launch_gather_cache(const GatherCacheParams& params, void* stream);

}  // namespace pagedkern
