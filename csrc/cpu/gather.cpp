// gather_cache.
#include "cpu/simd/gather.h"

#include "cpu/kernels.h"
#include "cpu/share_work.h"

namespace pagedkern::cpu {

void gather_cache(const GatherCacheParams& params, const ThreadPool& pool) {
  if (params.num_seqs == 0) return;
  const int64_t row_bytes = 2 * static_cast<int64_t>(params.cache.num_kv_heads) * params.cache.head_dim *
                            (size_of(params.dtype) + size_of(params.cache.dtype));
  share_work(pool, params.total, params.total * row_bytes,
             [&](int64_t begin, int64_t end) { PAGEDKERN_CALL_SIMD(gather_rows, (params, begin, end)); });
}

}  // namespace pagedkern::cpu
