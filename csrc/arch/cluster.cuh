// A cluster of blocks: its barrier, and the shared memory of its other blocks.
#pragma once

#include <cstdint>

namespace pagedkern {

// For all threads of all blocks of the cluster: what each has written before, shared memory included, all see after.
static __device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where the block of this rank has what lies at `address` of this one's shared memory.
static __device__ __forceinline__ uint32_t address_in_block(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

static __device__ __forceinline__ uint4 load_from_cluster_16(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

static __device__ __forceinline__ float load_from_cluster_float(uint32_t address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

}  // namespace pagedkern
