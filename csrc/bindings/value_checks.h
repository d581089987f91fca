// What the index tensors and inputs hold. On the CPU everything that decides which memory is touched is checked on
// every call (a comparison a token or a page, lost beside the work), and the few scales with it; check mode adds the
// rest of rule 9. All of it reads host memory: a HostView's or the
// rows of a CacheRows.
#pragma once

#include <optional>

#include "bindings/arg.h"
#include "bindings/host_view.h"
#include "block_copy/params.h"
#include "cache_write/params.h"
#include "common/attention_params.h"
#include "gather/params.h"
#include "merge_states/params.h"

namespace pagedkern::bindings {

// "<op>: <argument>[<index>] is <value>, expected <bound>"
[[noreturn]] void fail_value(const char* op, const std::string& argument, const std::string& index,
                             const std::string& value, const std::string& bound);

// Every slot below num_blocks * block_size.
void check_slots(const char* op, const CacheWriteParams& params);

// Every position of rows below num_slots in [0, max_position).
void check_positions(const char* op, const RopeParams& rope, int64_t num_slots);

// Scales per tensor and per head: finite and positive. (Those per token are looked at where their token is.)
void check_scales(const char* op, const KvScale& k_scale, const KvScale& v_scale, int64_t num_kv_heads);

// seq_lens, cu_seqlens_q and the live part of block_table.
void check_attention_indices(const char* op, const PagedAttentionParams& params);

// seq_lens, cu_seqlens and the live part of block_table.
void check_gather_indices(const char* op, const GatherCacheParams& params);

// Ids in range and destinations distinct. `num_sources` and `num_destinations` are the blocks on either side; where
// `one_side` both are the same blocks, and no destination may be a source.
void check_mapping(const char* op, const Arg& mapping, int64_t num_sources, int64_t num_destinations, bool one_side);

// Check mode: the scales per token that a write or a read uses are finite and positive, the inputs it reads hold no
// NaN.
void check_write_inputs(const char* op, const CacheWriteParams& params);
void check_rope_inputs(const char* op, const CacheWriteParams& params, const RopeParams& rope);
void check_attention_inputs(const char* op, const PagedAttentionParams& params, CacheRows& key_rows,
                            CacheRows& value_rows);
void check_gather_inputs(const char* op, const GatherCacheParams& params, CacheRows& key_rows, CacheRows& value_rows);
void check_merge_inputs(const char* op, const MergeStatesParams& params);

}  // namespace pagedkern::bindings
