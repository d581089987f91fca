// reshape_and_cache, reshape_and_cache_dynamic, rope_reshape_and_cache.
#include "cpu/simd/cache_write.h"

#include "cpu/kernels.h"
#include "cpu/share_work.h"

namespace pagedkern::cpu {
namespace {

void write_cache(const CacheWriteParams& params, const RopeParams* rope, bool dynamic, const ThreadPool& pool) {
  const int64_t query_heads = rope != nullptr ? rope->num_heads : 0;
  const int64_t units = query_heads + 2 * static_cast<int64_t>(params.cache.num_kv_heads);
  const int64_t row_bytes = params.cache.head_dim * (size_of(params.dtype) + size_of(params.cache.dtype));
  share_work(pool, units, units * params.num_slots * row_bytes, [&](int64_t begin, int64_t end) {
    PAGEDKERN_CALL_SIMD(write_cache_units, (params, rope, dynamic, begin, end));
  });
}

}  // namespace

void reshape_and_cache(const CacheWriteParams& params, const ThreadPool& pool) {
  write_cache(params, nullptr, false, pool);
}

void reshape_and_cache_dynamic(const CacheWriteParams& params, const ThreadPool& pool) {
  write_cache(params, nullptr, true, pool);
}

void rope_reshape_and_cache(const CacheWriteParams& params, const RopeParams& rope, const ThreadPool& pool) {
  write_cache(params, &rope, false, pool);
}

}  // namespace pagedkern::cpu
