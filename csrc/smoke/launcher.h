#pragma once

#include "common/status.h"
#include "smoke/params.h"

namespace pagedkern {

// `stream` is a cudaStream_t of the current device.
Status launch_smoke_add(const SmokeAddParams& params, void* stream);

}  // namespace pagedkern
