#include "vgpu/block.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

namespace pagedkern::vgpu {
namespace {

constexpr u32 kSharedRedZone = 64;
constexpr u32 kStalledRounds = 4096;

u64 mix(u64 x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Of a cluster's index in the grid, or of a block's rank in a cluster.
Dim3 position(u64 index, const Dim3& extent) {
  return {u32(index % extent.x), u32(index / extent.x % extent.y), u32(index / extent.x / extent.y)};
}

Dim3 first_block(u64 cluster_index, const LaunchConfig& c) {
  const Dim3 at = position(cluster_index, {c.grid.x / c.cluster.x, c.grid.y / c.cluster.y, c.grid.z / c.cluster.z});
  return {at.x * c.cluster.x, at.y * c.cluster.y, at.z * c.cluster.z};
}

}  // namespace

u32 Block::thread_count() const {
  return u32(cluster.launch().config.block.count());
}

void Block::start(const Dim3& id, WorkerContext& worker) {
  const LaunchContext& launch = cluster.launch();
  ctaid = id;
  shared_bytes = launch.shared_bytes;
  shared.assign(shared_bytes + kSharedRedZone, kPoison);
  shadow.reset(shared_bytes, cluster.actors(), launch.options.check_races || launch.options.check_async);
  guarded_writes.assign((shared_bytes + 15) / 16, 0);
  guarded_reads.assign((shared_bytes + 15) / 16, 0);
  for (Barrier& b : barriers) b = Barrier();
  strong = {};
  remote_ = {};
  leaving_ = {};
  u32 threads = thread_count(), count = (threads + kLanes - 1) / kLanes;
  while (warps.size() < count) warps.push_back(std::make_unique<Warp>());
  live_warps = count;
  for (u32 k = 0; k < count; ++k) {
    Warp& w = *warps[k];
    w.launch = &launch;
    w.worker = &worker;
    w.actor = rank * count + k;
    w.start(*this, k, threads);
  }
}

void Block::arrive(Warp& warp, u32 mask, u32 id, u32 expected, bool wait, std::function<void(const Barrier&)> result) {
  if (id >= barriers.size()) warp.fault("invalid", "barrier " + std::to_string(id) + " does not exist", mask);
  u32 all = u32(warps.size()) * kLanes;
  if (expected && (expected % kLanes || expected > all)) {
    warp.fault("invalid",
               "barrier thread count " + std::to_string(expected) + " is no multiple of 32 within the block's " +
                   std::to_string(thread_count()) + " threads",
               mask);
  }
  if (mask != warp.live) {
    warp.fault("divergent_barrier", "only some lanes of the warp reach the barrier", warp.live & ~mask);
  }
  if (const u32 gone = warp.born & ~warp.live; gone && cluster.launch().options.check_barriers) {
    warp.fault("divergent_barrier",
               std::to_string(std::popcount(gone)) + " lane(s) of the warp have exited and never reach the barrier",
               mask);
  }
  Barrier& b = barriers[id];
  u32 want = expected ? expected : all;
  if (b.expected && b.expected != want) {
    warp.fault("divergent_barrier",
               "barrier " + std::to_string(id) + " is used with " + std::to_string(want) +
                   " threads while others wait for " + std::to_string(b.expected),
               mask);
  }
  b.expected = want;
  b.all_threads = expected == 0;
  b.arrived += kLanes;
  warp.release(b.knowledge);
  if (wait) {
    b.waiting.push_back(&warp);
    if (result) b.results.push_back(std::move(result));
    warp.block_on("barrier " + std::to_string(id));
  }
  if (b.arrived > b.expected) {
    warp.fault("divergent_barrier",
               "more threads arrive at barrier " + std::to_string(id) + " than its " + std::to_string(b.expected),
               mask);
  }
  u32 exited = b.all_threads ? (u32(warps.size()) - live_warps) * kLanes : 0;
  if (exited && cluster.launch().options.check_barriers) {
    warp.fault("divergent_barrier",
               "barrier " + std::to_string(id) + " of all threads is reached although " +
                   std::to_string(exited / kLanes) + " warp(s) of the block have exited",
               mask);
  }
  if (b.arrived + exited >= b.expected) complete(b, id);
}

void Block::complete(Barrier& b, u32) {
  for (auto& result : b.results) result(b);
  for (Warp* w : b.waiting) {
    w->acquire(b.knowledge);
    w->wake();
  }
  if (!warps.empty()) ++warps[0]->worker->counters.barriers;
  u64 generation = b.generation + 1;
  b = Barrier();
  b.generation = generation;
  cluster.touch();
}

void Block::note_remote(const Warp& warp) {
  if (!warp.tracks_races()) return;
  if (remote_.at.empty()) remote_.at.assign(cluster.actors(), 0);
  remote_.at[warp.actor] = warp.knowledge.seen.at[warp.actor];
}

void Block::check_exit(Warp& last) const {
  for (u32 k = 0; k < remote_.at.size(); ++k) {
    if (remote_.at[k] > leaving_.at[k]) {
      last.fault("race",
                 "the block exits while " + cluster.actor_name(k) +
                     " may still use its shared memory: no cluster barrier orders them",
                 1);
    }
  }
}

void Block::warp_done(Warp& warp) {
  --live_warps;
  if (cluster.size() > 1 && warp.tracks_races() && cluster.launch().options.check_races) {
    if (leaving_.at.empty()) leaving_.at.assign(cluster.actors(), 0);
    leaving_.join(warp.knowledge.seen);
    if (live_warps == 0) check_exit(warp);
  }
  cluster.touch();
  for (u32 id = 0; id < barriers.size(); ++id) {
    Barrier& b = barriers[id];
    if (!b.expected || !b.all_threads) continue;
    if (cluster.launch().options.check_barriers) {
      warp.fault(
          "divergent_barrier",
          "the warp exits while " + std::to_string(b.waiting.size()) + " warp(s) wait at barrier " + std::to_string(id),
          1);
    }
    if (b.arrived + (u32(warps.size()) - live_warps) * kLanes >= b.expected) complete(b, id);
  }
  if (live_warps == 0) cluster.async.block_exit(*this);
}

Cluster::Cluster(const LaunchContext& launch, WorkerContext& worker) : async(*this), launch_(launch), worker_(worker) {
  u32 blocks = u32(launch.config.cluster.count());
  u32 warps = (u32(launch.config.block.count()) + kLanes - 1) / kLanes;
  actors_ = blocks * warps;
  for (u32 k = 0; k < blocks; ++k) blocks_.push_back(std::make_unique<Block>(*this, k));
}

void Cluster::start(u64 cluster_index) {
  const LaunchConfig& c = launch_.config;
  const Dim3 first = first_block(cluster_index, c);
  cluster_id = {first.x / c.cluster.x, first.y / c.cluster.y, first.z / c.cluster.z};
  index = u32(cluster_index);
  rng_ = mix(launch_.options.seed * 0x100000001b3ull + cluster_index);
  stalled_rounds_ = 0;
  barrier_.arrived = 0;
  barrier_.generation = 0;
  barrier_.knowledge = {};
  barrier_.released = {};
  barrier_.waiting.clear();
  barrier_.warp_generation.assign(actors_, 0);
  async.reset(launch_.options.async_completion, launch_.options.check_async, random());
  order_.clear();
  for (u32 k = 0; k < blocks_.size(); ++k) {
    const Dim3 in = position(k, c.cluster);
    blocks_[k]->start({first.x + in.x, first.y + in.y, first.z + in.z}, worker_);
    for (auto& w : blocks_[k]->warps) order_.push_back(w.get());
  }
}

u64 Cluster::random() {
  rng_ ^= rng_ << 13;
  rng_ ^= rng_ >> 7;
  rng_ ^= rng_ << 17;
  return rng_;
}

// Seed 0 runs warps in order with long turns; other seeds mix long and very short turns.
u64 Cluster::quantum() {
  if (launch_.options.seed == 0) return 1024;
  return 1ull << (random() >> 60);
}

bool Cluster::run(u64 budget) {
  u64 used = 0;
  while (used < budget) {
    if (launch_.options.seed != 0) {
      for (size_t k = order_.size(); k > 1; --k) std::swap(order_[k - 1], order_[random() % k]);
    }
    bool moved = false, alive = false;
    u64 before = progress_;
    for (Warp* w : order_) {
      if (w->state == WarpState::kDone) continue;
      alive = true;
      if (w->state == WarpState::kBlocked) continue;
      u64 turn = quantum();
      if (launch_.options.max_warp_instructions) {
        if (worker_.budget == 0) {
          w->fault_at(w->pc, "budget",
                      "the launch ran more than " + std::to_string(launch_.options.max_warp_instructions) +
                          " warp instructions",
                      0);
        }
        turn = std::min(turn, worker_.budget);
      }
      u64 done = w->run(turn);
      if (launch_.options.max_warp_instructions) worker_.budget -= done;
      used += done;
      moved |= w->state == WarpState::kReady || w->state == WarpState::kDone;
    }
    if (!alive) {
      async.finish();
      return true;
    }
    async.tick();
    if (moved || progress_ != before) {
      stalled_rounds_ = 0;
      continue;
    }
    if (async.advance()) continue;
    bool polling = false;
    for (Warp* w : order_) polling |= w->state == WarpState::kPolling;
    if (!polling || ++stalled_rounds_ > kStalledRounds) deadlock();
  }
  return false;
}

void Cluster::deadlock() {
  std::string text = "no warp can move:";
  Warp* first = nullptr;
  u32 listed = 0;
  for (auto& b : blocks_) {
    for (auto& w : b->warps) {
      if (w->state == WarpState::kDone) continue;
      if (!first) first = w.get();
      if (++listed <= 32) text += "\n    " + w->describe();
    }
  }
  u32 at = first->pc ? first->pc - 1 : 0;
  first->fault_at(at, "deadlock", text, u32(std::countr_zero(first->live)));
}

std::string Cluster::actor_name(u32 actor) const {
  if (actor == proxy_actor()) return "an asynchronous operation";
  if (actor > proxy_actor()) return "wgmma of warpgroup " + std::to_string((actor - proxy_actor() - 1) % warpgroups());
  u32 per_block = u32(blocks_[0]->warps.size());
  std::string text = "warp " + std::to_string(actor % per_block);
  if (blocks_.size() > 1) text += " of the cluster's block " + std::to_string(actor / per_block);
  return text;
}

std::string Cluster::foreign_name(u32 cluster, u32 actor) const {
  const u32 per_block = u32(blocks_[0]->warps.size());
  const Dim3 first = first_block(cluster, launch_.config), in = position(actor / per_block, launch_.config.cluster);
  return "warp " + std::to_string(actor % per_block) + " of block (" + std::to_string(first.x + in.x) + "," +
         std::to_string(first.y + in.y) + "," + std::to_string(first.z + in.z) + ")";
}

void Cluster::arrive(Warp& warp, u32 mask) {
  if (mask != warp.live)
    warp.fault("divergent_barrier", "only some lanes of the warp reach the cluster barrier", warp.live & ~mask);
  u64& mine = barrier_.warp_generation[warp.actor];
  if (mine == barrier_.generation + 1)
    warp.fault("divergent_barrier", "the warp arrives twice at the cluster barrier without waiting", mask);
  mine = barrier_.generation + 1;
  warp.release(barrier_.knowledge);
  if (++barrier_.arrived < actors_) return;
  barrier_.arrived = 0;
  ++barrier_.generation;
  barrier_.released = barrier_.knowledge;
  barrier_.knowledge = {};
  for (Warp* w : barrier_.waiting) {
    w->acquire(barrier_.released);
    w->wake();
  }
  barrier_.waiting.clear();
  ++worker_.counters.barriers;
  touch();
}

bool Cluster::wait(Warp& warp, u32 mask) {
  u64 mine = barrier_.warp_generation[warp.actor];
  if (mine == 0) warp.fault("divergent_barrier", "barrier.cluster.wait without an arrive before it", mask);
  if (mine <= barrier_.generation) {
    warp.acquire(barrier_.released);
    return true;
  }
  barrier_.waiting.push_back(&warp);
  warp.block_on("the cluster barrier");
  return false;
}

}  // namespace pagedkern::vgpu
