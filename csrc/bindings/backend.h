// Where an op runs. The bindings check, fill the params and call through one of these tables; a table per set of
// kernels, picked by the device of the tensors. Another set of kernels is one more table in a file of its own.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "bindings/arg.h"
#include "block_copy/params.h"
#include "cache_write/params.h"
#include "common/attention_params.h"
#include "gather/params.h"
#include "merge_states/params.h"

namespace pagedkern::bindings {

// The device a call runs on.
struct Place {
  int32_t device_index;
};

struct Backend {
  const char* name;          // as in error messages: "CPU"
  bool float32;              // q, k, v and out may be float32
  bool host_values;          // index tensors are read and checked on every call: a wrong one would touch wild memory
  const char* absent;        // what to say where an entry below is null
  const char* (*kernels)();  // which of its kernels this machine runs, for the log
  // Copies from the memory of its tensors, after all earlier work; null: the host reads that memory as it is.
  void (*read)(void* to, const void* from, int64_t bytes, const Place&);

  void (*reshape_and_cache)(const CacheWriteParams&, const Place&);
  void (*reshape_and_cache_dynamic)(const CacheWriteParams&, const Place&);
  void (*rope_reshape_and_cache)(const CacheWriteParams&, const RopeParams&, const Place&);
  void (*paged_attention)(const PagedAttentionParams&, const Place&);
  void (*merge_attention_states)(const MergeStatesParams&, const Place&);
  void (*gather_cache)(const GatherCacheParams&, const Place&);
  void (*copy_blocks)(const CopyBlocksParams&, const Place&);
  void (*copy_rows)(const RowCopy* copies, int64_t count, const Place&);  // in order; swap_blocks
  int64_t (*paged_attention_workspace_size)(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads,
                                            int64_t head_dim, int64_t num_seqs, int64_t max_seqlen_q,
                                            int64_t max_seqlen_k, int64_t num_splits);
};

// The tables of this build, null where it has none; each is defined by the file that holds its table. A build for the
// virtual GPU (PAGEDKERN_VGPU) leaves backend_cpu.cpp out and gives CPU tensors the table of the CUDA launchers.
extern const Backend* const kCpuTensors;
extern const Backend* const kCudaTensors;

// The backend for tensors on this argument's device; raises where the build has none.
const Backend& backend_for(const char* op, const Arg& tensor);

// An entry of the table, or the error that says how to get it.
template <class Function>
Function entry(const char* op, const Backend& backend, Function function) {
  if (function == nullptr) throw std::runtime_error(std::string(op) + ": " + backend.absent);
  return function;
}

inline Place place_of(const Arg& tensor) {
  return {tensor.device_index};
}

}  // namespace pagedkern::bindings
