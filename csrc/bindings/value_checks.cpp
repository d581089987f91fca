#include "bindings/value_checks.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "bindings/checks.h"

namespace pagedkern::bindings {
namespace {

// Element i of an int32 or int64 vector.
struct IndexVector {
  const void* data;
  bool is_int32;
  int64_t stride;

  int64_t operator[](int64_t i) const {
    return is_int32 ? static_cast<const int32_t*>(data)[i * stride] : static_cast<const int64_t*>(data)[i * stride];
  }
};

// The contiguous vectors are the hot ones: a plain loop that the compiler vectorises.
template <class T>
int64_t largest(const T* values, int64_t stride, int64_t count) {
  T most = std::numeric_limits<T>::min();
  if (stride == 1) {
    for (int64_t i = 0; i < count; ++i) most = std::max(most, values[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) most = std::max(most, values[i * stride]);
  }
  return most;
}

int64_t largest(const IndexVector& vector, int64_t count) {
  return vector.is_int32 ? largest(static_cast<const int32_t*>(vector.data), vector.stride, count)
                         : largest(static_cast<const int64_t*>(vector.data), vector.stride, count);
}

// Entries first..last of one row of block_table name a block each.
void check_pages(const char* op, const int32_t* row, int64_t sequence, int64_t first, int64_t last,
                 int64_t num_blocks) {
  const auto limit = static_cast<uint32_t>(std::min<int64_t>(num_blocks, int64_t{1} << 31));
  uint32_t wrong = 0;
  for (int64_t page = first; page <= last; ++page) wrong |= static_cast<uint32_t>(row[page]) >= limit ? 1u : 0u;
  if (wrong == 0) return;
  for (int64_t page = first; page <= last; ++page) {
    if (static_cast<uint32_t>(row[page]) >= limit) {
      fail_value(op, "block_table", text(sequence, ", ", page), text(row[page]),
                 text("a block in [0, num_blocks=", num_blocks, ")"));
    }
  }
}

void check_length(const char* op, int64_t sequence, int64_t length, int64_t table_tokens, const char* bound_name,
                  int64_t bound) {
  if (length < 0) fail_value(op, "seq_lens", text(sequence), text(length), "0 or more");
  if (length > table_tokens) {
    fail_value(op, "seq_lens", text(sequence), text(length),
               text("at most max_blocks * block_size=", table_tokens, " of block_table"));
  }
  if (length > bound)
    fail_value(op, "seq_lens", text(sequence), text(length), text("at most ", bound_name, "=", bound));
}

// Query tokens of a sequence, with cu_seqlens_q checked as far as it.
int64_t query_length(const char* op, const PagedAttentionParams& params, int64_t sequence) {
  if (params.cu_seqlens_q == nullptr) return 1;
  const int64_t begin = params.cu_seqlens_q[sequence];
  const int64_t end = params.cu_seqlens_q[sequence + 1];
  if (sequence == 0 && begin != 0) fail_value(op, "cu_seqlens_q", "0", text(begin), "0");
  if (end < begin) {
    fail_value(op, "cu_seqlens_q", text(sequence + 1), text(end), text("at least the entry before it, ", begin));
  }
  if (end > params.num_tokens) {
    fail_value(op, "cu_seqlens_q", text(sequence + 1), text(end), text("at most num_tokens=", params.num_tokens));
  }
  if (end - begin > params.max_seqlen_q) {
    fail_value(op, "cu_seqlens_q", text(sequence + 1), text(end),
               text("at most max_seqlen_q=", params.max_seqlen_q, " beyond the entry before it, ", begin));
  }
  return end - begin;
}

}  // namespace

void fail_value(const char* op, const std::string& argument, const std::string& index, const std::string& value,
                const std::string& bound) {
  throw std::runtime_error(std::string(op) + ": " + argument + "[" + index + "] is " + value + ", expected " + bound);
}

void check_slots(const char* op, const CacheWriteParams& params) {
  const IndexVector slots{params.slot_mapping, params.slot_is_int32, params.slot_stride};
  const int64_t limit = params.cache.num_blocks * params.cache.block_size;
  if (params.num_slots == 0 || largest(slots, params.num_slots) < limit) return;
  for (int64_t i = 0; i < params.num_slots; ++i) {
    if (slots[i] >= limit) {
      fail_value(op, "slot_mapping", text(i), text(slots[i]), text("below num_blocks * block_size=", limit));
    }
  }
}

void check_positions(const char* op, const RopeParams& rope, int64_t num_slots) {
  const IndexVector positions{rope.positions, rope.position_is_int32, rope.position_stride};
  for (int64_t i = 0; i < num_slots; ++i) {
    const int64_t position = positions[i];
    if (position < 0 || position >= rope.max_position) {
      fail_value(op, "positions", text(i), text(position),
                 text("in [0, max_position=", rope.max_position, ") of cos_sin_cache"));
    }
  }
}

void check_attention_indices(const char* op, const PagedAttentionParams& params) {
  const int64_t block_size = params.cache.block_size;
  for (int64_t sequence = 0; sequence < params.num_seqs; ++sequence) {
    const int64_t queries = query_length(op, params, sequence);
    if (queries == 0) continue;
    const int64_t length = params.seq_lens[sequence];
    check_length(op, sequence, length, params.max_blocks * block_size, "max_seqlen_k", params.max_seqlen_k);
    if (length == 0) continue;
    const int64_t first_query = std::max<int64_t>(length - queries, 0);
    const int64_t first_key = params.window_left < 0 ? 0 : std::max<int64_t>(first_query - params.window_left, 0);
    check_pages(op, params.block_table + sequence * params.block_table_stride, sequence, first_key / block_size,
                (length - 1) / block_size, params.cache.num_blocks);
  }
}

void check_gather_indices(const char* op, const GatherCacheParams& params) {
  const int64_t block_size = params.cache.block_size;
  int64_t total = 0;
  for (int64_t sequence = 0; sequence < params.num_seqs; ++sequence) {
    const int64_t length = params.seq_lens[sequence];
    check_length(op, sequence, length, params.max_blocks * block_size, "total - cu_seqlens",
                 std::max<int64_t>(params.total - total, 0));
    if (params.cu_seqlens[sequence] != total) {
      fail_value(op, "cu_seqlens", text(sequence), text(params.cu_seqlens[sequence]),
                 text(total, ", the running sum of seq_lens"));
    }
    total += length;
    if (length > 0) {
      check_pages(op, params.block_table + sequence * params.block_table_stride, sequence, 0, (length - 1) / block_size,
                  params.cache.num_blocks);
    }
  }
  if (params.cu_seqlens[params.num_seqs] != total) {
    fail_value(op, "cu_seqlens", text(params.num_seqs), text(params.cu_seqlens[params.num_seqs]),
               text(total, ", the sum of seq_lens"));
  }
}

void check_mapping(const char* op, const Arg& mapping, int64_t num_sources, int64_t num_destinations, bool one_side) {
  const int64_t pairs = mapping.size(0);
  const auto id = [&](int64_t pair, int64_t side) {
    return mapping.as<const int64_t>()[pair * mapping.stride(0) + side * mapping.stride(1)];
  };
  std::vector<std::pair<int64_t, int64_t>> destinations(pairs);  // (block, pair)
  for (int64_t i = 0; i < pairs; ++i) {
    for (const int side : {0, 1}) {
      const int64_t limit = side == 0 ? num_sources : num_destinations;
      if (id(i, side) < 0 || id(i, side) >= limit) {
        fail_value(op, "block_mapping", text(i, ", ", side), text(id(i, side)),
                   text("a ", side == 0 ? "source" : "destination", " block in [0, ", limit, ")"));
      }
    }
    destinations[i] = {id(i, 1), i};
  }
  std::sort(destinations.begin(), destinations.end());
  for (int64_t i = 1; i < pairs; ++i) {
    if (destinations[i].first == destinations[i - 1].first) {
      fail_value(op, "block_mapping", text(destinations[i].second, ", 1"), text(destinations[i].first),
                 text("a destination of its own: pair ", destinations[i - 1].second, " has it too"));
    }
  }
  for (int64_t i = 0; one_side && i < pairs; ++i) {
    const auto found = std::lower_bound(destinations.begin(), destinations.end(), std::pair{id(i, 0), int64_t{0}});
    if (found != destinations.end() && found->first == id(i, 0)) {
      fail_value(op, "block_mapping", text(i, ", 0"), text(id(i, 0)),
                 text("a source that is no destination: pair ", found->second, " writes it"));
    }
  }
}

}  // namespace pagedkern::bindings
