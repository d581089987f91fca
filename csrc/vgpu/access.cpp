// Addresses to host pointers, with every check on the way.
#include <algorithm>
#include <bit>
#include <cstdio>

#include "vgpu/block.h"
#include "vgpu/warp.h"

namespace pagedkern::vgpu {
namespace {

std::string hex(u64 v) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(v));
  return text;
}

const char* verb(Access a) {
  return a == Access::kRead || a == Access::kStrongRead     ? "read"
         : a == Access::kWrite || a == Access::kStrongWrite ? "write"
                                                            : "atomic access";
}

// Address k is the first one plus k times `step`, for all lanes: step `bytes` is a warp that moves one stretch of
// memory, step 0 one that reads the same place. Both are checked as one range, and only what then looks wrong lane by
// lane.
bool in_steps(const u64* addresses, u64 step) {
  u64 different = 0;
  for (u64 k = 0; k < u64(kLanes); ++k) different |= addresses[k] ^ (addresses[0] + k * step);
  return different == 0;
}

struct Stretch {
  u64 address = 0;
  u32 bytes = 0;  // 0: the lanes' accesses are no stretch
};

Stretch stretch_of(const u64* addresses, u32 mask, u32 bytes) {
  if (mask != kFullMask) return {};
  const u64 step = addresses[1] - addresses[0];
  if ((step != bytes && step != 0) || !in_steps(addresses, step)) return {};
  return {addresses[0], step ? bytes * kLanes : bytes};
}

}  // namespace

void Warp::resolve(Space space, const u64* addresses, u32 mask, u32 bytes, u32 align, Access access, u8** pointers) {
  switch (space) {
    case Space::kGlobal:
    case Space::kConst: return resolve_global(addresses, mask, bytes, align, access, pointers);
    case Space::kShared:
    case Space::kSharedCluster: return resolve_shared(addresses, mask, bytes, align, access, pointers);
    case Space::kLocal:
    case Space::kParam:
      for (u32 m = mask; m; m &= m - 1) {
        u32 lane = u32(std::countr_zero(m));
        resolve_small(space, addresses[lane], lane, bytes, align, access, &pointers[lane]);
      }
      return;
    case Space::kGeneric: break;
  }
  for (u32 left = mask; left;) {
    u64 window = addresses[std::countr_zero(left)] >> kWindowShift;
    u32 group = 0;
    u64 plain[kLanes];
    for (u32 m = left; m; m &= m - 1) {
      u32 lane = u32(std::countr_zero(m));
      if (addresses[lane] >> kWindowShift != window) continue;
      group |= 1u << lane;
      plain[lane] = addresses[lane] & kWindowMask;
    }
    Space where = window == 0                               ? Space::kGlobal
                  : window == kSharedWindow >> kWindowShift ? Space::kShared
                  : window == kLocalWindow >> kWindowShift  ? Space::kLocal
                  : window == kParamWindow >> kWindowShift  ? Space::kParam
                                                            : Space::kGeneric;
    if (where == Space::kGeneric) {
      u32 lane = u32(std::countr_zero(group));
      fault("out_of_bounds",
            std::string(verb(access)) + " of " + std::to_string(bytes) + " bytes at " + hex(addresses[lane]), group);
    }
    resolve(where, plain, group, bytes, align, access, pointers);
    left &= ~group;
  }
}

void Warp::fault_global(u64 address, u32 bytes, u32 lane, Access access) const {
  std::string text =
      std::string(verb(access)) + " of " + std::to_string(bytes) + " bytes at global address " + hex(address);
  if (Allocation* a = launch->memory->nearest(address)) {
    bool inside = address >= a->base && address < a->base + a->bytes;
    if (inside && a->freed) {
      fault("out_of_bounds", text + ": use after free of '" + a->name + "'", 1u << lane);
    }
    if (inside && a->contains(address, bytes) && a->read_only) {
      fault("out_of_bounds", text + ": '" + a->name + "' is read-only", 1u << lane);
    }
    i64 distance = address < a->base ? i64(a->base - address) : i64(address - a->base - a->bytes);
    text += address < a->base ? ", " + std::to_string(distance) + " bytes before '"
            : inside          ? ", running over the end of '"
                              : ", " + std::to_string(distance) + " bytes after the end of '";
    text += a->name + "' (" + std::to_string(a->bytes) + " bytes at " + hex(a->base) + ")";
  } else {
    text += ", and the launch was given no memory";
  }
  fault("out_of_bounds", text, 1u << lane);
}

// True: done. False: lane by lane, as something may be wrong or the lanes touch more than one allocation.
bool Warp::resolve_global_stretch(u64 address, u32 total, u32 bytes, u32 align, Access access) {
  Allocation*& near = near_allocations_[pc % near_allocations_.size()];
  Allocation* a = near;
  if (!a || !a->contains(address, total)) {
    a = launch->memory->find(address);
    if (!a || !a->contains(address, total)) return false;
    near = a;
  }
  if ((address | (total > bytes ? bytes : 0)) & (align - 1)) return false;
  if (a->freed || (a->read_only && writes(access))) return false;
  if (a->written) {
    if (reads(access) && launch->options.check_uninitialized && !a->written->all(address - a->base, total))
      return false;
    if (writes(access)) a->written->set(address - a->base, total);
  }
  if (a->stamps && !strong(access) && !global_order_of_stretch(*a, address, total, access)) return false;
  if (!launch->options.counters) return true;
  const u64 first = address / kSectorBytes, sectors = (address + total - 1) / kSectorBytes - first + 1;
  count_global(access, kLanes, bytes, u32(sectors));
  if (!a->read_sectors) return true;
  if (reads(access)) a->read_sectors->set(first - a->first_sector(), sectors);
  if (writes(access)) a->write_sectors->set(first - a->first_sector(), sectors);
  return true;
}

void Warp::count_global(Access access, u32 lanes, u32 bytes, u32 sectors) const {
  Counters& c = worker->counters;
  const u64 moved = u64(lanes) * bytes;
  if (bytes == 16) {
    c.global_vector_bytes += moved;
    c.global_vector_requests += 1;
  }
  if (reads(access)) {
    c.global_load_bytes += moved;
    c.global_load_requests += 1;
    c.global_load_sectors += sectors;
  }
  if (writes(access)) {
    c.global_store_bytes += moved;
    c.global_store_requests += 1;
    c.global_store_sectors += sectors;
  }
}

void Warp::resolve_global(const u64* addresses, u32 mask, u32 bytes, u32 align, Access access, u8** pointers) {
  for (u32 lane = 0; lane < kLanes; ++lane) pointers[lane] = reinterpret_cast<u8*>(addresses[lane]);
  const Stretch stretch = stretch_of(addresses, mask, bytes);
  if (stretch.bytes && resolve_global_stretch(stretch.address, stretch.bytes, bytes, align, access)) return;
  Allocation* a = near_allocations_[pc % near_allocations_.size()];
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    const u64 address = addresses[lane];
    if (address & (align - 1)) {
      fault("misaligned",
            std::string(verb(access)) + " at global address " + hex(address) + " needs " + std::to_string(align) +
                "-byte alignment",
            1u << lane);
    }
    if (!a || !a->contains(address, bytes)) a = launch->memory->find(address);
    if (!a || a->freed || !a->contains(address, bytes) || (a->read_only && writes(access))) {
      fault_global(address, bytes, lane, access);
    }
    if (a->written) {
      if (reads(access) && launch->options.check_uninitialized && !a->written->all(address - a->base, bytes)) {
        fault("uninitialized",
              "read of " + std::to_string(bytes) + " bytes at global address " + hex(address) + ", '" + a->name +
                  "' + " + std::to_string(address - a->base) + ", that nothing wrote",
              1u << lane);
      }
      if (writes(access)) a->written->set(address - a->base, bytes);
    }
    if (a->stamps && !strong(access)) check_global_order(*a, address, bytes, lane, access);
    if (!a->read_sectors) continue;
    for (u64 k = address / kSectorBytes; k <= (address + bytes - 1) / kSectorBytes; ++k) {
      if (reads(access)) a->read_sectors->set_one(k - a->first_sector());
      if (writes(access)) a->write_sectors->set_one(k - a->first_sector());
    }
  }
  near_allocations_[pc % near_allocations_.size()] = a;
  if (launch->options.counters)
    count_global(access, u32(std::popcount(mask)), bytes, distinct_sectors(addresses, mask, bytes, nullptr));
}

Block& Warp::shared_target(u32 lane, u64 address, u32 bytes, u32* offset) {
  u32 rank_bits = u32(address) >> kSharedRankShift;
  u32 inside = u32(address) & kSharedOffsetMask;
  Block* target = rank_bits == 0 ? block : block->cluster.block(rank_bits - 1);
  if (address >> 32 || !target) {
    fault("out_of_bounds", "shared address " + hex(address) + " names no block of the cluster", 1u << lane);
  }
  if (inside < kSharedBase || inside - kSharedBase + u64(bytes) > target->shared_bytes) {
    fault("out_of_bounds",
          "access of " + std::to_string(bytes) + " bytes at shared address " + hex(address) + ", outside the block's " +
              std::to_string(target->shared_bytes) + " bytes (" + hex(kSharedBase) + ".." +
              hex(kSharedBase + target->shared_bytes) + ")",
          1u << lane);
  }
  if (target != block && target->done()) {
    fault("out_of_bounds", "access to the shared memory of a block of the cluster that has exited", 1u << lane);
  }
  *offset = inside - kSharedBase;
  return *target;
}

// As resolve_global_stretch, in the own block's shared memory.
bool Warp::resolve_shared_stretch(u64 address, u32 total, u32 bytes, u32 align, Access access) {
  const u64 offset = address - kSharedBase;
  if (address >> kSharedRankShift || address < kSharedBase || offset + total > block->shared_bytes) return false;
  if ((address | (total > bytes ? bytes : 0)) & (align - 1)) return false;
  const LaunchOptions& options = launch->options;
  const u32 at = u32(offset);
  if (options.check_async && !block->cluster.async.idle()) {
    u32 guarded = 0;
    for (u32 k = at / 16; k <= (at + total - 1) / 16; ++k)
      guarded |= block->guarded_writes[k] | block->guarded_reads[k];
    if (guarded) return false;
  }
  SharedShadow& shadow = block->shadow;
  if (reads(access) && options.check_uninitialized && !shadow.written(at, total)) return false;
  // What it leaves in the shadow before it finds a conflict is what the lanes would leave there too.
  if (!strong(access) && options.check_races && shadow.races() &&
      shadow.access(at, total, writes(access), actor, knowledge.seen).found) {
    return false;
  }
  if (writes(access)) shadow.mark_written(at, total);
  if (options.counters) {
    const u32 wavefronts = std::max(1u, bytes / 4);
    if (reads(access)) worker->counters.shared_load_wavefronts += wavefronts;
    if (writes(access)) worker->counters.shared_store_wavefronts += wavefronts;
  }
  return true;
}

void Warp::resolve_shared(const u64* addresses, u32 mask, u32 bytes, u32 align, Access access, u8** pointers) {
  const Stretch stretch = stretch_of(addresses, mask, bytes);
  if (stretch.bytes && resolve_shared_stretch(stretch.address, stretch.bytes, bytes, align, access)) {
    u8* base = block->shared.data() - kSharedBase;
    for (u32 lane = 0; lane < kLanes; ++lane) pointers[lane] = base + addresses[lane];
    return;
  }
  u32 offsets[kLanes];
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    const u64 address = addresses[lane];
    u32& offset = offsets[lane];
    Block* target = block;
    offset = u32(address) - kSharedBase;
    if (address >> kSharedRankShift || address < kSharedBase || offset + u64(bytes) > block->shared_bytes)
      target = &shared_target(lane, address, bytes, &offset);
    pointers[lane] = target->shared.data() + offset;
    if (address & (align - 1)) {
      fault("misaligned",
            std::string(verb(access)) + " at shared address " + hex(address) + " needs " + std::to_string(align) +
                "-byte alignment",
            1u << lane);
    }
    check_shared_lane(*target, lane, offset, bytes, access);
  }
  if (!launch->options.counters) return;
  u32 fewest = 0;
  u32 wavefronts = shared_wavefronts(offsets, mask, bytes, &fewest);
  Counters& c = worker->counters;
  if (reads(access)) c.shared_load_wavefronts += wavefronts;
  if (writes(access)) c.shared_store_wavefronts += wavefronts;
  c.shared_bank_conflicts += wavefronts - fewest;
}

void Warp::check_shared_lane(Block& target, u32 lane, u32 offset, u32 bytes, Access access) {
  const LaunchOptions& options = launch->options;
  if (options.check_async && !block->cluster.async.idle())
    block->cluster.async.check_shared(*this, lane, target, offset, bytes, writes(access));
  if (&target != block) target.note_remote(*this);
  if (reads(access) && options.check_uninitialized && !target.shadow.written(offset, bytes)) {
    fault("uninitialized",
          "read of " + std::to_string(bytes) + " bytes at shared address " + hex(offset + kSharedBase) +
              " that nothing wrote",
          1u << lane);
  }
  if (writes(access)) target.shadow.mark_written(offset, bytes);
  if (strong(access) || !options.check_races || !target.shadow.races()) return;
  const RaceReport race = target.shadow.access(offset, bytes, writes(access), actor, knowledge.seen);
  if (!race.found) return;
  const std::string text = std::string(verb(access)) + " at shared address " + hex(race.offset + kSharedBase) +
                           " races with a " + (race.other_writes ? "write" : "read") + " by " +
                           block->cluster.actor_name(epoch_actor(race.other)) + ": no barrier orders them";
  if (!same_value || !race.other_writes) fault("race", text, 1u << lane);
  same_value->lanes |= 1u << lane;
  same_value->conflict = text;
}

void Warp::resolve_small(Space space, u64 address, u32 lane, u32 bytes, u32 align, Access access, u8** pointer) {
  address &= kWindowMask;
  if (address & (align - 1)) {
    fault("misaligned",
          std::string(verb(access)) + " at " + (space == Space::kLocal ? "local" : "parameter") + " address " +
              hex(address) + " needs " + std::to_string(align) + "-byte alignment",
          1u << lane);
  }
  const Kernel& k = kernel();
  if (space == Space::kParam) {
    if (writes(access)) fault("out_of_bounds", "write to kernel parameters", 1u << lane);
    if (address > k.param_bytes || bytes > k.param_bytes - address) {
      fault("out_of_bounds",
            "read of " + std::to_string(bytes) + " bytes at parameter offset " + std::to_string(address) + " of " +
                std::to_string(k.param_bytes),
            1u << lane);
    }
    *pointer = const_cast<u8*>(launch->params) + address;
    return;
  }
  if (address < kLocalBase || address - kLocalBase + bytes > k.local_bytes) {
    fault("out_of_bounds",
          std::string(verb(access)) + " of " + std::to_string(bytes) + " bytes at local address " + hex(address) +
              ", outside the thread's " + std::to_string(k.local_bytes) + " bytes",
          1u << lane);
  }
  size_t at = size_t(lane) * k.local_bytes + (address - kLocalBase);
  if (reads(access) && !writes(access) && launch->options.check_uninitialized) {
    for (u32 j = 0; j < bytes; ++j) {
      if (!local_written_[at + j])
        fault("uninitialized", "read of local address " + hex(address + j) + " that nothing wrote", 1u << lane);
    }
  }
  if (writes(access)) std::fill_n(local_written_.begin() + std::ptrdiff_t(at), bytes, u8(1));
  *pointer = local_.data() + at;
}

}  // namespace pagedkern::vgpu
