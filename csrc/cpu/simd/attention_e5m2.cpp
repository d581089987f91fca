#include "cpu/simd/attention_item.h"
#include "cpu/simd/attention_items.h"

namespace pagedkern::cpu::PAGEDKERN_SIMD {

void run_item_e5m2(const AttentionTask& task, const AttentionItem& item, const AttentionScratch& scratch) {
  run_item<Fp8<E5M2>>(task, item, scratch);
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
