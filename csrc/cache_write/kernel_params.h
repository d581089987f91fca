// What the cache-write kernels get by value, worked out by the launchers.
#pragma once

#include "cache_write/params.h"
#include "common/fast_divide.h"

namespace pagedkern {

struct CacheWriteKernelParams : CacheWriteParams {
  int64_t team_tokens;  // tokens that a team of blocks takes at a time
  int32_t table_size;   // of the hash table of their slots: a power of two, twice as many at least
  // reshape_and_cache, where the heads of a token that lie end to end everywhere are one row (num_kv_heads is then 1).
  FastDivide chunks_of_row;
  // all
  FastDivide heads;
  int32_t lanes_of_row;  // reshape_and_cache_dynamic, rope: a power of two
};

struct RopeKernelParams : CacheWriteKernelParams {
  RopeParams rope;
  int32_t warps_of_token;  // a power of two up to those of a block
  bool trade;              // FP8: neighbouring lanes exchange codes, for 16-byte stores
};

}  // namespace pagedkern
