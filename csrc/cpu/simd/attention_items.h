// The item runners, by the element of the cache: a file each, so that none takes long to compile.
#pragma once

#include "cpu/attention_plan.h"

namespace pagedkern::cpu::PAGEDKERN_SIMD {

void run_item_float32(const AttentionTask& task, const AttentionItem& item, const AttentionScratch& scratch);
void run_item_float16(const AttentionTask& task, const AttentionItem& item, const AttentionScratch& scratch);
void run_item_bfloat16(const AttentionTask& task, const AttentionItem& item, const AttentionScratch& scratch);
void run_item_e4m3(const AttentionTask& task, const AttentionItem& item, const AttentionScratch& scratch);
void run_item_e5m2(const AttentionTask& task, const AttentionItem& item, const AttentionScratch& scratch);

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
