// merge_attention_states.
#include "cpu/simd/merge_states.h"

#include "cpu/kernels.h"
#include "cpu/share_work.h"

namespace pagedkern::cpu {

void merge_attention_states(const MergeStatesParams& params, const ThreadPool& pool) {
  const int64_t rows = params.num_tokens * params.num_heads;
  const int64_t row_bytes =
      params.head_dim * (size_of(params.out_dtype) + size_of(params.a_dtype) + size_of(params.b_dtype));
  share_work(pool, rows, rows * row_bytes,
             [&](int64_t begin, int64_t end) { PAGEDKERN_CALL_SIMD(merge_state_rows, (params, begin, end)); });
}

}  // namespace pagedkern::cpu
