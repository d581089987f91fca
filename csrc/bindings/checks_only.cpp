#include "bindings/checks_only.h"

#include "bindings/backend.h"
#include "bindings/mode.h"

namespace pagedkern::bindings {
namespace {

thread_local int64_t level_of_thread = 0;

}  // namespace

bool checks_only(int64_t level) {
  level_of_thread = 0;
  const bool checked = check_mode();
  level_of_thread = level;
  return checked;
}

int64_t checks_only_level() {
  return level_of_thread;
}

const Backend kChecksOnly = {
    .name = "Triton",
    .float32 = false,
    .host_values = false,
    .absent = "",
    .kernels = [] { return "Triton kernels"; },
    .read = nullptr,
    .reshape_and_cache = [](const CacheWriteParams&, const Place&) {},
    .reshape_and_cache_dynamic = [](const CacheWriteParams&, const Place&) {},
    .rope_reshape_and_cache = [](const CacheWriteParams&, const RopeParams&, const Place&) {},
    .paged_attention = [](const PagedAttentionParams&, const Place&) {},
    .merge_attention_states = [](const MergeStatesParams&, const Place&) {},
    .gather_cache = [](const GatherCacheParams&, const Place&) {},
    .copy_blocks = [](const CopyBlocksParams&, const Place&) {},
    .copy_rows = [](const RowCopy*, int64_t, const Place&) {},
    .paged_attention_workspace_size = nullptr,
};

}  // namespace pagedkern::bindings
