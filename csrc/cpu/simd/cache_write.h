// The part of the cache writers that is compiled once per SIMD level.
#pragma once

#include <cstdint>

#include "cache_write/params.h"
#include "cpu/simd.h"

// One unit of work is one head of one tensor, over all tokens: first the query heads where there is a rotation, then
// the key heads, then the value heads. Units never share a destination, and within one the tokens go in order, so that
// of tokens with the same slot the last one wins, whole, whatever the threads do.
// rope may be null; dynamic: one scale per token and head is computed and stored.
PAGEDKERN_DECLARE_SIMD(void, write_cache_units,
                       (const CacheWriteParams& params, const RopeParams* rope, bool dynamic, int64_t unit_begin,
                        int64_t unit_end))
