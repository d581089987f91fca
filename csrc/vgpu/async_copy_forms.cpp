// cp.async: copies of 4, 8 or 16 bytes by each thread, in groups or counted by an mbarrier.
#include <bit>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "vgpu/async_forms.h"
#include "vgpu/async_support.h"
#include "vgpu/registry.h"

namespace pagedkern::vgpu {
namespace {

constexpr u64 kCacheGlobal = 1, kGenericAddress = 2, kCacheHint = 4, kNoInc = 8;

class CopyOperation : public AsyncOperation {
 public:
  CopyOperation(Warp& warp, u32 lanes, u32 bytes) : AsyncOperation(warp, lanes), bytes_(bytes) {}
  const char* name() const override { return "cp.async"; }
  void perform(Cluster&, u32 which) override {
    for (u32 m = which; m; m &= m - 1) {
      const u32 lane = u32(std::countr_zero(m));
      std::memset(to[lane], 0, bytes_);
      std::memcpy(to[lane], from[lane], size[lane]);
    }
  }
  u8* to[kLanes];
  const u8* from[kLanes];
  u32 size[kLanes];  // bytes read; the rest of the copy is zero

 private:
  u32 bytes_;
};

// Operands: pool holds both addresses; op[0] is the source size (or the ignore-src predicate), imm the copy size.
void run_copy(Warp& warp, const Inst& inst, u32 mask) {
  const u32 bytes = u32(inst.imm);
  const i32* refs = pool_of(warp, inst);
  u64 to[kLanes], from[kLanes];
  lane_addresses(warp, refs, mask, to);
  lane_addresses(warp, refs + kAddressWords, mask, from);
  auto op = std::make_unique<CopyOperation>(warp, mask, bytes);
  u32 ignored = 0;
  const bool predicate = inst.aux;
  if (predicate) ignored = warp.pred(inst.op[0]) ^ (inst.negate & 1u ? kFullMask : 0u);
  u32 by_size[17] = {};
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    u32 size = bytes;
    if (!predicate && inst.op[0] != kNoOperand) size = warp.lanes<u32>(inst.op[0])[lane];
    if (ignored >> lane & 1) size = 0;
    if (size > bytes)
      warp.fault("invalid", "the source size " + std::to_string(size) + " is larger than the copy", 1u << lane);
    op->size[lane] = size;
    by_size[size] |= 1u << lane;
  }
  u8* sources[kLanes] = {};
  for (u32 size = 1; size <= bytes; ++size) {
    if (by_size[size]) warp.resolve(Space::kGlobal, from, by_size[size], size, bytes, Access::kRead, sources);
  }
  warp.resolve(Space::kShared, to, mask, bytes, bytes, Access::kWrite, op->to);
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    op->from[lane] = op->size[lane] ? sources[lane] : op->to[lane];
    const SharedSpot spot = shared_spot(warp, lane, to[lane], bytes, bytes, false);
    op->writes.push_back({spot.block, spot.offset, bytes, lane});
  }
  warp.block->cluster.async.issue(std::move(op), AsyncGroup::kCpAsync);
}

void decode_copy(DecodeContext& ctx, const Form& entry) {
  const bool hint = entry.tag & kCacheHint;
  const size_t least = 3 + (hint ? 1 : 0);
  ctx.require(ctx.count() == least || ctx.count() == least + 1, "the number of operands does not fit the form");
  u64 bytes = 0;
  ctx.require(ctx.constant_value(ctx.operand(2), &bytes), "the copy size must be a literal");
  ctx.require(bytes == 16 || (!(entry.tag & kCacheGlobal) && (bytes == 4 || bytes == 8)),
              "the copy size must be 4, 8 or 16 (16 with .cg)");
  std::vector<i32> pool;
  push_address(pool, address_operand(ctx, ctx.operand(0), false));
  push_address(pool, address_operand(ctx, ctx.operand(1), false));
  ctx.out().imm = bytes;
  ctx.out().ext = ctx.pool(pool);
  if (ctx.count() == least + 1) {
    const Operand& o = ctx.operand(3);
    if (ctx.register_bits(o) == 1 || o.negated) {
      bool negated = false;
      ctx.out().op[0] = ctx.src_pred(o, &negated);
      if (negated) ctx.out().negate |= 1;
      ctx.out().aux = 1;
    } else {
      ctx.out().op[0] = ctx.src(o, 32);
    }
  }
  if (hint) ctx.src(ctx.operand(ctx.count() - 1), 64);
  ctx.has_async();
}

void run_commit(Warp& warp, const Inst&, u32 mask) {
  warp.block->cluster.async.commit(AsyncGroup::kCpAsync, warp, mask);
}

void run_wait(Warp& warp, const Inst& inst, u32 mask) {
  warp.block->cluster.async.wait(AsyncGroup::kCpAsync, warp, mask, u32(inst.imm), false);
}

void run_wait_all(Warp& warp, const Inst&, u32 mask) {
  warp.block->cluster.async.wait_all(AsyncGroup::kCpAsync, warp, mask);
}

// cp.async.mbarrier.arrive: the lanes' earlier copies arrive on the object when they are done. Without .noinc the
// pending count is raised now, so that the arrival is not one of those the phase was initialised for.
void run_mbarrier_arrive(Warp& warp, const Inst& inst, u32 mask) {
  const i32* refs = pool_of(warp, inst);
  Cluster& cluster = warp.block->cluster;
  const u32 pc = warp.pc - 1;
  const bool noinc = inst.imm & kNoInc;
  Knowledge knowledge;
  warp.release(knowledge);
  for (u32 left = mask; left;) {
    const u64 address = lane_address(warp, refs, u32(std::countr_zero(left)));
    u32 same = 0;
    for (u32 m = left; m; m &= m - 1) {
      const u32 lane = u32(std::countr_zero(m));
      if (lane_address(warp, refs, lane) == address) same |= 1u << lane;
    }
    left &= ~same;
    const u32 first = u32(std::countr_zero(same));
    const SharedSpot spot = shared_spot(warp, first, address, 8, 8, inst.imm & kGenericAddress);
    MbarrierRecord* record;
    const Mbarrier before = mbarrier_load(warp, pc, first, spot, &record);
    Mbarrier after = before;
    for (u32 m = same; m && !noinc; m &= m - 1) {
      if (after.expect_one_more() != MbarrierError::kNone)
        warp.fault("invalid", "the mbarrier's pending count overflows", same);
    }
    mbarrier_store(cluster, spot, *record, before, after);
    const u64 token = mbarrier_token(spot, *record);
    cluster.async.after_prior(
        AsyncGroup::kCpAsync, warp, same,
        [&warp, pc, spot, knowledge](u32 lanes) {
          mbarrier_arrive(warp, pc, u32(std::countr_zero(lanes)), spot, u32(std::popcount(lanes)), &knowledge);
        },
        token);
  }
}

void decode_mbarrier_arrive(DecodeContext& ctx, const Form& entry) {
  ctx.require(ctx.count() == 1, "one operand is needed");
  std::vector<i32> pool;
  push_address(pool, address_operand(ctx, ctx.operand(0), entry.tag & kGenericAddress));
  ctx.out().imm = entry.tag;
  ctx.out().ext = ctx.pool(pool);
  ctx.has_async();
}

void decode_nothing(DecodeContext& ctx, const Form&) {
  ctx.require(ctx.count() == 0, "no operands are allowed");
}

void decode_wait(DecodeContext& ctx, const Form&) {
  u64 count = 0;
  ctx.require(ctx.count() == 1 && ctx.constant_value(ctx.operand(0), &count), "the number of groups must be a literal");
  ctx.out().imm = count;
}

}  // namespace

void register_copy_forms(Registry& registry) {
  for (const char* cache : {"ca", "cg"}) {
    for (const char* to : {".shared", ".shared::cta"}) {
      for (const char* hint : {"", ".L2::cache_hint"}) {
        for (const char* prefetch : {"", ".L2::64B", ".L2::128B", ".L2::256B"}) {
          const u64 tag = (cache[1] == 'g' ? kCacheGlobal : 0) | (*hint ? kCacheHint : 0);
          registry.add(std::string("cp.async.") + cache + to + ".global" + hint + prefetch, InstClass::kAsyncCopy,
                       decode_copy, run_copy, tag);
        }
      }
    }
  }
  registry.add("cp.async.commit_group", InstClass::kAsyncCopy, decode_nothing, run_commit);
  registry.add("cp.async.wait_group", InstClass::kAsyncCopy, decode_wait, run_wait);
  registry.add("cp.async.wait_all", InstClass::kAsyncCopy, decode_nothing, run_wait_all);
  for (const char* noinc : {"", ".noinc"}) {
    for (const char* space : {"", ".shared", ".shared::cta"}) {
      registry.add(std::string("cp.async.mbarrier.arrive") + noinc + space + ".b64", InstClass::kMbarrier,
                   decode_mbarrier_arrive, run_mbarrier_arrive, (*noinc ? kNoInc : 0) | (*space ? 0 : kGenericAddress));
    }
  }
}

}  // namespace pagedkern::vgpu
