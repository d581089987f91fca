#include "vgpu/async_support.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstring>

namespace pagedkern::vgpu {
namespace {

std::string hex(u64 v) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(v));
  return text;
}

template <typename Word>
void reduce_atomically(ReduceOp op, ReduceType type, u8* memory, const u8* operand, u32 count) {
  for (u32 i = 0; i < count; ++i) {
    std::atomic_ref<Word> cell(*reinterpret_cast<Word*>(memory + i * sizeof(Word)));
    Word old = cell.load(std::memory_order_relaxed), next;
    do {
      next = old;
      bulk_reduce(op, type, reinterpret_cast<u8*>(&next), operand + i * sizeof(Word), 1);
    } while (!cell.compare_exchange_weak(old, next, std::memory_order_acq_rel));
  }
}

u64 load_word(const SharedSpot& spot) {
  u64 word;
  std::memcpy(&word, spot.block->shared.data() + spot.offset, 8);
  return word;
}

void read_checked(Warp& warp, u32 lane, u32 actor, const SharedSpot& spot, u32 bytes) {
  const LaunchOptions& options = warp.launch->options;
  Cluster& cluster = warp.block->cluster;
  SharedShadow& shadow = spot.block->shadow;
  if (options.check_async && !cluster.async.idle()) {
    cluster.async.check_shared(warp, lane, *spot.block, spot.offset, bytes, false);
  }
  if (options.check_uninitialized && !shadow.written(spot.offset, bytes)) {
    warp.fault("uninitialized",
               "read of " + std::to_string(bytes) + " bytes at shared address " + hex(spot.offset + kSharedBase) +
                   " that nothing wrote",
               1u << lane);
  }
  if (!warp.tracks_races() || !shadow.races()) return;
  if (options.check_async) {
    const RaceReport unfenced = shadow.proxy_read(spot.offset, bytes, warp.knowledge.seen_by_async_proxy);
    if (unfenced.found) {
      const bool ordered = epoch_clock(unfenced.other) <= warp.knowledge.seen.at[epoch_actor(unfenced.other)];
      warp.fault(ordered ? "async" : "race",
                 "the async proxy reads shared address " + hex(unfenced.offset + kSharedBase) + ", written by " +
                     cluster.actor_name(epoch_actor(unfenced.other)) +
                     (ordered ? ": no fence.proxy.async after the write" : ": no barrier orders them"),
                 1u << lane);
    }
  }
  if (options.check_races) {
    const RaceReport race = shadow.access(spot.offset, bytes, false, actor, warp.knowledge.seen);
    if (race.found) {
      warp.fault("race",
                 "the async proxy's read of shared address " + hex(race.offset + kSharedBase) +
                     " races with a write by " + cluster.actor_name(epoch_actor(race.other)) +
                     ": no barrier orders them",
                 1u << lane);
    }
  }
}

}  // namespace

void push_address(std::vector<i32>& pool, const Address& a) {
  pool.push_back(a.base);
  pool.push_back(a.wide ? 1 : 0);
  pool.push_back(i32(u32(u64(a.offset))));
  pool.push_back(i32(u32(u64(a.offset) >> 32)));
}

void lane_addresses(const Warp& warp, const i32* slot, u32 mask, u64* out) {
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    out[lane] = lane_address(warp, slot, lane);
  }
}

Address address_operand(DecodeContext& ctx, const Operand& operand, bool generic) {
  const Address a = ctx.address(operand);
  ctx.require(!generic || a.base == kNoOperand || a.wide, "a generic address needs a 64-bit register");
  return a;
}

SharedSpot shared_spot(Warp& warp, u32 lane, u64 address, u32 bytes, u32 align, bool generic) {
  if (generic) {
    if (address >> kWindowShift != kSharedWindow >> kWindowShift) {
      warp.fault("out_of_bounds", "generic address " + hex(address) + " is not one of shared memory", 1u << lane);
    }
    address &= kWindowMask;
  }
  SharedSpot spot;
  spot.block = &warp.shared_target(lane, address, bytes, &spot.offset);
  if (address & (align - 1)) {
    warp.fault("misaligned", "shared address " + hex(address) + " needs " + std::to_string(align) + "-byte alignment",
               1u << lane);
  }
  return spot;
}

void async_proxy_read(Warp& warp, u32 lane, const SharedSpot& spot, u32 bytes) {
  read_checked(warp, lane, warp.actor, spot, bytes);
}

void async_proxy_read_as(Warp& warp, u32 actor, u32 clock, const SharedSpot& spot, u32 bytes) {
  if (!warp.tracks_races()) return read_checked(warp, 0, actor, spot, bytes);
  u32& entry = warp.knowledge.seen.at[actor];
  const u32 before = entry;
  entry = std::min(clock, kMaxClock);
  read_checked(warp, 0, actor, spot, bytes);
  entry = before;
}

VectorClock async_proxy_stamp(Warp& warp) {
  VectorClock stamp;
  if (!warp.tracks_races()) return stamp;
  Cluster& cluster = warp.block->cluster;
  stamp = warp.knowledge.seen;
  stamp.at[cluster.proxy_actor()] = cluster.async.next_proxy_clock();
  return stamp;
}

void async_proxy_write(Warp& warp, u32 lane, const SharedSpot& spot, u32 bytes, const VectorClock& stamp) {
  const LaunchOptions& options = warp.launch->options;
  Cluster& cluster = warp.block->cluster;
  if (options.check_async && !cluster.async.idle()) {
    cluster.async.check_shared(warp, lane, *spot.block, spot.offset, bytes, true);
  }
  if (!options.check_races || stamp.at.empty() || !spot.block->shadow.races()) return;
  const RaceReport race = spot.block->shadow.access(spot.offset, bytes, true, cluster.proxy_actor(), stamp);
  if (race.found) {
    warp.fault("race",
               "the asynchronous write to shared address " + hex(race.offset + kSharedBase) + " races with a " +
                   (race.other_writes ? "write" : "read") + " by " + cluster.actor_name(epoch_actor(race.other)) +
                   ": no barrier orders them",
               1u << lane);
  }
}

void async_proxy_publish(Cluster& cluster, const VectorClock& stamp, Knowledge& into) {
  if (stamp.at.empty()) return;
  if (into.seen.at.empty()) into.reset(stamp.at.size());
  const u32 proxy = cluster.proxy_actor();
  for (VectorClock* clock : {&into.seen, &into.seen_by_async_proxy}) {
    if (clock->at[proxy] < stamp.at[proxy]) clock->at[proxy] = stamp.at[proxy];
  }
}

u8* global_range(Warp& warp, u32 pc, u32 lane, u64 address, u64 bytes, u32 align, Access access) {
  const auto text = [&] {
    return std::string(access == Access::kRead ? "asynchronous read" : "asynchronous write") + " of " +
           std::to_string(bytes) + " bytes at global address " + hex(address);
  };
  if (address & (align - 1)) {
    warp.fault_at(pc, "misaligned", text() + " needs " + std::to_string(align) + "-byte alignment", lane);
  }
  GlobalMemory& memory = *warp.launch->memory;
  Allocation* a = memory.find(address);
  if (!a || a->freed || !a->contains(address, bytes) || (a->read_only && access != Access::kRead)) {
    std::string why = ": ";
    if (Allocation* near = memory.nearest(address)) {
      why += near->freed ? "use after free of '" : near->contains(address, bytes) ? "read-only '" : "outside '";
      why += near->name + "' (" + std::to_string(near->bytes) + " bytes at " + hex(near->base) + ")";
    } else {
      why += "the launch was given no memory";
    }
    warp.fault_at(pc, "out_of_bounds", text() + why, lane);
  }
  if (a->written) {
    if (access != Access::kWrite && warp.launch->options.check_uninitialized &&
        !a->written->all(address - a->base, bytes)) {
      warp.fault_at(pc, "uninitialized", text() + ", in '" + a->name + "', that nothing wrote", lane);
    }
    if (access != Access::kRead) a->written->set(address - a->base, bytes);
  }
  if (warp.launch->options.counters && a->read_sectors) {
    for (u64 s = address / kSectorBytes; s <= (address + bytes - 1) / kSectorBytes; ++s) {
      if (access != Access::kWrite) a->read_sectors->set_one(s - a->first_sector());
      if (access != Access::kRead) a->write_sectors->set_one(s - a->first_sector());
    }
  }
  return reinterpret_cast<u8*>(address);
}

void atomic_bulk_reduce(ReduceOp op, ReduceType type, u8* memory, const u8* operand, u32 count) {
  switch (reduce_type_bytes(type)) {
    case 2: return reduce_atomically<u16>(op, type, memory, operand, count);
    case 4: return reduce_atomically<u32>(op, type, memory, operand, count);
    default: return reduce_atomically<u64>(op, type, memory, operand, count);
  }
}

std::vector<MulticastTarget> multicast_targets(Warp& warp, u32 lane, u32 mask, const SharedSpot& to,
                                               const SharedSpot& barrier) {
  std::vector<MulticastTarget> out;
  for (u32 rank = 0; rank < 16; ++rank) {
    if (!(mask >> rank & 1)) continue;
    Block* block = warp.block->cluster.block(rank);
    if (!block)
      warp.fault("invalid", "the multicast mask names block " + std::to_string(rank) + ", which the cluster lacks",
                 1u << lane);
    if (block->done()) {
      warp.fault("out_of_bounds", "the multicast reaches block " + std::to_string(rank) + ", which has exited",
                 1u << lane);
    }
    out.push_back({{block, to.offset}, {block, barrier.offset}});
  }
  return out;
}

Mbarrier mbarrier_load(Warp& warp, u32 pc, u32 lane, const SharedSpot& spot, MbarrierRecord** out) {
  MbarrierRecord& record = warp.block->cluster.async.mbarrier(*spot.block, spot.offset);
  const u64 word = load_word(spot);
  Mbarrier m;
  if (!record.live || word != record.word || Mbarrier::load(word, m) != MbarrierError::kNone) {
    warp.fault_at(
        pc, "invalid",
        "mbarrier at shared address " + hex(spot.offset + kSharedBase) + ": " +
            (record.live ? "the object was overwritten" : mbarrier_error_text(MbarrierError::kNotInitialized)),
        lane);
  }
  *out = &record;
  return m;
}

void mbarrier_store(Cluster& cluster, const SharedSpot& spot, MbarrierRecord& record, const Mbarrier& before,
                    const Mbarrier& after) {
  record.word = after.store();
  std::memcpy(spot.block->shared.data() + spot.offset, &record.word, 8);
  if (before.phase == after.phase) return;
  ++record.phase;
  if (!record.gathering.seen.at.empty()) {
    if (record.released.seen.at.empty()) record.released.reset(record.gathering.seen.at.size());
    record.released.join(record.gathering);
  }
  cluster.touch();
}

u64 mbarrier_token(const SharedSpot& spot, const MbarrierRecord& record) {
  return 1ull << 63 | u64(spot.block->rank) << 56 | u64(spot.offset) << 36 | (record.phase & ((1ull << 36) - 1));
}

void mbarrier_gather(MbarrierRecord& record, const Knowledge& knowledge) {
  if (knowledge.seen.at.empty()) return;
  if (record.gathering.seen.at.empty()) record.gathering.reset(knowledge.seen.at.size());
  record.gathering.join(knowledge);
}

void mbarrier_arrive(Warp& warp, u32 pc, u32 lane, const SharedSpot& spot, u32 count, const Knowledge* knowledge) {
  MbarrierRecord* record;
  const Mbarrier before = mbarrier_load(warp, pc, lane, spot, &record);
  Mbarrier after = before;
  if (knowledge) mbarrier_gather(*record, *knowledge);
  const MbarrierError error = after.arrive(count);
  if (error != MbarrierError::kNone) {
    warp.fault_at(pc, "invalid", std::string("mbarrier arrival: ") + mbarrier_error_text(error), lane);
  }
  mbarrier_store(warp.block->cluster, spot, *record, before, after);
}

void mbarrier_complete(const AsyncOperation& op, const SharedSpot& spot, u32 bytes, const VectorClock& stamp) {
  MbarrierRecord* record;
  Cluster& cluster = op.warp.block->cluster;
  const u32 lane = u32(std::countr_zero(op.lanes | 1u << 31));
  const Mbarrier before = mbarrier_load(op.warp, op.pc, lane, spot, &record);
  Mbarrier after = before;
  async_proxy_publish(cluster, stamp, record->gathering);
  const MbarrierError error = after.complete_tx(bytes);
  if (error != MbarrierError::kNone) op.fault("invalid", std::string("complete_tx: ") + mbarrier_error_text(error));
  mbarrier_store(cluster, spot, *record, before, after);
}

}  // namespace pagedkern::vgpu
