// The executor: one loop over decoded instructions, and the bookkeeping of diverged lanes.
//
// Lanes with different program counters form groups; the group with the lowest counter runs until it reaches the next
// one's, where they merge. Code is laid out so that callees lie before callers (KernelBuilder), which makes "lowest
// first" run called functions to their end. A group that has spun for long is put aside, so that a lock holder in the
// same warp moves on.
#include "vgpu/warp.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "vgpu/block.h"

namespace pagedkern::vgpu {
namespace {

constexpr u64 kRotateAfter = 4096;
constexpr u32 kHold = 512;

}  // namespace

void Warp::start(Block& owner, u32 warp_index, u32 thread_count) {
  block = &owner;
  index = warp_index;
  const Kernel& k = kernel();
  size_t words = k.register_bytes / 8 + 8;
  if (register_file_.size() < words) register_file_.resize(words);
  regs = reinterpret_cast<u8*>((reinterpret_cast<uintptr_t>(register_file_.data()) + 63) & ~uintptr_t(63));
  std::memset(regs + k.track_begin, 0, k.register_bytes - k.track_begin);
  consts = k.const_base();
  code = k.code.data();
  u32 first = warp_index * kLanes;
  u32 count = std::min<u32>(kLanes, thread_count - first);
  live = count == kLanes ? kFullMask : (1u << count) - 1;
  born = live;
  active = live;
  pc = k.entry_pc;
  state = WarpState::kReady;
  waiting_for.clear();
  groups_.clear();
  waiting_here_ = false;
  rendezvous_here_ = 0;
  hold_ = 0;
  diverged_since_ = 0;
  near_allocations_.fill(nullptr);
  same_value = nullptr;
  wgmma_issued = 0;
  for (auto& counts : async_groups) counts.fill(0);
  if (k.local_bytes) {
    local_.assign(size_t(k.local_bytes) * kLanes, 0xCD);
    local_written_.assign(local_.size(), 0);
  }
  for (auto [which, slot] : k.special_registers) {
    u32* values = lanes<u32>(i32(slot));
    for (u32 lane = 0; lane < kLanes; ++lane) values[lane] = special_value(which, lane);
  }
  const LaunchOptions& o = launch->options;
  if (o.check_races || o.check_global_races || o.check_async) {
    knowledge.reset(owner.cluster.actors());
    knowledge.seen.at[actor] = 1;
  } else {
    knowledge = {};
  }
  fenced_.by_cluster.clear();
  pending_.by_cluster.clear();
  set_limit();
}

u64 Warp::run(u64 quantum) {
  u64* executed = worker->executed.data();
  u64 left = quantum, threads = 0;
  state = WarpState::kReady;
  if (!groups_.empty()) {
    if (diverged_since_ > kRotateAfter && hold_ == 0) hold_ = kHold + 1;  // reschedule() sees it as a wish to rotate
    reschedule();
  }
  while (left) {
    const u32 at = pc;
    const Inst& inst = code[at];
    u32 mask = active;
    ++executed[at];
    --left;
    pc = at + 1;
    if (inst.special) {
      if (inst.special & kGuarded) {
        u32 guard = *reinterpret_cast<const u32*>(regs + inst.guard);
        mask &= inst.guard_negated ? ~guard : guard;
      }
      if (inst.special & kChecked) check_registers(inst, mask);
      if (mask) {
        inst.fn(*this, inst, mask);
        if ((inst.special & kTracking) && pc != at) track_registers(inst, mask);
      }
    } else {
      inst.fn(*this, inst, mask);
    }
    threads += mask == kFullMask ? 32u : u32(std::popcount(mask));
    if (pc >= limit) {
      if (state != WarpState::kReady) break;
      reschedule();
    }
  }
  u64 done = quantum - left;
  if (!groups_.empty()) diverged_since_ += done;
  worker->counters.thread_instructions += threads;
  worker->counters.warp_instructions += done;
  return done;
}

void Warp::set_limit() {
  limit = UINT32_MAX;
  if (hold_ && !groups_.empty()) limit = 0;
  for (const Group& g : groups_) {
    limit = g.waiting || g.pc <= pc ? 0 : std::min(limit, g.pc);
    if (limit == 0) return;
  }
}

void Warp::merge_here() {
  for (size_t k = 0; k < groups_.size();) {
    if (groups_[k].pc != pc) {
      ++k;
      continue;
    }
    active |= groups_[k].mask;
    waiting_here_ = false;
    groups_.erase(groups_.begin() + std::ptrdiff_t(k));
  }
}

void Warp::reschedule() {
  if (active) merge_here();
  if (groups_.empty() && active) {
    hold_ = 0;
    diverged_since_ = 0;
    if (waiting_here_) {
      waiting_here_ = false;
      fault_at(pc, "divergent_barrier", "the instruction waits for lanes that have exited or never come",
               u32(std::countr_zero(active)));
    }
    set_limit();
    return;
  }
  bool rotate = hold_ > kHold;
  if (active && !waiting_here_ && !rotate && hold_ > 0) {
    --hold_;
    limit = 0;
    return;
  }
  hold_ = 0;
  ++stamp_;
  if (active) groups_.push_back({pc, active, waiting_here_, rendezvous_here_, stamp_});
  waiting_here_ = false;
  rendezvous_here_ = 0;
  active = 0;
  for (;;) {
    Group* best = nullptr;
    for (Group& g : groups_) {
      if (g.waiting) continue;
      if (!best || (rotate ? g.stamp < best->stamp : g.pc < best->pc)) best = &g;
    }
    if (!best) {
      if (release_rendezvous()) continue;
      const Group& g = groups_.front();
      fault_at(g.pc, "divergent_barrier", "lanes of one warp wait at different warp-synchronous instructions",
               u32(std::countr_zero(g.mask)));
    }
    pc = best->pc;
    active = best->mask;
    groups_.erase(groups_.begin() + (best - groups_.data()));
    break;
  }
  if (rotate) {
    hold_ = kHold;
    diverged_since_ = 0;
  }
  merge_here();
  set_limit();
}

// Groups at bar.warp.sync whose wishes are all met go on together.
bool Warp::release_rendezvous() {
  bool any = false;
  for (Group& g : groups_) {
    if (!g.rendezvous) continue;
    u32 here = 0;
    for (const Group& other : groups_) {
      if (other.rendezvous == g.rendezvous && (other.mask & g.rendezvous)) here |= other.mask;
    }
    if ((g.rendezvous & live & ~here) == 0) {
      u32 wish = g.rendezvous;
      for (Group& other : groups_) {
        if (other.rendezvous != wish) continue;
        ++other.pc;
        other.waiting = false;
        other.rendezvous = 0;
      }
      any = true;
    }
  }
  return any;
}

void Warp::branch(u32 target, u32 mask) {
  if (mask == active) {
    pc = target;
    return;
  }
  groups_.push_back({pc, active & ~mask, false, 0, stamp_});
  active = mask;
  pc = target;
  limit = 0;
}

void Warp::scatter(const u32* targets, u32 mask) {
  u32 first = targets[std::countr_zero(mask)];
  u32 same = 0;
  for (u32 m = mask; m; m &= m - 1) {
    u32 lane = u32(std::countr_zero(m));
    if (targets[lane] == first) same |= 1u << lane;
  }
  u32 rest = active & ~mask;
  if (rest) groups_.push_back({pc, rest, false, 0, stamp_});
  for (u32 m = mask & ~same; m;) {
    u32 target = targets[std::countr_zero(m)], group = 0;
    for (u32 n = m; n; n &= n - 1) {
      u32 lane = u32(std::countr_zero(n));
      if (targets[lane] == target) group |= 1u << lane;
    }
    groups_.push_back({target, group, false, 0, stamp_});
    m &= ~group;
  }
  active = same;
  pc = first;
  if (!groups_.empty()) limit = 0;
}

void Warp::exit(u32 mask) {
  live &= ~mask;
  active &= ~mask;
  for (Group& g : groups_) {
    if (!g.rendezvous) g.waiting = false;  // it may wait for fewer lanes now
  }
  limit = 0;
  if (live == 0) {
    state = WarpState::kDone;
    block->warp_done(*this);
  }
}

bool Warp::converge(u32 mask, u32 required, bool rendezvous) {
  if ((required & live & ~mask) == 0) return true;
  if (mask != active) {  // lanes the guard left out go on by themselves
    groups_.push_back({pc, active & ~mask, false, 0, stamp_});
    active = mask;
  }
  --pc;
  waiting_here_ = true;
  rendezvous_here_ = rendezvous ? required : 0;
  limit = 0;
  return false;
}

void Warp::block_on(const std::string& what) {
  state = WarpState::kBlocked;
  waiting_for = what;
  limit = 0;
}

void Warp::wake() {
  if (state != WarpState::kBlocked) return;
  state = WarpState::kReady;
  waiting_for.clear();
  set_limit();
}

void Warp::retry(const std::string& what) {
  --pc;
  poll(what);
}

void Warp::poll(const std::string& what) {
  state = WarpState::kPolling;
  waiting_for = what;
  limit = 0;
  if (!groups_.empty()) diverged_since_ = kRotateAfter + 1;
}

void Warp::check_registers(const Inst& inst, u32 mask) const {
  const Kernel& k = kernel();
  const CheckList& list = k.checks[k.check_of[size_t(&inst - code)]];
  u32 at = u32(&inst - code);
  for (const RegisterCheck& c : list.reads) {
    const TrackState& t = *reinterpret_cast<const TrackState*>(regs + c.track);
    const bool guard = (inst.special & kGuarded) && c.slot == inst.guard;  // lanes that it turned off read it too
    const u32 readers = guard ? active : mask;
    if (launch->options.check_uninitialized && (t.written & readers) != readers) {
      fault_at(at, "uninitialized", "register " + k.register_names[c.name] + " is read before anything wrote it",
               u32(std::countr_zero(readers & ~t.written)));
    }
    if (!list.ignore_pending && (t.pending_write & mask) && launch->options.check_async) {
      fault_at(at, "async",
               "register " + k.register_names[c.name] + " is read while an asynchronous operation may still write it",
               u32(std::countr_zero(mask & t.pending_write)));
    }
  }
  if (list.ignore_pending || !launch->options.check_async) return;
  for (const RegisterCheck& c : list.writes) {
    const TrackState& t = *reinterpret_cast<const TrackState*>(regs + c.track);
    if (u32 bad = (t.pending_write | t.pending_read) & mask) {
      fault_at(at, "async",
               "register " + k.register_names[c.name] + " is written while an asynchronous operation uses it",
               u32(std::countr_zero(bad)));
    }
  }
}

void Warp::track_registers(const Inst& inst, u32 mask) {
  const Kernel& k = kernel();
  const CheckList& list = k.checks[k.check_of[size_t(&inst - code)]];
  for (const RegisterCheck& c : list.writes) {
    TrackState& t = *reinterpret_cast<TrackState*>(regs + c.track);
    t.written |= mask;
    if (!list.ignore_pending) t.unfenced |= mask;
  }
}

void Warp::release(Knowledge& into) {
  if (!tracks_races()) return;
  if (into.seen.at.empty()) into.reset(knowledge.seen.at.size());
  into.join(knowledge);
  ++knowledge.seen.at[actor];
}

}  // namespace pagedkern::vgpu
