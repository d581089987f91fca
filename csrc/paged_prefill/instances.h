// The kernels there are, one explicit instantiation each in instantiations/.
#pragma once

#include "common/dtypes.h"
#include "common/status.h"
#include "paged_prefill/params.h"

namespace pagedkern {

// kType: of query and out, and of a cache that is not FP8. kDim: 64, 96, 128, 192 or 256, head_dim or more.
template <DType kType, bool kFp8, int kDim>
Status launch_paged_prefill_instance(const PagedPrefillParams& params, void* stream);

}  // namespace pagedkern
