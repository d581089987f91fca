// The launchers of the CUDA kernels as a backend: for CUDA tensors, and for CPU tensors in the build for the virtual
// GPU.
#include "bindings/backend.h"

#if defined(PAGEDKERN_WITH_CUDA) || defined(PAGEDKERN_VGPU)

#include <cuda_runtime_api.h>

#include "bindings/device_workspace.h"
#include "block_copy/launcher.h"
#include "cache_write/launcher.h"
#include "common/status.h"
#include "gather/launcher.h"
#include "merge_states/launcher.h"
#include "paged_attention/launcher.h"

#ifndef PAGEDKERN_VGPU
#include <torch/csrc/stable/accelerator.h>

#include "bindings/cuda_stream.h"
#endif

namespace pagedkern::bindings {
namespace {

// The device of a call is the current one for as long as this lives; its current stream takes the work.
class Turn {
 public:
#ifdef PAGEDKERN_VGPU
  explicit Turn(const Place&) {}
  void* stream() const { return nullptr; }
#else
  explicit Turn(const Place& place) : guard_(place.device_index), stream_(current_cuda_stream(place.device_index)) {}
  void* stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_;
#endif
};

void require(const char* op, const Status& status) {
  if (!status.ok()) throw std::runtime_error(std::string(op) + ": " + status.message);
}

void reshape_and_cache(const CacheWriteParams& params, const Place& place) {
  const Turn turn(place);
  require("reshape_and_cache", launch_reshape_and_cache(params, turn.stream()));
}

void paged_attention(const PagedAttentionParams& params, const Place& place) {
  static DeviceWorkspaces workspaces;
  const Turn turn(place);
  PagedAttentionParams with_workspace = params;
  const int64_t need = paged_attention_workspace_bytes(params.num_tokens, params.num_heads, params.cache.num_kv_heads,
                                                       params.cache.head_dim, params.num_seqs, params.max_seqlen_q,
                                                       params.max_seqlen_k, params.num_splits);
  if (params.workspace == nullptr && need > 0) {
    const DeviceWorkspaces::Memory memory = workspaces.at_least(need, place.device_index, turn.stream());
    if (memory.data == nullptr) {
      throw std::runtime_error("paged_attention: no memory for a workspace of " + std::to_string(need) + " bytes");
    }
    with_workspace.workspace = memory.data;
    with_workspace.workspace_bytes = memory.bytes;
  }
  require("paged_attention", launch_paged_attention(with_workspace, turn.stream()));
}

void reshape_and_cache_dynamic(const CacheWriteParams& params, const Place& place) {
  const Turn turn(place);
  require("reshape_and_cache_dynamic", launch_reshape_and_cache_dynamic(params, turn.stream()));
}

void rope_reshape_and_cache(const CacheWriteParams& params, const RopeParams& rope, const Place& place) {
  const Turn turn(place);
  require("rope_reshape_and_cache", launch_rope_reshape_and_cache(params, rope, turn.stream()));
}

void merge_attention_states(const MergeStatesParams& params, const Place& place) {
  const Turn turn(place);
  require("merge_attention_states", launch_merge_attention_states(params, turn.stream()));
}

void gather_cache(const GatherCacheParams& params, const Place& place) {
  const Turn turn(place);
  require("gather_cache", launch_gather_cache(params, turn.stream()));
}

void copy_blocks(const CopyBlocksParams& params, const Place& place) {
  const Turn turn(place);
  require("copy_blocks", launch_copy_blocks(params, turn.stream()));
}

void copy_rows(const RowCopy* copies, int64_t count, const Place& place) {
  const Turn turn(place);
  require("swap_blocks", launch_copy_rows(copies, count, turn.stream()));
}

void require(const char* op, cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(op) + ": " + cudaGetErrorString(error));
}

void read(void* to, const void* from, int64_t bytes, const Place& place) {
  const Turn turn(place);
  const auto stream = static_cast<cudaStream_t>(turn.stream());
  require("check mode", cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream));
  require("check mode", cudaStreamSynchronize(stream));
}

const Backend kCudaBackend = {
#ifdef PAGEDKERN_VGPU
    .name = "virtual GPU",
#else
    .name = "CUDA",
#endif
    .float32 = false,
    .host_values = false,
    .absent = "there is no CUDA kernel for it yet; the CPU has one",
    .kernels = [] { return "sm_90a"; },
    .read = read,
    .reshape_and_cache = reshape_and_cache,
    .reshape_and_cache_dynamic = reshape_and_cache_dynamic,
    .rope_reshape_and_cache = rope_reshape_and_cache,
    .paged_attention = paged_attention,
    .merge_attention_states = merge_attention_states,
    .gather_cache = gather_cache,
    .copy_blocks = copy_blocks,
    .copy_rows = copy_rows,
    .paged_attention_workspace_size = paged_attention_workspace_bytes,
};

}  // namespace

#ifdef PAGEDKERN_VGPU
const Backend* const kCpuTensors = &kCudaBackend;
const Backend* const kCudaTensors = nullptr;
#else
const Backend* const kCudaTensors = &kCudaBackend;
#endif

}  // namespace pagedkern::bindings

#else

namespace pagedkern::bindings {

const Backend* const kCudaTensors = nullptr;

}  // namespace pagedkern::bindings

#endif
