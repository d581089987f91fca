#include "vgpu/global_order.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <new>

#include "vgpu/block.h"
#include "vgpu/warp.h"

namespace pagedkern::vgpu {

// calloc: pages that stay untouched cost nothing, so that the stamps of a large cache are as small as what is written.
void Stamps::make() {
  auto* fresh = static_cast<std::atomic<Stamp>*>(std::calloc(words_, sizeof(std::atomic<Stamp>)));
  if (fresh == nullptr) throw std::bad_alloc();
  std::atomic<Stamp>* none = nullptr;
  if (!cells_.compare_exchange_strong(none, fresh)) std::free(fresh);
}

void Stamps::clear() {
  std::free(cells_.exchange(nullptr));
}

void GlobalOrder::publish(u64 address, const ForeignClocks& clocks) {
  std::lock_guard lock(mutex_);
  released_[address].join(clocks);
  empty_ = false;
}

void GlobalOrder::collect(u64 address, ForeignClocks& into) {
  if (empty_) return;
  std::lock_guard lock(mutex_);
  if (auto found = released_.find(address); found != released_.end()) into.join(found->second);
}

void Warp::fence_gpu(u32 ordering) {
  if (!tracks_races() || !launch->options.check_global_races) return;
  if (ordering & kAcquire) knowledge.foreign.join(pending_);
  if (!(ordering & kRelease)) return;
  fenced_ = knowledge.foreign;
  fenced_.join(block->cluster.index, knowledge.seen);
  ++knowledge.seen.at[actor];
}

void Warp::before_strong_write(const u64* addresses, u32 mask, u32 ordering) {
  if (!tracks_races() || !launch->options.check_global_races || ordering & kNarrow) return;
  if (ordering & kRelease) fence_gpu(kRelease);
  if (fenced_.by_cluster.empty()) return;
  for (u32 m = mask; m; m &= m - 1) {
    const u64 address = addresses[std::countr_zero(m)];
    if (address >> kWindowShift == 0) launch->order->publish(address, fenced_);
  }
}

void Warp::after_strong_read(const u64* addresses, u32 mask, u32 ordering) {
  if (!tracks_races() || !launch->options.check_global_races || ordering & kNarrow) return;
  for (u32 m = mask; m; m &= m - 1) {
    const u64 address = addresses[std::countr_zero(m)];
    if (address >> kWindowShift == 0) launch->order->collect(address, pending_);
  }
  if (ordering & kAcquire) knowledge.foreign.join(pending_);
}

void Warp::check_non_coherent(const u64* addresses, u32 mask, u32 bytes) const {
  if (!launch->options.check_global_races) return;
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    const u64 address = addresses[lane];
    const Allocation* a = address >> kWindowShift == 0 ? launch->memory->find(address) : nullptr;
    if (!a || !a->stamps || !a->stamps->any()) continue;
    for (u64 word = address & ~u64(3); word < address + bytes; word += 4) {
      if (!a->stamps->at(word).load(std::memory_order_relaxed)) continue;
      fault("race",
            "non-coherent read (ld.global.nc) at '" + a->name + "' + " + std::to_string(address - a->base) +
                " of memory that this launch writes",
            1u << lane);
    }
  }
}

bool Warp::ordered_after(Stamp stamp) const {
  const Epoch epoch = stamp_epoch(stamp);
  if (stamp_cluster(stamp) != block->cluster.index) return knowledge.foreign.knows(stamp_cluster(stamp), epoch);
  return epoch_actor(epoch) == actor || knowledge.seen.at[epoch_actor(epoch)] >= epoch_clock(epoch);
}

// As check_global_order for a stretch of whole words. False: lane by lane, as something may be wrong.
bool Warp::global_order_of_stretch(Allocation& a, u64 address, u32 bytes, Access access) const {
  if ((address | bytes) & 3 || block->cluster.index > kMaxStampCluster) return false;
  if (!a.stamps->any()) {
    if (!writes(access)) return true;
    a.stamps->make();
  }
  std::atomic<Stamp>* cells = &a.stamps->at(address);
  const Stamp mine = make_stamp(block->cluster.index, 15, make_epoch(actor, knowledge.seen.at[actor]));
  Stamp known = 0;  // neighbours mostly have one writer
  for (u32 k = 0; k < bytes / 4; ++k) {
    const Stamp old = cells[k].load(std::memory_order_relaxed);
    if (old != known) {
      if (old && !ordered_after(old)) return false;
      known = old;
    }
    if (writes(access) && old != mine) cells[k].store(mine, std::memory_order_relaxed);
  }
  return true;
}

// The stamps keep the last writer of a word. Bytes of it that another warp wrote before are no longer checked.
void Warp::check_global_order(Allocation& a, u64 address, u32 bytes, u32 lane, Access access) {
  const Cluster& cluster = block->cluster;
  if (cluster.index > kMaxStampCluster) return;
  if (!a.stamps->any()) {
    if (!writes(access)) return;
    a.stamps->make();
  }
  const Epoch now = make_epoch(actor, knowledge.seen.at[actor]);
  for (u64 word = address & ~u64(3); word < address + bytes; word += 4) {
    const u64 from = std::max(address, word), to = std::min(address + bytes, word + 4);
    const u32 touched = ((1u << (to - from)) - 1) << (from - word);
    std::atomic<Stamp>& cell = a.stamps->at(word);
    const Stamp old = cell.load(std::memory_order_relaxed);
    if (old && stamp_bytes(old) & touched && !ordered_after(old)) {
      const bool inside = stamp_cluster(old) == cluster.index;
      const u32 other = epoch_actor(stamp_epoch(old));
      const std::string text = std::string(writes(access) ? "write" : "read") + " at '" + a.name + "' + " +
                               std::to_string(from - a.base) + " in global memory races with a write by " +
                               (inside ? cluster.actor_name(other) + ": no barrier orders them"
                                       : cluster.foreign_name(stamp_cluster(old), other) +
                                             ": no fence at GPU scope with a strong access on both sides orders them");
      if (!writes(access) || !same_value) fault("race", text, 1u << lane);
      same_value->lanes |= 1u << lane;
      same_value->conflict = text;
    }
    if (!writes(access)) continue;
    const bool again = old && stamp_cluster(old) == cluster.index && stamp_epoch(old) == now;
    const Stamp mine = make_stamp(cluster.index, touched | (again ? stamp_bytes(old) : 0), now);
    if (mine != old) cell.store(mine, std::memory_order_relaxed);
  }
}

}  // namespace pagedkern::vgpu
