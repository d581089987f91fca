// A team: the blocks of one cluster (or one block alone) as one set of threads that share work.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace pagedkern {

struct Team {
  cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  int num_blocks = static_cast<int>(cluster.num_blocks());
  int block = static_cast<int>(cluster.block_rank());

  __device__ __forceinline__ int thread() const {
    return block * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  }
  __device__ __forceinline__ int num_threads() const { return num_blocks * static_cast<int>(blockDim.x); }
  __device__ __forceinline__ int64_t index() const { return blockIdx.x / num_blocks; }
  __device__ __forceinline__ int64_t num_teams() const { return gridDim.x / num_blocks; }
  __device__ __forceinline__ void sync() const { cluster.sync(); }
  // The same shared variable of another block of the team.
  template <class T>
  __device__ __forceinline__ T* of_block(T* shared, int other) const {
    return cluster.map_shared_rank(shared, other);
  }
};

}  // namespace pagedkern
