#pragma once

#include "cache_write/params.h"
#include "common/status.h"

namespace pagedkern {

// query, key and value are bfloat16 or float16. `stream` is a cudaStream_t of the current device.
Status launch_reshape_and_cache(const CacheWriteParams& params, void* stream);
Status launch_reshape_and_cache_dynamic(const CacheWriteParams& params, void* stream);
Status launch_rope_reshape_and_cache(const CacheWriteParams& params, const RopeParams& rope, void* stream);

}  // namespace pagedkern
