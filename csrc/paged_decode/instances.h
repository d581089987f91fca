// The kernels there are, one file of explicit instantiations for each dtype and head_dim in instantiations/.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/status.h"
#include "paged_decode/params.h"

namespace pagedkern {

// kCache: of the cache. kDim: 64, 96, 128, 192 or 256. `rows` of a tile: 8 or 16.
template <DType kCache, int kDim>
Status launch_paged_decode_instance(const PagedDecodeParams& params, int rows, bool general, void* stream);

// The kDim for a head_dim; the general kernel comes in fewer.
inline int padded_head_dim(int head_dim, bool general) {
  for (const int dim : {64, 96, 128, 192, 256}) {
    if (general && (dim == 96 || dim == 192)) continue;
    if (head_dim <= dim) return dim;
  }
  return 0;
}

// Calls `use` with the template arguments of the instance.
template <DType kCache, class Use>
auto with_dim(int dim, Use use) {
  switch (dim) {
    case 64: return use.template operator()<kCache, 64>();
    case 96: return use.template operator()<is_fp8(kCache) ? DType::kBFloat16 : kCache, 96>();
    case 128: return use.template operator()<kCache, 128>();
    case 192: return use.template operator()<kCache, 192>();
    default: return use.template operator()<kCache, 256>();
  }
}

template <class Use>
auto with_instance(DType cache, int dim, Use use) {
  switch (cache) {
    case DType::kFloat16: return with_dim<DType::kFloat16>(dim, use);
    case DType::kFloat8E4M3: return with_dim<DType::kFloat8E4M3>(dim, use);
    case DType::kFloat8E5M2: return with_dim<DType::kFloat8E5M2>(dim, use);
    default: return with_dim<DType::kBFloat16>(dim, use);
  }
}

}  // namespace pagedkern
