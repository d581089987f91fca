// What rule 8 of the op contract asks, as small steps: each throws one RuntimeError of the form
// "<op>: <argument> must ..., got ...", before any memory is touched.
#pragma once

#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "bindings/arg.h"
#include "bindings/backend.h"
#include "common/paged_cache.h"

namespace pagedkern::bindings {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// "<op>: <argument> must <rule>, got <got>"
[[noreturn]] void fail(const char* op, const std::string& argument, const std::string& rule, const std::string& got);

// One dimension of an expected shape: its name, and its size unless it is free.
struct Dim {
  const char* name;
  int64_t size = -1;
};

void check_shape(const char* op, const Arg& arg, std::initializer_list<Dim> expected);
// Those of dtypes also ask for an address that the dtype allows.
void check_kind(const char* op, const Arg& arg, Kinds allowed);
void check_same_kind(const char* op, const Arg& arg, const Arg& other);
void check_same_device(const char* op, const Arg& arg, const Arg& other);
void check_last_contiguous(const char* op, const Arg& arg);
void check_contiguous(const char* op, const Arg& arg);

// float32, 16 bits wide only on a backend without float32.
void check_compute_kind(const char* op, const Arg& arg, const Backend& backend);
void check_head_dim(const char* op, const Arg& arg, int64_t head_dim);
void check_head_ratio(const char* op, const Arg& query, int64_t num_heads, int64_t num_kv_heads);

// The written tensor must not overlap itself, nor any other argument.
void check_no_self_overlap(const char* op, const Arg& written);
void check_no_overlap(const char* op, const Arg& written, const Arg& other);
void check_written(const char* op, const Arg& written, std::initializer_list<const Arg*> others);

struct CachePair {
  PagedCache key_cache;
  PagedCache value_cache;
  PagedCacheShape shape;
};

// key_cache and value_cache against each other and the contract; devices are checked against `reference`.
CachePair check_caches(const char* op, const Arg& key_cache, const Arg& value_cache, const Arg& reference,
                       const Backend& backend);

// The dtype of q, k, v, out against the cache's: equal unless the cache is FP8.
void check_cache_kind(const char* op, const Arg& cache, const Arg& tensor);

// k_scale or v_scale as an input: none, per tensor, per head, or per token and head.
KvScale check_scale(const char* op, const std::optional<Arg>& scale, const Arg& cache, const PagedCacheShape& shape);

// `arg` as int32 elements for a params struct, with contiguity and device checked: seq_lens, cu_seqlens_q, cu_seqlens.
const int32_t* check_int32_vector(const char* op, const Arg& arg, Dim length, const Arg& reference);

// float32 [num_heads] or None: alibi_slopes, sinks.
const float* check_per_head(const char* op, const std::optional<Arg>& arg, int64_t num_heads, const Arg& reference);

}  // namespace pagedkern::bindings
