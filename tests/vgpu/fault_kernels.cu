// Kernels with one planted fault each, and their mended twins, for test_faults.py. `FAULT name` marks the line where
// the faulty kernel `name_bad` must be caught.
#include <cooperative_groups.h>

#define TWINS(name, parameters, ...)                  \
  template <bool kRight>                              \
  __device__ __forceinline__ void name parameters;    \
  extern "C" __global__ void name##_bad parameters {  \
    name<false>(__VA_ARGS__);                         \
  }                                                   \
  extern "C" __global__ void name##_good parameters { \
    name<true>(__VA_ARGS__);                          \
  }                                                   \
  template <bool kRight>                              \
  __device__ __forceinline__ void name parameters

// ---- addresses

TWINS(past_the_end, (const int* x, int* o, int n), x, o, n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (kRight && i >= n) return;
  o[i & 63] = x[i];  // FAULT past_the_end
}

TWINS(before_the_start, (const int* x, int* o, int n), x, o, n) {
  int i = threadIdx.x;
  int left = kRight ? max(i - 1, 0) : i - 1;
  o[i] = x[left];  // FAULT before_the_start
}

TWINS(write_past_the_end, (const int* x, int* o, int n), x, o, n) {
  int i = threadIdx.x;
  if (i < n + (kRight ? 0 : 1)) {
    o[i] = x[0];  // FAULT write_past_the_end
  }
}

TWINS(shared_past_the_end, (const int* x, int* o, int n), x, o, n) {
  __shared__ int s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  int k = kRight ? (threadIdx.x + 1) & 63 : threadIdx.x + 1;
  o[threadIdx.x] = s[k];  // FAULT shared_past_the_end
}

TWINS(dynamic_shared_past_the_end, (const int* x, int* o, int n), x, o, n) {
  extern __shared__ int room[];
  int k = threadIdx.x + (kRight ? 0 : n);
  room[k] = x[threadIdx.x];  // FAULT dynamic_shared_past_the_end
  o[threadIdx.x] = room[k];
}

TWINS(local_past_the_end, (const int* x, int* o, int n), x, o, n) {
  int a[16];
#pragma unroll 1
  for (int k = 0; k < 16; ++k) a[k] = x[k];
  int k = x[threadIdx.x] + (kRight ? 0 : n);
  o[threadIdx.x] = a[k];  // FAULT local_past_the_end
}

TWINS(misaligned_vector, (const int* x, int* o, int n), x, o, n) {
  int i = threadIdx.x & 7;
  const int4* p = reinterpret_cast<const int4*>(x + (kRight ? 4 * i : 4 * i + 2));
  int4 v = *p;  // FAULT misaligned_vector
  o[threadIdx.x] = v.x + v.w;
}

TWINS(misaligned_shared_vector, (const int* x, int* o, int n), x, o, n) {
  __shared__ __align__(16) int s[68];
  s[threadIdx.x] = x[threadIdx.x];
  if (threadIdx.x < 4) s[64 + threadIdx.x] = 0;
  __syncthreads();
  int k = kRight ? 2 * (threadIdx.x & 31) : (threadIdx.x & 31) + n / n;
  int2 v = *reinterpret_cast<int2*>(s + k);  // FAULT misaligned_shared_vector
  o[threadIdx.x] = v.x + v.y;
}

struct Node {
  const int* data;
};
TWINS(chased_pointer, (const Node* nodes, int* o, int n), nodes, o, n) {
  o[threadIdx.x] = nodes[kRight ? 0 : 1].data[threadIdx.x];  // FAULT chased_pointer
}

// ---- values nothing wrote

TWINS(unwritten_shared, (const int* x, int* o, int n), x, o, n) {
  __shared__ int s[64];
  if (kRight || threadIdx.x < 32) s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  o[threadIdx.x] = s[63 - threadIdx.x];  // FAULT unwritten_shared
}

TWINS(unwritten_local, (const int* x, int* o, int n), x, o, n) {
  int a[16];
#pragma unroll 1
  for (int k = 0; k < (kRight ? 16 : 15); ++k) a[k] = x[k];
  o[threadIdx.x] = a[x[threadIdx.x]];  // FAULT unwritten_local
}

TWINS(unwritten_global, (int* scratch, int* o, int n), scratch, o, n) {
  if (kRight || threadIdx.x != 5) scratch[threadIdx.x] = threadIdx.x;
  __syncthreads();
  o[threadIdx.x] = scratch[threadIdx.x ^ 1];  // FAULT unwritten_global
}

// ---- races

TWINS(race_read_after_write, (const int* x, int* o, int n), x, o, n) {
  __shared__ int s[64];
  s[threadIdx.x] = 0;
  __syncthreads();
  s[threadIdx.x] = x[threadIdx.x];  // FAULT race_read_after_write
  if (kRight) __syncthreads();
  o[threadIdx.x] = s[63 - threadIdx.x];  // FAULT race_read_after_write
}

// The second barrier of a loop, which keeps the next round's writes from this round's reads.
TWINS(race_write_after_read, (const int* x, int* o, int n), x, o, n) {
  __shared__ int s[64];
  int sum = 0;
  for (int k = 0; k < 3; ++k) {
    s[threadIdx.x] = x[threadIdx.x] + k;  // FAULT race_write_after_read
    __syncthreads();
    sum += s[63 - threadIdx.x];  // FAULT race_write_after_read
    if (kRight) __syncthreads();
  }
  o[threadIdx.x] = sum;
}

TWINS(race_write_write, (const int* x, int* o, int n), x, o, n) {
  __shared__ int s[32];
  if (!kRight || threadIdx.x < 32) {
    s[threadIdx.x & 31] = x[threadIdx.x];  // FAULT race_write_write
  }
  __syncthreads();
  o[threadIdx.x] = s[threadIdx.x & 31];
}

// One barrier for the wrong half of the warps.
TWINS(race_named_barrier, (const int* x, int* o, int n), x, o, n) {
  __shared__ int s[128];
  s[threadIdx.x] = 0;
  __syncthreads();
  s[threadIdx.x] = x[threadIdx.x & 63];  // FAULT race_named_barrier
  int half = kRight ? threadIdx.x / 32 % 2 : threadIdx.x / 64;
  asm volatile("bar.sync %0, 64;" ::"r"(half + 1) : "memory");
  o[threadIdx.x & 63] = s[(threadIdx.x + 64) & 127];  // FAULT race_named_barrier
}

TWINS(race_in_cluster, (const int* x, int* o, int n), x, o, n) {
  namespace cg = cooperative_groups;
  __shared__ int s[64];
  cg::cluster_group cluster = cg::this_cluster();
  s[threadIdx.x] = 0;
  cluster.sync();
  s[threadIdx.x] = x[threadIdx.x];  // FAULT race_in_cluster
  if (kRight) cluster.sync();
  int v = *cluster.map_shared_rank(s + threadIdx.x, cluster.block_rank() ^ 1);  // FAULT race_in_cluster
  cluster.sync();
  o[threadIdx.x] = v;
}

// Block 1 may leave before block 0 has read from it.
TWINS(cluster_memory_after_exit, (const int* x, int* o, int n), x, o, n) {  // FAULT cluster_memory_after_exit
  namespace cg = cooperative_groups;
  __shared__ int s[64];
  cg::cluster_group cluster = cg::this_cluster();
  s[threadIdx.x] = x[threadIdx.x];
  cluster.sync();
  if (cluster.block_rank() == 0) {
    for (volatile int k = 0; k < 300; k = k + 1) {
    }
    o[threadIdx.x] = *cluster.map_shared_rank(s + threadIdx.x, 1);  // FAULT cluster_memory_after_exit
  }
  if (kRight) cluster.sync();
}

// ---- barriers

TWINS(half_a_warp_at_a_barrier, (const int* x, int* o, int n), x, o, n) {
  if (kRight || threadIdx.x < 48) {
    asm volatile("bar.sync 0;" ::: "memory");  // FAULT half_a_warp_at_a_barrier
  }
  o[threadIdx.x] = x[threadIdx.x];
}

TWINS(warp_leaves, (const int* x, int* o, int n), x, o, n) {  // FAULT warp_leaves
  if (threadIdx.x >= 32) {
    o[threadIdx.x] = x[threadIdx.x];
    if (!kRight) return;
  }
  __syncthreads();  // FAULT warp_leaves
  if (threadIdx.x < 32) o[threadIdx.x] = x[threadIdx.x];
}

TWINS(barrier_counts_differ, (const int* x, int* o, int n), x, o, n) {
  int count = kRight || threadIdx.x < 32 ? 64 : 32;
  asm volatile("bar.sync 1, %0;" ::"r"(count) : "memory");  // FAULT barrier_counts_differ
  o[threadIdx.x] = x[threadIdx.x];
}

TWINS(lanes_miss_syncwarp, (const int* x, int* o, int n), x, o, n) {
  int v = x[threadIdx.x];
  if (threadIdx.x % 32 < 16) {
    asm volatile("bar.warp.sync %0;" ::"r"(kRight ? 0xffff : -1) : "memory");  // FAULT lanes_miss_syncwarp
  } else {
    unsigned all = __ballot_sync(kRight ? 0xffff0000 : -1, v != 0);  // FAULT lanes_miss_syncwarp
    if (all == 0) v = 0;
  }
  o[threadIdx.x] = v;
}

TWINS(crossed_barriers, (const int* x, int* o, int n), x, o, n) {
  int first = kRight || threadIdx.x < 32 ? 1 : 2;
  asm volatile("bar.sync %0, 64;" ::"r"(first) : "memory");  // FAULT crossed_barriers
  asm volatile("bar.sync %0, 64;" ::"r"(3 - first) : "memory");
  o[threadIdx.x] = x[threadIdx.x];
}

TWINS(cluster_barrier_without_partner, (const int* x, int* o, int n), x, o, n) {
  namespace cg = cooperative_groups;
  cg::cluster_group cluster = cg::this_cluster();
  if (kRight || cluster.block_rank() == 0) {
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // FAULT cluster_barrier_without_partner
  }
  o[threadIdx.x] = x[threadIdx.x];
}

TWINS(trap, (const int* x, int* o, int n), x, o, n) {
  if (!kRight && threadIdx.x == 40) {
    __trap();  // FAULT trap
  }
  o[threadIdx.x] = x[threadIdx.x];
}

// ---- global memory: one block reads or overwrites what another wrote

__device__ int g_partial[4][64];
__device__ unsigned int g_ticket;

// The last block to come sums what all have left. Thread 0 speaks for its block: the barriers before and after make the
// writes of the others its own.
__device__ __forceinline__ bool last_block(bool fence_before, bool fence_after) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    if (fence_before) __threadfence();
    last = atomicInc(&g_ticket, gridDim.x - 1) == gridDim.x - 1;
    if (fence_after) __threadfence();
  }
  __syncthreads();
  return last;
}

TWINS(partials_without_release, (const int* x, int* o, int n), x, o, n) {
  int i = threadIdx.x;
  g_partial[blockIdx.x][i] = x[i];
  if (!last_block(kRight, true)) return;
  int sum = 0;
  for (int k = 0; k < gridDim.x; ++k) sum += g_partial[k][i];  // FAULT partials_without_release
  o[i] = sum;
}

TWINS(partials_without_acquire, (const int* x, int* o, int n), x, o, n) {
  int i = threadIdx.x;
  g_partial[blockIdx.x][i] = x[i];
  if (!last_block(true, kRight)) return;
  int sum = 0;
  for (int k = 0; k < gridDim.x; ++k) sum += g_partial[k][i];  // FAULT partials_without_acquire
  o[i] = sum;
}

// The same with orderings on the accesses themselves; the faulty one releases to the block alone.
TWINS(release_of_a_narrow_scope, (const int* x, int* o, int n), x, o, n) {
  __shared__ unsigned int before;
  int i = threadIdx.x;
  g_partial[blockIdx.x][i] = x[i];
  __syncthreads();
  if (i == 0) {
    unsigned int last = gridDim.x - 1;
    if (kRight) {
      asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                   : "=r"(before)
                   : "l"(&g_ticket), "r"(last)
                   : "memory");
    } else {
      asm volatile("atom.acq_rel.cta.global.inc.u32 %0, [%1], %2;"
                   : "=r"(before)
                   : "l"(&g_ticket), "r"(last)
                   : "memory");
    }
  }
  __syncthreads();
  if (before != gridDim.x - 1) return;
  int sum = 0;
  for (int k = 0; k < gridDim.x; ++k) sum += g_partial[k][i];  // FAULT release_of_a_narrow_scope
  o[i] = sum;
}

TWINS(blocks_write_one_word, (const int* x, int* o, int n), x, o, n) {
  o[threadIdx.x] = x[threadIdx.x] + (kRight ? 0 : blockIdx.x);  // FAULT blocks_write_one_word
}

TWINS(warps_meet_in_global_memory, (const int* x, int* o, int n), x, o, n) {
  int i = threadIdx.x;
  g_partial[0][i] = x[i];
  if (kRight) __syncthreads();
  o[i] = g_partial[0][63 - i];  // FAULT warps_meet_in_global_memory
}

// Neighbouring bytes of a word may belong to two blocks.
TWINS(blocks_share_a_word, (const int* x, int* o, int n), x, o, n) {
  unsigned char* bytes = reinterpret_cast<unsigned char*>(o);
  const unsigned char* from = reinterpret_cast<const unsigned char*>(x);
  for (int k = 0; k < 2; ++k) {
    int at = 4 * threadIdx.x + 2 * blockIdx.x + k;
    if (!kRight && k == 0) at &= ~2;
    bytes[at] = from[at] + (kRight ? 0 : blockIdx.x);  // FAULT blocks_share_a_word
  }
}

TWINS(written_behind_the_read_only_cache, (const int* x, int* o, int n), x, o, n) {
  int i = threadIdx.x;
  o[i] = x[i] + 1;
  int mine = o[i];
  if (!kRight) {
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(mine) : "l"(o + i));  // FAULT written_behind_the_read_only_cache
  }
  o[i] = mine - 1;
}
