// The schedule of a call, from lengths on the host, for tests and benches: the kernel makes its own on the device.
#include <algorithm>

#include "paged_decode/config.h"
#include "paged_decode/instances.h"
#include "paged_decode/launcher.h"

namespace pagedkern {
namespace {

template <class Config>
DecodePlan plan_of(const std::vector<int32_t>& seq_lens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                   int64_t multiprocessors) {
  const int64_t rows = num_heads / num_kv_heads;
  const int64_t units_of_sequence = ceil_div<int64_t>(rows, Config::kRows) * num_kv_heads;
  const int64_t slot_rows = std::min<int64_t>(rows, Config::kRows);
  const auto tiles_of = [](int32_t length) { return std::max(1, ceil_div(length, Config::kTileKeys)); };
  int64_t pieces = 0;
  for (const int32_t length : seq_lens) pieces += units_of_sequence * tiles_of(length);
  const int64_t buckets = decode_buckets(pieces, units_of_sequence * static_cast<int64_t>(seq_lens.size()),
                                         Config::least_tiles(pieces, least_part_keys(slot_rows, Config::kCache)),
                                         multiprocessors * Config::kBlocksPerMultiprocessor);

  DecodePlan plan;
  plan.tile_keys = Config::kTileKeys;
  plan.blocks_per_multiprocessor = Config::kBlocksPerMultiprocessor;
  plan.bytes_in_flight =
      int64_t{Config::kBlocksPerMultiprocessor} * (Config::kSlots - 1) * Config::kWarps * Config::kSlotBytes;
  for (int64_t b = 0; b < buckets; ++b) {
    plan.bucket_tiles.push_back(bucket_begin(b + 1, pieces, buckets) - bucket_begin(b, pieces, buckets));
  }
  int64_t begin = 0;
  for (const int32_t length : seq_lens) {
    for (int64_t unit = 0; unit < units_of_sequence; ++unit, begin += tiles_of(length)) {
      const int64_t last = bucket_of(begin + tiles_of(length) - 1, pieces, buckets);
      const int64_t parts = last - bucket_of(begin, pieces, buckets) + 1;
      if (parts > 1) plan.partial_bytes += 2 * parts * slot_rows * (head_dim + 2) * 4;
    }
  }
  return plan;
}

}  // namespace

DecodePlan paged_decode_plan(const std::vector<int32_t>& seq_lens, int64_t num_heads, int64_t num_kv_heads,
                             int64_t head_dim, DType cache, int64_t multiprocessors) {
  const int dim = padded_head_dim(static_cast<int>(head_dim), false);
  return with_instance(cache, dim, [&]<DType kCache, int kDim>() {
    return num_heads / num_kv_heads <= 8 ? plan_of<PagedDecodeConfig<kCache, kDim, 8, false>>(
                                               seq_lens, num_heads, num_kv_heads, head_dim, multiprocessors)
                                         : plan_of<PagedDecodeConfig<kCache, kDim, 16, false>>(
                                               seq_lens, num_heads, num_kv_heads, head_dim, multiprocessors);
  });
}

}  // namespace pagedkern
