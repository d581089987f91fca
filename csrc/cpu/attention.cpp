// paged_attention on the CPU: cuts the call into items, hands them to the workers, biggest first.
//
// Cuts come from a sequence's own lengths and the head counts alone, never from the batch or the threads, so that a
// sequence gives the same bits in any company. Which KV heads share an item does depend on both, and changes nothing:
// heads never meet.
#include <algorithm>
#include <new>
#include <type_traits>
#include <vector>

#include "cpu/attention_plan.h"
#include "cpu/buffer.h"
#include "cpu/kernels.h"

namespace pagedkern::cpu {
namespace {

constexpr int64_t kNoWindow = int64_t{1} << 40;  // longer than any sequence, far from overflow
constexpr int64_t kItemsPerWorker = 4;
// Keys and values of the heads that read a tile together: this tile and the one fetched ahead of it share the L2 cache.
constexpr int64_t kDirectTileBytes = 256 * 1024;

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

int64_t splits_of(int64_t keys, int64_t rows, int64_t num_splits) {
  if (num_splits > 0) return num_splits;
  if (rows > kMaxDirectRows) return 1;
  return std::clamp<int64_t>(keys / kAutoSplitKeys, 1, kMaxAutoSplits);
}

struct Plan {
  std::vector<AttentionItem> items;
  int64_t partial_rows = 0;
  int64_t num_counters = 0;
  int64_t max_rows = 0;
  int64_t max_heads = 0;

  void clear() {
    items.clear();
    partial_rows = num_counters = max_rows = max_heads = 0;
  }
};

class Planner {
 public:
  Planner(const PagedAttentionParams& params, const AttentionTask& task, Plan& plan)
      : params_(params), task_(task), plan_(plan) {}

  // The tiles of all sequences, every KV head together.
  void cut() {
    for (int64_t seq = 0; seq < params_.num_seqs; ++seq) {
      const int64_t begin = params_.cu_seqlens_q == nullptr ? seq : params_.cu_seqlens_q[seq];
      const int64_t end = params_.cu_seqlens_q == nullptr ? seq + 1 : params_.cu_seqlens_q[seq + 1];
      const int64_t q_len = end - begin;
      if (q_len <= 0) continue;
      const int64_t most = std::max<int64_t>(1, kPackedRows / task_.group);
      const int64_t tokens = divide_up(q_len, divide_up(q_len, most));
      for (int64_t t = 0; t < q_len; t += tokens) cut_tile(seq, begin + t, std::min(tokens, q_len - t), end);
    }
  }

  // Fewer heads in an item where there are too few items to share out. Packed tiles always take one head.
  void share_heads(int64_t workers) {
    const int64_t heads = params_.cache.num_kv_heads;
    const int64_t tiles = static_cast<int64_t>(plan_.items.size());
    const int64_t parts = std::min(heads, divide_up(workers * kItemsPerWorker, std::max<int64_t>(tiles, 1)));
    const int64_t tile_bytes = 2 * kKeyTile * params_.cache.head_dim * size_of(params_.cache.dtype);
    const int64_t direct_heads = std::clamp<int64_t>(kDirectTileBytes / tile_bytes, 1, divide_up(heads, parts));
    for (int64_t i = 0; i < tiles; ++i) {
      const AttentionItem whole = plan_.items[i];
      const int64_t step = whole.direct ? direct_heads : 1;
      for (int64_t h = 0; h < heads; h += step) {
        AttentionItem item = whole;
        item.head_begin = static_cast<int32_t>(h);
        item.head_end = static_cast<int32_t>(std::min(heads, h + step));
        item.counter = whole.counter * heads + h;
        if (h == 0) {
          plan_.items[i] = item;
        } else {
          plan_.items.push_back(item);
        }
        plan_.max_rows = std::max(plan_.max_rows, int64_t{item.num_tokens} * task_.group);
        plan_.max_heads = std::max<int64_t>(plan_.max_heads, item.head_end - item.head_begin);
      }
    }
    plan_.num_counters *= heads;
  }

 private:
  void cut_tile(int64_t seq, int64_t first_token, int64_t tokens, int64_t sequence_end) {
    AttentionItem item{};
    item.seq = seq;
    item.first_token = first_token;
    item.num_tokens = static_cast<int32_t>(tokens);
    item.seq_len = params_.seq_lens[seq];
    item.first_position = item.seq_len - (sequence_end - first_token);
    const int64_t last_position = item.first_position + tokens - 1;
    const int64_t begin = std::max<int64_t>(0, item.first_position - task_.window_left);
    const int64_t end = std::min(item.seq_len, last_position + task_.window_right + 1);
    item.direct = tokens * task_.group <= kMaxDirectRows;
    item.num_splits = 1;
    if (begin >= end) {
      plan_.items.push_back(item);
      return;
    }
    const int64_t first_tile = begin / kKeyTile, tiles = divide_up(end, kKeyTile) - first_tile;
    const int64_t per_split = divide_up(tiles, splits_of(end - begin, tokens * task_.group, params_.num_splits));
    const int64_t splits = divide_up(tiles, per_split);
    item.num_splits = static_cast<int32_t>(splits);
    if (splits > 1) {
      item.partial_row = plan_.partial_rows;
      item.counter = plan_.num_counters++;
      plan_.partial_rows += splits * params_.num_heads * tokens;
    }
    for (int64_t s = 0; s < splits; ++s) {
      item.split = static_cast<int32_t>(s);
      item.key_begin = std::max(begin, (first_tile + s * per_split) * kKeyTile);
      item.key_end = std::min(end, (first_tile + (s + 1) * per_split) * kKeyTile);
      plan_.items.push_back(item);
    }
  }

  const PagedAttentionParams& params_;
  const AttentionTask& task_;
  Plan& plan_;
};

int64_t cost(const AttentionItem& item) {
  return (item.key_end - item.key_begin) * item.num_tokens * (item.head_end - item.head_begin);
}

struct ScratchLayout {
  AttentionScratch scratch{};
  int64_t bytes = 0;

  ScratchLayout(char* base, int64_t head_dim, int64_t max_rows, int64_t max_heads) {
    const auto take = [&](auto*& pointer, int64_t count) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + bytes);
      bytes += divide_up(count * static_cast<int64_t>(sizeof(*pointer)), 64) * 64;
    };
    scratch.padded_dim = divide_up(head_dim, 64) * 64;
    scratch.rows = max_rows + kRowPadding;
    take(scratch.query, max_heads * scratch.rows * scratch.padded_dim);
    take(scratch.output, max_heads * scratch.rows * scratch.padded_dim);
    take(scratch.maximum, max_heads * scratch.rows * 16);
    take(scratch.sum, max_heads * scratch.rows * 16);
    take(scratch.packed_keys, scratch.padded_dim * kKeyTile);
    take(scratch.packed_values, kKeyTile * scratch.padded_dim);
    take(scratch.weights, int64_t{kRowPadding} * kKeyTile);
    take(scratch.row_begin, scratch.rows);
    take(scratch.row_end, scratch.rows);
  }
};

float* partials_in(const PagedAttentionParams& params, int64_t bytes, Buffer& own) {
  const bool aligned = reinterpret_cast<uintptr_t>(params.workspace) % alignof(float) == 0;
  if (params.workspace != nullptr && aligned && params.workspace_bytes >= bytes) {
    return static_cast<float*>(params.workspace);
  }
  return reinterpret_cast<float*>(own.at_least(bytes));
}

}  // namespace

void paged_attention(const PagedAttentionParams& params, const ThreadPool& pool) {
  static thread_local Plan plan;
  static thread_local Buffer partials, counters;
  AttentionTask task{};
  task.params = &params;
  task.group = params.num_heads / params.cache.num_kv_heads;
  task.window_left = params.window_left < 0 ? kNoWindow : std::min(params.window_left, kNoWindow);
  task.window_right = params.window_right < 0 ? kNoWindow : std::min(params.window_right, kNoWindow);
  if (params.causal) task.window_right = 0;

  plan.clear();
  Planner planner(params, task, plan);
  planner.cut();
  planner.share_heads(pool.num_threads);
  if (plan.items.empty()) return;
  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });

  if (plan.partial_rows > 0) {
    task.partials = partials_in(params, plan.partial_rows * (params.cache.head_dim + 2) * sizeof(float), partials);
    const int64_t bytes = plan.num_counters * sizeof(std::atomic<int32_t>);
    task.counters = reinterpret_cast<std::atomic<int32_t>*>(counters.at_least(bytes));
    for (int64_t i = 0; i < plan.num_counters; ++i) new (&task.counters[i]) std::atomic<int32_t>(0);
  }

  std::atomic<int64_t> next{0};
  const Plan& shared = plan;
  pool.parallel_for(pool.num_threads, 1, [&](int64_t, int64_t) {
    static thread_local Buffer buffer;
    const int64_t head_dim = params.cache.head_dim;
    const int64_t bytes = ScratchLayout(nullptr, head_dim, shared.max_rows, shared.max_heads).bytes;
    const ScratchLayout layout(buffer.at_least(bytes), head_dim, shared.max_rows, shared.max_heads);
    const int64_t count = static_cast<int64_t>(shared.items.size());
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      PAGEDKERN_CALL_SIMD(run_attention_item, (task, shared.items[i], layout.scratch));
    }
  });
}

// Partials are rows of head_dim + 2 floats, one for each split of each query row and head that is split. With
// num_splits = 0 a split has at least kAutoSplitKeys keys, and only short queries are split. Where a given number
// splits long ones too, and the workspace does not hold that, the partials are in memory of the library's own.
int64_t paged_attention_workspace_size(int64_t num_tokens, int64_t num_heads, [[maybe_unused]] int64_t num_kv_heads,
                                       int64_t head_dim, int64_t num_seqs, [[maybe_unused]] int64_t max_seqlen_q,
                                       int64_t max_seqlen_k, int64_t num_splits) {
  int64_t splits = std::clamp<int64_t>(max_seqlen_k / kAutoSplitKeys, 1, kMaxAutoSplits);
  if (num_splits > 0) splits = std::min(num_splits, divide_up(max_seqlen_k, kKeyTile) + 1);
  const int64_t tokens = std::min(num_tokens, num_seqs * kMaxAutoSplitTokens);
  if (splits <= 1 || tokens <= 0) return 0;
  return splits * tokens * num_heads * (head_dim + 2) * static_cast<int64_t>(sizeof(float));
}

}  // namespace pagedkern::cpu
