// Shared-memory shadow state: which bytes were written, and which warp touched each word last, for races.
//
// Happens-before is kept with one vector clock per warp of the cluster ("actor"), advanced when the warp releases
// (barrier arrival, mbarrier arrival, atomics). A second clock per warp says whose writes are also visible to the
// asynchronous proxy: fence.proxy.async copies the first into the second, and both travel through barriers.
#pragma once

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "vgpu/types.h"

namespace pagedkern::vgpu {

constexpr u32 kClockBits = 22;
constexpr u32 kMaxClock = (1u << kClockBits) - 1;
constexpr u32 kMaxActors = 511;

struct VectorClock {
  std::vector<u32> at;
  void join(const VectorClock& other) {
    for (size_t k = 0; k < at.size(); ++k) at[k] = at[k] > other.at[k] ? at[k] : other.at[k];
  }
};

using Epoch = u32;  // actor << kClockBits | clock; 0: never
inline Epoch make_epoch(u32 actor, u32 clock) {
  return (actor << kClockBits) | (clock > kMaxClock ? kMaxClock : clock);
}
inline u32 epoch_actor(Epoch e) {
  return e >> kClockBits;
}
inline u32 epoch_clock(Epoch e) {
  return e & kMaxClock;
}

// Clocks of clusters by their index in the grid, of those there is something to say about.
struct ForeignClocks {
  std::vector<std::pair<u32, VectorClock>> by_cluster;  // ascending

  void join(u32 cluster, const VectorClock& clock) {
    auto at = std::lower_bound(by_cluster.begin(), by_cluster.end(), cluster,
                               [](const auto& entry, u32 wanted) { return entry.first < wanted; });
    if (at == by_cluster.end() || at->first != cluster)
      by_cluster.insert(at, {cluster, clock});
    else
      at->second.join(clock);
  }
  void join(const ForeignClocks& other) {
    for (const auto& [cluster, clock] : other.by_cluster) join(cluster, clock);
  }
  bool knows(u32 cluster, Epoch epoch) const {
    auto at = std::lower_bound(by_cluster.begin(), by_cluster.end(), cluster,
                               [](const auto& entry, u32 wanted) { return entry.first < wanted; });
    return at != by_cluster.end() && at->first == cluster && at->second.at[epoch_actor(epoch)] >= epoch_clock(epoch);
  }
};

// What a warp knows, and what a barrier or mbarrier hands on.
struct Knowledge {
  VectorClock seen, seen_by_async_proxy;
  ForeignClocks foreign;  // writes to global memory by other clusters that it may read
  void reset(size_t actors) {
    seen.at.assign(actors, 0);
    seen_by_async_proxy.at.assign(actors, 0);
    foreign.by_cluster.clear();
  }
  void join(const Knowledge& other) {
    seen.join(other.seen);
    seen_by_async_proxy.join(other.seen_by_async_proxy);
    if (!other.foreign.by_cluster.empty()) foreign.join(other.foreign);
  }
};

struct RaceReport {
  bool found = false;
  Epoch other = 0;  // the earlier access
  bool other_writes = false;
  u32 offset = 0;
};

class SharedShadow {
 public:
  void reset(u32 bytes, u32 actors, bool races);

  bool written(u32 offset, u32 bytes) const;
  void mark_written(u32 offset, u32 bytes);
  void mark_unwritten(u32 offset, u32 bytes);

  bool races() const { return races_; }
  // One access by `actor` at its clock, which has seen `clock`; the first conflict found, if any.
  RaceReport access(u32 offset, u32 bytes, bool write, u32 actor, const VectorClock& clock);
  // The last write to each byte must be visible through the asynchronous proxy (`clock` is seen_by_async_proxy of the
  // issuer).
  RaceReport proxy_read(u32 offset, u32 bytes, const VectorClock& clock) const;

 private:
  struct Cell {
    Epoch write = 0, read = 0;
  };
  static constexpr Epoch kSplit = 0xffffffffu;        // Cell::write of a word with byte-wise cells at split_[read]
  static constexpr Epoch kManyReaders = 0x80000000u;  // Cell::read: clocks of all actors at readers_[read & ~flag]

  bool touch(Cell& cell, bool write, Epoch self, const VectorClock& clock, RaceReport& report);
  void add_reader(Cell& cell, Epoch self);
  void drop_readers(Cell& cell);

  u32 bytes_ = 0, actors_ = 0;
  bool races_ = false;
  std::vector<u64> written_;
  std::vector<Cell> cells_;
  std::vector<std::array<Cell, 4>> split_;
  std::vector<u32> readers_, free_readers_;
};

}  // namespace pagedkern::vgpu
