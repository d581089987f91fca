// The part of gather_cache that is compiled once per SIMD level.
#pragma once

#include <cstdint>

#include "cpu/simd.h"
#include "gather/params.h"

// Rows [row_begin, row_end) of the output, of whatever sequences they belong to.
PAGEDKERN_DECLARE_SIMD(void, gather_rows, (const GatherCacheParams& params, int64_t row_begin, int64_t row_end))
