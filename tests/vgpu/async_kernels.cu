// Copies and barriers as CUDA C++ offers them: what nvcc makes of them runs on the virtual GPU.
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cuda_pipeline.h>

#include <cuda/barrier>
#include <cuda/pipeline>
#include <cuda/ptx>

namespace cg = cooperative_groups;
namespace ptx = cuda::ptx;

using Barrier = cuda::barrier<cuda::thread_scope_block>;

// y[i] = 2 x[i], tiles of 256 floats through two stages filled by cp.async.
extern "C" __global__ void primitives_pipeline(const float* x, float* y, int tiles) {
  __shared__ alignas(16) float stage[2][256];
  const int t = threadIdx.x;
  auto fetch = [&](int tile) {
    if (tile < tiles && t < 64) __pipeline_memcpy_async(&stage[tile % 2][4 * t], x + 256 * tile + 4 * t, 16);
    __pipeline_commit();
  };
  fetch(0);
  for (int tile = 0; tile < tiles; ++tile) {
    fetch(tile + 1);
    __pipeline_wait_prior(1);
    __syncthreads();
    y[256 * tile + t] = 2.0f * stage[tile % 2][t];
    __syncthreads();
  }
}

// The same with cuda::pipeline shared by the block.
extern "C" __global__ void block_pipeline(const float* x, float* y, int tiles) {
  constexpr int kStages = 3;
  __shared__ alignas(16) float stage[kStages][256];
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, kStages> state;
  auto block = cg::this_thread_block();
  auto pipeline = cuda::make_pipeline(block, &state);
  int fetched = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    for (; fetched < tiles && fetched < tile + kStages; ++fetched) {
      pipeline.producer_acquire();
      cuda::memcpy_async(block, stage[fetched % kStages], x + 256 * fetched, cuda::aligned_size_t<16>(1024), pipeline);
      pipeline.producer_commit();
    }
    pipeline.consumer_wait();
    y[256 * tile + threadIdx.x] = 2.0f * stage[tile % kStages][threadIdx.x];
    pipeline.consumer_release();
  }
}

// Bulk copies in, cuda::barrier between; bulk copies out.
extern "C" __global__ void bulk_roundtrip(const float* x, float* y, int tiles) {
  __shared__ alignas(128) float tile[256];
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) {
    init(&barrier, blockDim.x);
    ptx::fence_proxy_async(ptx::space_shared);
  }
  __syncthreads();
  for (int k = blockIdx.x; k < tiles; k += gridDim.x) {
    Barrier::arrival_token token;
    if (threadIdx.x == 0) {
      cuda::memcpy_async(tile, x + 256 * k, cuda::aligned_size_t<16>(1024), barrier);
    }
    token = barrier.arrive();
    barrier.wait(std::move(token));
    tile[threadIdx.x] *= 2.0f;
    ptx::fence_proxy_async(ptx::space_shared);
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, y + 256 * k, tile, 1024);
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>());
    }
    __syncthreads();
  }
}

// A cluster sums over its blocks through distributed shared memory.
extern "C" __global__ void __cluster_dims__(4, 1, 1) cluster_sum(const int* x, int* total) {
  __shared__ int part;
  auto cluster = cg::this_cluster();
  if (threadIdx.x == 0) part = 0;
  __syncthreads();
  atomicAdd(&part, x[blockIdx.x * blockDim.x + threadIdx.x]);
  cluster.sync();
  if (cluster.block_rank() == 0 && threadIdx.x < cluster.num_blocks()) {
    atomicAdd(total, *cluster.map_shared_rank(&part, threadIdx.x));
  }
  cluster.sync();
}

struct alignas(64) TensorMap {
  char bytes[128];
};

// 2-D box through a tensor map, transposed on the way out.
extern "C" __global__ void tensor_transpose(const __grid_constant__ TensorMap map, float* out, int rows) {
  __shared__ alignas(128) float box[32][32];
  __shared__ alignas(8) uint64_t barrier;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&barrier, 1);
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    const int32_t at[2] = {int32_t(blockIdx.x * 32), int32_t(blockIdx.y * 32)};
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &barrier, sizeof box);
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, box, &map, at, &barrier);
  }
  __syncthreads();
  while (!ptx::mbarrier_try_wait_parity(&barrier, 0)) {
  }
  for (int k = threadIdx.x; k < 1024; k += blockDim.x) {
    const int column = blockIdx.x * 32 + k / 32, row = blockIdx.y * 32 + k % 32;
    out[column * rows + row] = box[k % 32][k / 32];
  }
}
