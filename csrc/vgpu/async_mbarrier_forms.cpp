// Instruction forms of mbarrier.
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "vgpu/async_forms.h"
#include "vgpu/async_support.h"
#include "vgpu/registry.h"

namespace pagedkern::vgpu {
namespace {

// Form::tag
constexpr u64 kGenericAddress = 1, kRelaxed = 2, kDrop = 4, kExpect = 8, kNoComplete = 16, kParity = 32, kTry = 64,
              kRemote = 128;

SharedSpot spot_of(Warp& warp, const Inst& inst, u32 lane) {
  return shared_spot(warp, lane, lane_address(warp, pool_of(warp, inst), lane), 8, 8, inst.imm & kGenericAddress);
}

void check(Warp& warp, u32 lane, MbarrierError error) {
  if (error != MbarrierError::kNone)
    warp.fault("invalid", std::string("mbarrier: ") + mbarrier_error_text(error), 1u << lane);
}

u32 value_at(const Warp& warp, OperandRef ref, u32 lane, u32 otherwise) {
  return ref == kNoOperand ? otherwise : warp.lanes<u32>(ref)[lane];
}

void run_init(Warp& warp, const Inst& inst, u32 mask) {
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    const u64 address = lane_address(warp, pool_of(warp, inst), lane);
    u8* pointers[kLanes];
    u64 addresses[kLanes];
    addresses[lane] = address;
    warp.resolve(inst.imm & kGenericAddress ? Space::kGeneric : Space::kShared, addresses, 1u << lane, 8, 8,
                 Access::kWrite, pointers);
    const SharedSpot spot = shared_spot(warp, lane, address, 8, 8, inst.imm & kGenericAddress);
    MbarrierRecord& record = warp.block->cluster.async.mbarrier(*spot.block, spot.offset);
    const u64 phase = record.phase + 1;  // tokens of an earlier life never match
    record = MbarrierRecord();
    record.phase = record.observed = phase;
    record.live = true;
    check(warp, lane, Mbarrier::init(value_at(warp, inst.op[0], lane, 0), record.word));
    std::memcpy(pointers[lane], &record.word, 8);
  }
}

void run_inval(Warp& warp, const Inst& inst, u32 mask) {
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    const SharedSpot spot = spot_of(warp, inst, lane);
    MbarrierRecord* record;
    mbarrier_load(warp, warp.pc - 1, lane, spot, &record);
    record->live = false;
    std::memset(spot.block->shared.data() + spot.offset, 0, 8);
  }
}

// expect_tx and complete_tx by a thread.
void run_tx(Warp& warp, const Inst& inst, u32 mask) {
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    const SharedSpot spot = spot_of(warp, inst, lane);
    MbarrierRecord* record;
    const Mbarrier before = mbarrier_load(warp, warp.pc - 1, lane, spot, &record);
    Mbarrier after = before;
    const u32 bytes = value_at(warp, inst.op[0], lane, 0);
    check(warp, lane, inst.imm & kExpect ? after.expect_tx(bytes) : after.complete_tx(bytes));
    mbarrier_store(warp.block->cluster, spot, *record, before, after);
  }
}

// op[0] state (may be missing), op[1] count or tx bytes.
void run_arrive(Warp& warp, const Inst& inst, u32 mask) {
  Knowledge knowledge;
  if (!(inst.imm & kRelaxed)) warp.release(knowledge);
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    const SharedSpot spot = spot_of(warp, inst, lane);
    MbarrierRecord* record;
    const Mbarrier before = mbarrier_load(warp, warp.pc - 1, lane, spot, &record);
    Mbarrier after = before;
    mbarrier_gather(*record, knowledge);
    u32 count = value_at(warp, inst.op[1], lane, 1);
    if (inst.imm & kExpect) {
      check(warp, lane, after.expect_tx(count));
      count = 1;
    }
    if (inst.op[0] != kNoOperand) warp.lanes<u64>(inst.op[0])[lane] = before.state();
    check(warp, lane, inst.imm & kDrop ? after.arrive_drop(count) : after.arrive(count));
    if ((inst.imm & kNoComplete) && after.phase != before.phase) {
      warp.fault("invalid", "the arrival completes the phase in spite of .noComplete", 1u << lane);
    }
    mbarrier_store(warp.block->cluster, spot, *record, before, after);
  }
}

std::string waiting_for(const SharedSpot& spot, const Mbarrier& m, bool parity) {
  return "phase parity " + std::to_string(parity) + " of the mbarrier at shared offset " +
         std::to_string(spot.offset + kSharedBase) + " (" + std::to_string(m.pending) + " arrivals and " +
         std::to_string(m.tx) + " bytes short)";
}

// op[0] predicate, op[1] state or parity.
void run_wait(Warp& warp, const Inst& inst, u32 mask) {
  Cluster& cluster = warp.block->cluster;
  u32 done = 0;
  std::string missing;
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    const SharedSpot spot = spot_of(warp, inst, lane);
    MbarrierRecord* record;
    const Mbarrier bar = mbarrier_load(warp, warp.pc - 1, lane, spot, &record);
    bool parity;
    if (inst.imm & kParity) {
      parity = warp.lanes<u32>(inst.op[1])[lane] & 1;  // compilers pass -1 for 1
    } else {
      parity = Mbarrier::state_parity(warp.lanes<u64>(inst.op[1])[lane]);
    }
    if (!bar.completed(parity)) {
      if (missing.empty()) missing = waiting_for(spot, bar, parity);
      continue;
    }
    done |= 1u << lane;
    if (!(inst.imm & kRelaxed) && !record->released.seen.at.empty()) warp.acquire(record->released);
    for (; record->observed < record->phase; ++record->observed) {
      MbarrierRecord past;
      past.phase = record->observed;
      cluster.async.observed(mbarrier_token(spot, past));
    }
  }
  u32& predicate = warp.pred(inst.op[0]);
  predicate = (predicate & ~mask) | done;
  if (done != mask) warp.poll(missing);
}

void run_pending_count(Warp& warp, const Inst& inst, u32 mask) {
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    warp.lanes<u32>(inst.op[0])[lane] = Mbarrier::state_pending(warp.lanes<u64>(inst.op[1])[lane]);
  }
}

// ---- decoding ----

void put_address(DecodeContext& ctx, const Form& entry, size_t k) {
  std::vector<i32> pool;
  push_address(pool, address_operand(ctx, ctx.operand(k), entry.tag & kGenericAddress));
  ctx.out().imm = entry.tag;
  ctx.out().ext = ctx.pool(pool);
}

void decode_init(DecodeContext& ctx, const Form& entry) {  // init, expect_tx, complete_tx
  ctx.require(ctx.count() == 2, "two operands are needed");
  put_address(ctx, entry, 0);
  ctx.out().op[0] = ctx.src(ctx.operand(1), 32);
  ctx.has_async();
}

void decode_inval(DecodeContext& ctx, const Form& entry) {
  ctx.require(ctx.count() == 1, "one operand is needed");
  put_address(ctx, entry, 0);
}

void decode_arrive(DecodeContext& ctx, const Form& entry) {
  const bool has_state = ctx.count() > 0 && ctx.operand(0).kind != Operand::Kind::kAddress;
  const size_t at = has_state ? 1 : 0;
  const bool needs_count = entry.tag & (kExpect | kNoComplete);
  ctx.require(ctx.count() == at + 2 || (ctx.count() == at + 1 && !needs_count),
              "the number of operands does not fit the form");
  ctx.require(has_state || (entry.tag & kRemote), "the state operand is missing");
  if (has_state && ctx.operand(0).kind != Operand::Kind::kSink) {
    ctx.require(!(entry.tag & kRemote), "an arrival in .shared::cluster returns no state");
    ctx.out().op[0] = ctx.dst(ctx.operand(0), 64);
  }
  put_address(ctx, entry, at);
  if (ctx.count() == at + 2) ctx.out().op[1] = ctx.src(ctx.operand(at + 1), 32);
}

void decode_wait(DecodeContext& ctx, const Form& entry) {
  ctx.require(ctx.count() == 3 || (ctx.count() == 4 && (entry.tag & kTry)),
              "the number of operands does not fit the form");
  ctx.out().op[0] = ctx.dst(ctx.operand(0), 1);
  put_address(ctx, entry, 1);
  ctx.out().op[1] = ctx.src(ctx.operand(2), entry.tag & kParity ? 32 : 64);
  if (ctx.count() == 4) ctx.src(ctx.operand(3), 32);
}

struct Space64 {
  const char* text;
  u64 tag;
};

void register_arrivals(Registry& registry) {
  const Space64 spaces[] = {{"", kGenericAddress}, {".shared", 0}, {".shared::cta", 0}, {".shared::cluster", kRemote}};
  const char* orders[] = {"", ".release.cta", ".release.cluster", ".relaxed.cta", ".relaxed.cluster"};
  for (const char* op : {"arrive", "arrive_drop"}) {
    for (const char* expect : {"", ".expect_tx"}) {
      for (const char* order : orders) {
        for (const Space64& space : spaces) {
          const u64 tag = space.tag | (op[6] ? kDrop : 0) | (*expect ? kExpect : 0) |
                          (std::string(order).starts_with(".relaxed") ? kRelaxed : 0);
          registry.add(std::string("mbarrier.") + op + expect + order + space.text + ".b64", InstClass::kMbarrier,
                       decode_arrive, run_arrive, tag);
        }
      }
    }
    for (const char* order : {"", ".release.cta"}) {
      for (const Space64& space : spaces) {
        if (space.tag & kRemote) continue;
        registry.add(std::string("mbarrier.") + op + ".noComplete" + order + space.text + ".b64", InstClass::kMbarrier,
                     decode_arrive, run_arrive, space.tag | (op[6] ? kDrop : 0) | kNoComplete);
      }
    }
  }
}

void register_waits(Registry& registry) {
  const Space64 spaces[] = {{"", kGenericAddress}, {".shared", 0}, {".shared::cta", 0}};
  for (const char* op : {"test_wait", "try_wait"}) {
    for (const char* parity : {"", ".parity"}) {
      for (const char* order : {"", ".acquire.cta", ".acquire.cluster", ".relaxed.cta", ".relaxed.cluster"}) {
        for (const Space64& space : spaces) {
          const u64 tag = space.tag | (op[1] == 'r' ? kTry : 0) | (*parity ? kParity : 0) |
                          (order[0] && order[1] == 'r' ? kRelaxed : 0);
          registry.add(std::string("mbarrier.") + op + parity + order + space.text + ".b64", InstClass::kMbarrier,
                       decode_wait, run_wait, tag);
        }
      }
    }
  }
}

}  // namespace

void register_mbarrier_forms(Registry& registry) {
  registry.any_order("mbarrier");
  const Space64 spaces[] = {{"", kGenericAddress}, {".shared", 0}, {".shared::cta", 0}};
  for (const Space64& space : spaces) {
    const std::string end = std::string(space.text) + ".b64";
    registry.add("mbarrier.init" + end, InstClass::kMbarrier, decode_init, run_init, space.tag);
    registry.add("mbarrier.inval" + end, InstClass::kMbarrier, decode_inval, run_inval, space.tag);
  }
  for (const char* op : {"expect_tx", "complete_tx"}) {
    for (const char* order : {"", ".relaxed.cta", ".relaxed.cluster"}) {
      for (const char* space : {"", ".shared", ".shared::cta", ".shared::cluster"}) {
        const u64 tag = (*space ? 0 : kGenericAddress) | (op[0] == 'e' ? kExpect : 0);
        registry.add(std::string("mbarrier.") + op + order + space + ".b64", InstClass::kMbarrier, decode_init, run_tx,
                     tag);
      }
    }
  }
  register_arrivals(registry);
  register_waits(registry);
  registry.add("mbarrier.pending_count.b64", InstClass::kMbarrier, "Wx", run_pending_count);
}

}  // namespace pagedkern::vgpu
