// The part of merge_attention_states that is compiled once per SIMD level.
#pragma once

#include <cstdint>

#include "cpu/simd.h"
#include "merge_states/params.h"

// Rows of the output, numbered token * num_heads + head.
PAGEDKERN_DECLARE_SIMD(void, merge_state_rows, (const MergeStatesParams& params, int64_t row_begin, int64_t row_end))
