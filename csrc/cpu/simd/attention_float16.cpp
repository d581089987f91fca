#include "cpu/simd/attention_item.h"
#include "cpu/simd/attention_items.h"

namespace pagedkern::cpu::PAGEDKERN_SIMD {

void run_item_float16(const AttentionTask& task, const AttentionItem& item, const AttentionScratch& scratch) {
  run_item<Half>(task, item, scratch);
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
