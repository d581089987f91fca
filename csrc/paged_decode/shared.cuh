// The shared memory of a block.
#pragma once

#include "common/split_schedule.h"
#include "paged_decode/config.h"

namespace pagedkern {

template <class Config>
struct PagedDecodeShared {
  alignas(1024) uint8_t slots[Config::kWarps][Config::kSlots][Config::kSlotBytes];  // each warp's ring of keys, values
  float scale[Config::kWarps][Config::kGeneral ? Config::kSlots : 1][2][Config::kGeneral ? Config::kWarpKeys : 4];
  alignas(16) float sums[Config::kWarps][Config::kRows][Config::kSumPitch];  // of the warps, to be merged
  float sum[Config::kWarps][Config::kRows];
  float reference[Config::kWarps][Config::kRows];
  alignas(16) uint16_t query[Config::kRows][Config::kQueryPitch];
  float factor[Config::kRows];  // from q.k to the score in base 2
  float slope[Config::kRows];   // ALiBi, base 2
  int32_t position[Config::kRows];
  int32_t begin[Config::kRows];  // keys the row sees
  int32_t end[Config::kRows];
  SplitShared<Config::kWarps, Config::kParts> split;
};

}  // namespace pagedkern
