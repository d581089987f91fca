#include "vgpu/async.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "vgpu/block.h"

namespace pagedkern::vgpu {

AsyncOperation::AsyncOperation(Warp& warp, u32 lanes) : warp(warp), lanes(lanes), unobserved(lanes), pc(warp.pc - 1) {
  if (warp.tracks_races()) knowledge = warp.knowledge;
}

void AsyncOperation::fault(const std::string& kind, const std::string& detail) const {
  u32 some = lanes ? lanes : unobserved ? unobserved : 1;
  warp.fault_at(pc, kind, detail, u32(std::countr_zero(some)));
}

void AsyncEngine::reset(AsyncCompletion policy, bool checks, u64 seed) {
  policy_ = policy;
  guarded_ = checks;
  rng_ = seed | 1;
  ticks_ = 0;
  next_id_ = 0;
  live_.clear();
  deferred_.clear();
  proxy_clock_ = 0;
  mbarriers_.clear();
}

MbarrierRecord& AsyncEngine::mbarrier(const Block& block, u32 offset) {
  return mbarriers_[u64(block.rank) << 32 | offset];
}

void AsyncEngine::guard(const std::vector<SharedRange>& ranges, bool write, int change) {
  for (const SharedRange& r : ranges) {
    std::vector<u16>& counts = write ? r.block->guarded_writes : r.block->guarded_reads;
    for (u32 k = r.offset / 16; k < (r.offset + r.bytes + 15) / 16; ++k) counts[k] = u16(counts[k] + change);
  }
}

u64 AsyncEngine::random() {
  rng_ ^= rng_ << 13;
  rng_ ^= rng_ >> 7;
  rng_ ^= rng_ << 17;
  return rng_;
}

void AsyncEngine::issue(std::unique_ptr<AsyncOperation> op, AsyncGroup group) {
  op->issued_at = ticks_;
  for (const SharedRange& r : op->writes) {
    std::memset(r.block->shared.data() + r.offset, kPoison, r.bytes);
    r.block->shadow.mark_written(r.offset, r.bytes);
  }
  guard(op->writes, true, 1);
  guard(op->reads, false, 1);
  live_.emplace_back(next_id_++, Live{std::move(op), group, {}});
  Live& live = live_.back().second;
  live.sequence.fill(kOpen);
  const bool now = policy_ == AsyncCompletion::kEarly || (policy_ == AsyncCompletion::kRandom && random() % 4 == 0);
  if (now && live.op->ready()) perform(live, live.op->lanes);
  if (group == AsyncGroup::kNone) retire();
}

// The parts of all four warps, and the warpgroup's earlier ones first: they may share accumulators.
void AsyncEngine::perform_wgmmas(const AsyncOperation& last) {
  for (auto& [id, live] : live_) {
    AsyncOperation& op = *live.op;
    const bool one_group = op.warp.block == last.warp.block && op.warp.index / 4 == last.warp.index / 4;
    if (live.group != AsyncGroup::kWgmma || !one_group || op.sequence > last.sequence || !op.lanes) continue;
    op.perform(cluster_, op.lanes);
    op.lanes = 0;
  }
  cluster_.touch();
}

void AsyncEngine::perform(Live& live, u32 lanes) {
  lanes &= live.op->lanes;
  if (!lanes) return;
  if (live.group == AsyncGroup::kWgmma) return perform_wgmmas(*live.op);
  if (!live.op->captured) live.op->capture(cluster_, lanes);
  live.op->perform(cluster_, lanes);
  live.op->lanes &= ~lanes;
  if (live.group == AsyncGroup::kNone && live.op->token == 0) live.op->unobserved &= ~lanes;
  cluster_.touch();
}

void AsyncEngine::commit(AsyncGroup group, Warp& warp, u32 mask) {
  std::array<u32, kLanes>& count = warp.async_groups[size_t(group)];
  for (auto& [id, live] : live_) {
    if (live.group != group || &live.op->warp != &warp) continue;
    for (u32 m = mask & live.op->unobserved; m; m &= m - 1) {
      u32 lane = u32(std::countr_zero(m));
      if (live.sequence[lane] == kOpen) live.sequence[lane] = count[lane];
    }
  }
  for (u32 m = mask; m; m &= m - 1) ++count[u32(std::countr_zero(m))];
}

// Lanes whose group of this operation is committed and older than the `allowed` youngest.
u32 AsyncEngine::due_lanes(const Live& live, const Warp& warp, u32 mask, u32 allowed) {
  const std::array<u32, kLanes>& count = warp.async_groups[size_t(live.group)];
  u32 due = 0;
  for (u32 m = mask & live.op->unobserved; m; m &= m - 1) {
    u32 lane = u32(std::countr_zero(m));
    if (live.sequence[lane] != kOpen && u64(live.sequence[lane]) + allowed < count[lane]) due |= 1u << lane;
  }
  return due;
}

bool AsyncEngine::ready_to_wait(AsyncGroup group, const Warp& warp, u32 mask, u32 allowed) const {
  for (auto& [id, live] : live_) {
    if (live.group != group || &live.op->warp != &warp || live.op->ready()) continue;
    if (due_lanes(live, warp, mask, allowed)) return false;
  }
  return true;
}

void AsyncEngine::wait(AsyncGroup group, Warp& warp, u32 mask, u32 allowed, bool read_only) {
  for (size_t k = 0; k < live_.size(); ++k) {
    Live& live = live_[k].second;
    if (live.group != group || &live.op->warp != &warp) continue;
    const u32 due = due_lanes(live, warp, mask, allowed);
    if (!due) continue;
    if (read_only) {
      if (!live.op->captured && live.op->lanes) {
        live.op->capture(cluster_, due);
        live.op->captured = true;
        guard(live.op->reads, false, -1);
        live.op->reads.clear();
      }
    } else {
      perform(live, due);
      live.op->unobserved &= ~due;
    }
  }
  retire();
}

void AsyncEngine::wait_all(AsyncGroup group, Warp& warp, u32 mask) {
  for (size_t k = 0; k < live_.size(); ++k) {
    Live& live = live_[k].second;
    if (live.group != group || &live.op->warp != &warp) continue;
    u32 due = mask & live.op->unobserved;
    perform(live, due);
    live.op->unobserved &= ~due;
  }
  retire();
}

void AsyncEngine::after_prior(AsyncGroup group, Warp& warp, u32 mask, std::function<void(u32)> action, u64 token) {
  deferred_.push_back({group, &warp, mask, next_id_, std::move(action), token});
  retire();
}

void AsyncEngine::observed(u64 token) {
  for (auto& [id, live] : live_) {
    if (live.op->token == token && live.op->lanes == 0) live.op->unobserved = 0;
  }
  retire();
}

// Drops what is done and observed, and runs the deferred arrivals whose operations have all performed.
void AsyncEngine::retire() {
  for (size_t k = 0; k < deferred_.size();) {
    Deferred& d = deferred_[k];
    u32 ready = d.lanes;
    for (auto& [id, live] : live_) {
      if (id < d.before && live.group == d.group && &live.op->warp == d.warp) ready &= ~live.op->lanes;
    }
    if (ready) {
      // The first mbarrier arrival after an operation is an observation of it as well, once that phase completes.
      for (auto& [id, live] : live_) {
        const bool covered = id < d.before && live.group == d.group && &live.op->warp == d.warp;
        if (covered && live.op->token == 0) live.op->token = d.token;
      }
      auto action = d.action;
      d.lanes &= ~ready;
      bool over = d.lanes == 0;
      if (over) deferred_.erase(deferred_.begin() + std::ptrdiff_t(k));
      action(ready);
      if (over) continue;
    }
    ++k;
  }
  std::erase_if(live_, [](auto& entry) {
    const AsyncOperation& op = *entry.second.op;
    if (op.lanes || op.unobserved) return false;
    guard(op.writes, true, -1);
    guard(op.reads, false, -1);
    return true;
  });
}

bool AsyncEngine::advance() {
  std::vector<size_t> open;
  for (size_t k = 0; k < live_.size(); ++k) {
    if (live_[k].second.op->lanes && live_[k].second.op->ready()) open.push_back(k);
  }
  if (open.empty()) return false;
  size_t pick = policy_ == AsyncCompletion::kRandom ? open[random() % open.size()] : open.front();
  perform(live_[pick].second, live_[pick].second.op->lanes);
  retire();
  return true;
}

void AsyncEngine::tick() {
  ++ticks_;
  if (live_.empty()) return;
  if (policy_ == AsyncCompletion::kRandom) {
    if (random() % 4 == 0) advance();
  } else if (ticks_ % 64 == 0) {
    for (size_t k = 0; k < live_.size(); ++k) {
      const AsyncOperation& op = *live_[k].second.op;
      if (op.lanes && op.ready() && ticks_ - op.issued_at > kLatest) {
        perform(live_[k].second, op.lanes);
        retire();
        break;
      }
    }
  }
}

void AsyncEngine::finish() {
  while (advance()) {
  }
  live_.clear();
  deferred_.clear();
}

void AsyncEngine::block_exit(Block& block) {
  for (auto& [id, live] : live_) {
    if (!guarded_ || !live.op->lanes || live.group == AsyncGroup::kCpAsync) continue;
    for (const auto* ranges : {&live.op->writes, &live.op->reads}) {
      for (const SharedRange& r : *ranges) {
        if (r.block == &block)
          live.op->fault("async", std::string(live.op->name()) + " still uses shared memory of a block that exits");
      }
    }
  }
}

void AsyncEngine::check_shared(Warp& warp, u32 lane, Block& block, u32 offset, u32 bytes, bool write) const {
  if (!guarded_) return;
  u32 near = 0;
  for (u32 k = offset / 16; k <= (offset + bytes - 1) / 16; ++k)
    near |= block.guarded_writes[k] | (write ? block.guarded_reads[k] : 0u);
  if (!near) return;
  for (auto& [id, live] : live_) {
    const AsyncOperation& op = *live.op;
    auto hit = [&](const SharedRange& r) {
      return r.block == &block && r.offset < offset + bytes && offset < r.offset + r.bytes &&
             (op.unobserved >> r.lane & 1);
    };
    for (const SharedRange& r : op.writes) {
      if (!hit(r)) continue;
      warp.fault("async",
                 std::string(write ? "write to" : "read of") + " shared memory that " + op.name() + " (PTX line " +
                     std::to_string(warp.kernel().where[op.pc].line) + ") fills and nothing waited for",
                 1u << lane);
    }
    if (!write || op.captured) continue;
    for (const SharedRange& r : op.reads) {
      if (!hit(r) || !(op.lanes >> r.lane & 1)) continue;
      warp.fault("async",
                 "write to shared memory that " + std::string(op.name()) + " (PTX line " +
                     std::to_string(warp.kernel().where[op.pc].line) + ") may still read",
                 1u << lane);
    }
  }
}

}  // namespace pagedkern::vgpu
