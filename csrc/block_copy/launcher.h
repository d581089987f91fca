#pragma once

#include "block_copy/params.h"
#include "common/status.h"

namespace pagedkern {

// `stream` is a cudaStream_t of the current device.
Status launch_copy_blocks(const CopyBlocksParams& params, void* stream);

// Copies between memory of the device and of the host, in any order: no destination is another's, nor a source.
// `batched` false: one call of the runtime for each, as where the driver has no batched copy.
Status launch_copy_rows(const RowCopy* copies, int64_t count, void* stream, bool batched = true);

}  // namespace pagedkern
