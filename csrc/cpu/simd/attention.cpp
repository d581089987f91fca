// One item of paged attention (attention_plan.h), at one SIMD level.
#include "cpu/simd/attention_items.h"

namespace pagedkern::cpu::PAGEDKERN_SIMD {

void run_attention_item(const AttentionTask& task, const AttentionItem& item, const AttentionScratch& scratch) {
  switch (task.params->cache.dtype) {
    case DType::kFloat32: return run_item_float32(task, item, scratch);
    case DType::kFloat16: return run_item_float16(task, item, scratch);
    case DType::kBFloat16: return run_item_bfloat16(task, item, scratch);
    case DType::kFloat8E4M3: return run_item_e4m3(task, item, scratch);
    case DType::kFloat8E5M2: return run_item_e5m2(task, item, scratch);
  }
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
