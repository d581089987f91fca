// Blocks and clusters: shared memory, barriers, and the seeded scheduler that interleaves the warps of a cluster.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "vgpu/async.h"
#include "vgpu/shadow.h"
#include "vgpu/warp.h"

namespace pagedkern::vgpu {

struct Barrier {
  u32 expected = 0;  // threads; 0: nobody is here
  u32 arrived = 0;
  bool all_threads = false;  // expected was not given
  std::vector<Warp*> waiting;
  std::vector<std::function<void(const Barrier&)>> results;  // barrier.red: writes the result of each waiting warp
  Knowledge knowledge;
  u32 reduction_and = kFullMask, reduction_or = 0, reduction_count = 0;  // barrier.red
  u64 generation = 0;
};

class Block {
 public:
  Block(Cluster& cluster, u32 rank) : cluster(cluster), rank(rank) {}
  void start(const Dim3& ctaid, WorkerContext& worker);
  void warp_done(Warp& warp);
  bool done() const { return live_warps == 0; }

  // Barrier arrival of a whole warp. `expected` 0: all threads of the block. With `wait` the warp blocks until
  // completion. The reduction's contribution (barrier.red) must be in barriers[id] before.
  void arrive(Warp& warp, u32 mask, u32 id, u32 expected, bool wait,
              std::function<void(const Barrier&)> result = nullptr);
  u32 thread_count() const;
  // `warp`, of another block of the cluster, touches this block's shared memory now: the block may only exit once it
  // knows that.
  void note_remote(const Warp& warp);

  Cluster& cluster;
  u32 rank;  // in the cluster
  Dim3 ctaid;
  std::vector<std::unique_ptr<Warp>> warps;
  u32 live_warps = 0;
  std::vector<u8> shared;  // shared_bytes, then a red zone
  u32 shared_bytes = 0;
  SharedShadow shadow;
  // By 16 bytes of shared memory: how many unobserved asynchronous operations write or read them (AsyncEngine).
  std::vector<u16> guarded_writes, guarded_reads;
  std::vector<Barrier> barriers = std::vector<Barrier>(16);
  Knowledge strong;  // handed on by strong shared accesses (flags in shared memory)

 private:
  void complete(Barrier& barrier, u32 id);
  void check_exit(Warp& last) const;

  VectorClock remote_;   // by actor: its clock when it last touched this block's shared memory from another block
  VectorClock leaving_;  // what the warps that have exited knew
};

class Cluster {
 public:
  Cluster(const LaunchContext& launch, WorkerContext& worker);
  void start(u64 cluster_index);
  // Runs about `budget` warp instructions; true when all blocks are done. Throws KernelFault.
  bool run(u64 budget);

  // barrier.cluster
  void arrive(Warp& warp, u32 mask);
  bool wait(Warp& warp, u32 mask);  // false: blocked

  Block* block(u32 rank) const { return rank < blocks_.size() ? blocks_[rank].get() : nullptr; }
  u32 size() const { return u32(blocks_.size()); }
  // Entries of a vector clock: the warps, the async proxy, and the wgmmas of each warpgroup.
  u32 actors() const { return actors_ + 1 + size() * warpgroups(); }
  u32 proxy_actor() const { return actors_; }
  u32 wgmma_actor(u32 rank, u32 warp) const { return actors_ + 1 + rank * warpgroups() + warp / 4; }
  std::string actor_name(u32 actor) const;                 // "warp 3", "warp 1 of block 2 of the cluster"
  std::string foreign_name(u32 cluster, u32 actor) const;  // of another cluster: "warp 3 of block (0,2,0)"
  const LaunchContext& launch() const { return launch_; }
  u64 random();
  void touch() { ++progress_; }  // something other than a warp moved (an mbarrier phase, a completion)

  AsyncEngine async;
  Dim3 cluster_id;
  u32 index = 0;  // in the grid

 private:
  [[noreturn]] void deadlock();
  u32 warpgroups() const { return (actors_ / size() + 3) / 4; }
  u64 quantum();

  const LaunchContext& launch_;
  WorkerContext& worker_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Warp*> order_;
  u32 actors_ = 0;
  u64 rng_ = 0;
  u64 progress_ = 0;
  u32 stalled_rounds_ = 0;
  struct {
    u32 arrived = 0;  // threads
    u64 generation = 0;
    Knowledge knowledge, released;
    std::vector<u64> warp_generation;  // by actor: 1 + generation it arrived in
    std::vector<Warp*> waiting;
  } barrier_;
};

}  // namespace pagedkern::vgpu
