// The CPU kernels as a backend: torch's thread pool handed to csrc/cpu.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>

#include "bindings/backend.h"
#include "cpu/kernels.h"

namespace pagedkern::bindings {
namespace {

using Body = std::function<void(int64_t, int64_t)>;

void parallel_for(int64_t count, int64_t grain, const Body& body) {
  torch::stable::parallel_for(0, count, grain, body);
}

cpu::ThreadPool thread_pool() {
  return {parallel_for, static_cast<int>(torch::stable::get_num_threads())};
}

void copy_row_range(const RowCopy& copy, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    std::memcpy(copy.destination + row * copy.destination_pitch, copy.source + row * copy.source_pitch, copy.bytes);
  }
}

constexpr int64_t kGrainBytes = 256 * 1024;  // below this a second thread costs more than it brings

// Transfers are merged runs of blocks, so that one may be large: its bytes are shared out, not only the transfers.
void copy_rows(const RowCopy* copies, int64_t count, const Place&) {
  for (int64_t i = 0; i < count; ++i) {
    RowCopy copy = copies[i];
    if (copy.rows == 1 && copy.bytes > kGrainBytes) {
      parallel_for(copy.bytes, kGrainBytes, [&copy](int64_t begin, int64_t end) {
        std::memcpy(copy.destination + begin, copy.source + begin, end - begin);
      });
    } else {
      parallel_for(copy.rows, std::max<int64_t>(1, kGrainBytes / copy.bytes),
                   [&copy](int64_t begin, int64_t end) { copy_row_range(copy, begin, end); });
    }
  }
}

const Backend kCpuBackend = {
    .name = "CPU",
    .float32 = true,
    .host_values = true,
    .absent = "",
    .kernels = cpu::simd_level,
    .read = nullptr,
    .reshape_and_cache = [](const CacheWriteParams& p, const Place&) { cpu::reshape_and_cache(p, thread_pool()); },
    .reshape_and_cache_dynamic = [](const CacheWriteParams& p,
                                    const Place&) { cpu::reshape_and_cache_dynamic(p, thread_pool()); },
    .rope_reshape_and_cache = [](const CacheWriteParams& p, const RopeParams& rope,
                                 const Place&) { cpu::rope_reshape_and_cache(p, rope, thread_pool()); },
    .paged_attention = [](const PagedAttentionParams& p, const Place&) { cpu::paged_attention(p, thread_pool()); },
    .merge_attention_states = [](const MergeStatesParams& p,
                                 const Place&) { cpu::merge_attention_states(p, thread_pool()); },
    .gather_cache = [](const GatherCacheParams& p, const Place&) { cpu::gather_cache(p, thread_pool()); },
    .copy_blocks = [](const CopyBlocksParams& p, const Place&) { cpu::copy_blocks(p, thread_pool()); },
    .copy_rows = copy_rows,
    .paged_attention_workspace_size = cpu::paged_attention_workspace_size,
};

}  // namespace

const Backend* const kCpuTensors = &kCpuBackend;

}  // namespace pagedkern::bindings
