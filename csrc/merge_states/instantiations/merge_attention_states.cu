#include <algorithm>

#include "common/launch.h"
#include "common/vectors.cuh"
#include "merge_states/kernel.cuh"
#include "merge_states/launcher.h"

namespace pagedkern {
namespace {

template <class Out, class A, class B, int kCount>
Status launch_count(MergeStatesKernelParams p, void* stream) {
  p.lanes_of_row = 1;
  while (p.lanes_of_row < 32 && p.lanes_of_row * kCount < p.head_dim) p.lanes_of_row *= 2;
  // A warp has 32 rows at most, for a lane to read the lse of each, and few where there are few.
  p.rows_of_lane = std::min(kMergeRows, p.lanes_of_row);
  const int64_t rows_at_once = MergeStatesConfig::kThreads / p.lanes_of_row;
  while (p.rows_of_lane > 1 && p.num_rows < rows_at_once * p.rows_of_lane * MergeStatesConfig::kMaxBlocks) {
    p.rows_of_lane /= 2;
  }
  const int64_t rows_of_block = rows_at_once * p.rows_of_lane;
  const int64_t blocks = (p.num_rows + rows_of_block - 1) / rows_of_block;
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(std::min<int64_t>(blocks, MergeStatesConfig::kMaxBlocks)));
  config.block = dim3(MergeStatesConfig::kThreads);
  return launch(merge_attention_states_kernel<Out, A, B, kCount>, config, p, static_cast<cudaStream_t>(stream));
}

// 8 elements of every tensor are one or two aligned 16-byte accesses.
template <class Out, class A, class B>
Status launch_types(const MergeStatesKernelParams& p, void* stream) {
  AccessWidth width;
  width.pointer(p.out).bytes(sizeof(Out) * p.out_stride_token).bytes(sizeof(Out) * p.out_stride_head);
  width.pointer(p.out_a).bytes(sizeof(A) * p.a_stride_token).bytes(sizeof(A) * p.a_stride_head);
  width.pointer(p.out_b).bytes(sizeof(B) * p.b_stride_token).bytes(sizeof(B) * p.b_stride_head);
  return width.width() == 16 ? launch_count<Out, A, B, 8>(p, stream) : launch_count<Out, A, B, 1>(p, stream);
}

template <class Out, class A>
Status launch_b(const MergeStatesKernelParams& p, void* stream) {
  return p.b_dtype == DType::kFloat32 ? launch_types<Out, A, float>(p, stream) : launch_types<Out, A, Out>(p, stream);
}

template <class Out>
Status launch_a(const MergeStatesKernelParams& p, void* stream) {
  return p.a_dtype == DType::kFloat32 ? launch_b<Out, float>(p, stream) : launch_b<Out, Out>(p, stream);
}

}  // namespace

Status launch_merge_attention_states(const MergeStatesParams& params, void* stream) {
  if (params.num_tokens == 0 || params.num_heads == 0) return {};
  MergeStatesKernelParams p = {};
  static_cast<MergeStatesParams&>(p) = params;
  p.num_rows = p.num_tokens * p.num_heads;
  p.heads = FastDivide(static_cast<uint32_t>(p.num_heads));
  return p.out_dtype == DType::kBFloat16 ? launch_a<__nv_bfloat16>(p, stream) : launch_a<__half>(p, stream);
}

}  // namespace pagedkern
