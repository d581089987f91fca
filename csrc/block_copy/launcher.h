#pragma once

#include "block_copy/params.h"
#include "common/status.h"

namespace pagedkern {

// `stream` is a cudaStream_t of the current device.
Status launch_copy_blocks(const CopyBlocksParams& params, void* stream);

}  // namespace pagedkern
