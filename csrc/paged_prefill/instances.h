// The kernels there are, one explicit instantiation each in instantiations/.
#pragma once

#include "common/dtypes.h"
#include "common/status.h"
#include "paged_prefill/params.h"

namespace pagedkern {

// kType: what is multiplied: the dtype of query, out and cache, or float16 where the cache is FP8. kDim: 64, 96, 128,
// 192 or 256, head_dim or more.
template <DType kType, bool kFp8, int kDim>
Status launch_paged_prefill_instance(const PagedPrefillParams& params, void* stream);

}  // namespace pagedkern
