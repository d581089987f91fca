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

void Warp::resolve_global(const u64* addresses, u32 mask, u32 bytes, u32 align, Access access, u8** pointers) {
  Allocation* a = last_allocation_;
  u64 bits = 0, low = ~0ull, high = 0;
  for (u32 lane = 0; lane < kLanes; ++lane) {
    if (!(mask >> lane & 1)) continue;
    u64 address = addresses[lane];
    bits |= address;
    low = std::min(low, address);
    high = std::max(high, address);
    pointers[lane] = reinterpret_cast<u8*>(address);
  }
  if (bits & (align - 1)) {
    for (u32 m = mask; m; m &= m - 1) {
      u32 lane = u32(std::countr_zero(m));
      if (addresses[lane] & (align - 1)) {
        fault("misaligned",
              std::string(verb(access)) + " at global address " + hex(addresses[lane]) + " needs " +
                  std::to_string(align) + "-byte alignment",
              1u << lane);
      }
    }
  }
  if (!a || !a->contains(low, 1)) a = launch->memory->find(low);
  bool one = a && !a->freed && a->contains(low, bytes) && a->contains(high, bytes) && !(a->read_only && writes(access));
  if (one) last_allocation_ = a;
  const bool count = launch->options.counters;
  if (!one || a->written || count) {
    bool same = one;
    for (u32 m = mask; m; m &= m - 1) {
      u32 lane = u32(std::countr_zero(m));
      u64 address = addresses[lane];
      Allocation* own = same ? a : launch->memory->find(address);
      if (!own || own->freed || !own->contains(address, bytes) || (own->read_only && writes(access))) {
        fault_global(address, bytes, lane, access);
      }
      if (own->written) {
        if (reads(access) && launch->options.check_uninitialized && !own->written->all(address - own->base, bytes)) {
          fault("uninitialized",
                "read of " + std::to_string(bytes) + " bytes at global address " + hex(address) + ", '" + own->name +
                    "' + " + std::to_string(address - own->base) + ", that nothing wrote",
                1u << lane);
        }
        if (writes(access)) own->written->set(address - own->base, bytes);
      } else if (same) {
        break;
      }
    }
  }
  if (!count) return;
  u64 sectors[kLanes * 2];
  u32 n = distinct_sectors(addresses, mask, bytes, sectors);
  Counters& c = worker->counters;
  u64 moved = u64(std::popcount(mask)) * bytes;
  if (reads(access)) {
    c.global_load_bytes += moved;
    c.global_load_requests += 1;
    c.global_load_sectors += n;
  }
  if (writes(access)) {
    c.global_store_bytes += moved;
    c.global_store_requests += 1;
    c.global_store_sectors += n;
  }
  for (u32 k = 0; k < n; ++k) {
    Allocation* own = one ? a : launch->memory->find(std::max(sectors[k] * kSectorBytes, low));
    if (!own) own = launch->memory->find(sectors[k] * kSectorBytes + kSectorBytes - 1);
    if (!own || !own->read_sectors) continue;
    u64 bit = sectors[k] - own->first_sector();
    if (reads(access)) own->read_sectors->set_one(bit);
    if (writes(access)) own->write_sectors->set_one(bit);
  }
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

void Warp::resolve_shared(const u64* addresses, u32 mask, u32 bytes, u32 align, Access access, u8** pointers) {
  u32 offsets[kLanes];
  bool own = true;
  u64 bits = 0;
  for (u32 m = mask; m; m &= m - 1) {
    u32 lane = u32(std::countr_zero(m));
    bits |= addresses[lane];
    Block& target = shared_target(lane, addresses[lane], bytes, &offsets[lane]);
    own &= &target == block;
    pointers[lane] = target.shared.data() + offsets[lane];
  }
  if (bits & (align - 1)) {
    for (u32 m = mask; m; m &= m - 1) {
      u32 lane = u32(std::countr_zero(m));
      if (addresses[lane] & (align - 1)) {
        fault("misaligned",
              std::string(verb(access)) + " at shared address " + hex(addresses[lane]) + " needs " +
                  std::to_string(align) + "-byte alignment",
              1u << lane);
      }
    }
  }
  const LaunchOptions& options = launch->options;
  if (!block->cluster.async.idle() && options.check_async) {
    for (u32 m = mask; m; m &= m - 1) {
      u32 lane = u32(std::countr_zero(m));
      u32 offset;
      Block& target = shared_target(lane, addresses[lane], bytes, &offset);
      block->cluster.async.check_shared(*this, lane, target, offset, bytes, writes(access));
    }
  }
  for (u32 m = mask; m; m &= m - 1) {
    u32 lane = u32(std::countr_zero(m));
    Block& target = own ? *block
                        : *block->cluster.block((u32(addresses[lane]) >> kSharedRankShift)
                                                    ? (u32(addresses[lane]) >> kSharedRankShift) - 1
                                                    : block->rank);
    if (reads(access) && options.check_uninitialized && !target.shadow.written(offsets[lane], bytes)) {
      fault("uninitialized",
            "read of " + std::to_string(bytes) + " bytes at shared address " + hex(addresses[lane]) +
                " that nothing wrote",
            1u << lane);
    }
    if (writes(access)) target.shadow.mark_written(offsets[lane], bytes);
    if (!strong(access) && options.check_races && target.shadow.races()) {
      RaceReport race = target.shadow.access(offsets[lane], bytes, writes(access), actor, knowledge.seen);
      if (race.found) {
        const std::string text = std::string(verb(access)) + " at shared address " + hex(race.offset + kSharedBase) +
                                 " races with a " + (race.other_writes ? "write" : "read") + " by " +
                                 block->cluster.actor_name(epoch_actor(race.other)) + ": no barrier orders them";
        if (!same_value || !race.other_writes) fault("race", text, 1u << lane);
        same_value->lanes |= 1u << lane;
        same_value->conflict = text;
      }
    }
  }
  if (!options.counters) return;
  u32 fewest = 0;
  u32 wavefronts = shared_wavefronts(offsets, mask, bytes, &fewest);
  Counters& c = worker->counters;
  if (reads(access)) c.shared_load_wavefronts += wavefronts;
  if (writes(access)) c.shared_store_wavefronts += wavefronts;
  c.shared_bank_conflicts += wavefronts - fewest;
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
