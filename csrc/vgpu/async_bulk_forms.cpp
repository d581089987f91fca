// Bulk copies and reductions without a tensor map, st.async and red.async.
#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "vgpu/async_forms.h"
#include "vgpu/async_support.h"
#include "vgpu/registry.h"
#include "vgpu/tma_box.h"

namespace pagedkern::vgpu {
namespace {

// ---- operations ----

struct Reduction {
  bool on = false;
  ReduceOp op = ReduceOp::kAdd;
  ReduceType type = ReduceType::kU32;
  void apply(u8* to, const u8* from, u32 bytes) const {
    if (!on) {
      std::memcpy(to, from, bytes);
    } else {
      atomic_bulk_reduce(op, type, to, from, bytes / u32(reduce_type_bytes(type)));
    }
  }
};

// Into shared memory, counted by an mbarrier of the destination's block.
class BulkToShared : public AsyncOperation {
 public:
  BulkToShared(Warp& warp, u32 lane) : AsyncOperation(warp, 1u << lane) {}
  const char* name() const override { return "cp.async.bulk"; }
  void capture(Cluster&, u32) override {
    if (source_shared.block)
      data.assign(source_shared.block->shared.data() + source_shared.offset,
                  source_shared.block->shared.data() + source_shared.offset + bytes);
  }
  void perform(Cluster&, u32) override {
    reduction.apply(to.block->shared.data() + to.offset, source_shared.block ? data.data() : source_global, bytes);
    mbarrier_complete(*this, barrier, bytes, stamp);
  }
  SharedSpot to, barrier, source_shared;
  const u8* source_global = nullptr;
  u32 bytes = 0;
  Reduction reduction;
  std::vector<u8> data;
  VectorClock stamp;
};

// Out of shared memory into global memory, in the thread's bulk groups.
class BulkToGlobal : public AsyncOperation {
 public:
  BulkToGlobal(Warp& warp, u32 lane) : AsyncOperation(warp, 1u << lane) {}
  const char* name() const override { return "cp.async.bulk"; }
  void capture(Cluster&, u32) override {
    data.assign(from.block->shared.data() + from.offset, from.block->shared.data() + from.offset + bytes);
  }
  void perform(Cluster&, u32) override { reduction.apply(to, data.data(), bytes); }
  SharedSpot from;
  u8* to = nullptr;
  u32 bytes = 0;
  Reduction reduction;
  std::vector<u8> data;
};

// st.async and red.async: a register's worth of bytes for each lane.
class RemoteStore : public AsyncOperation {
 public:
  RemoteStore(Warp& warp, u32 lane, const char* name) : AsyncOperation(warp, 1u << lane), name_(name) {}
  const char* name() const override { return name_; }
  void perform(Cluster&, u32) override {
    reduction.apply(to.block->shared.data() + to.offset, data, bytes);
    mbarrier_complete(*this, barrier, bytes, stamp);
  }
  SharedSpot to, barrier;
  u8 data[16];
  u32 bytes = 0;
  Reduction reduction;
  VectorClock stamp;

 private:
  const char* name_;
};

// ---- cp.async.bulk and cp.reduce.async.bulk ----

// Form::tag and Inst::imm
constexpr u64 kFromShared = 1, kToGlobal = 2, kMulticast = 4, kHint = 8, kReduce = 16;
constexpr int kOpShift = 8, kTypeShift = 16, kWidthShift = 24, kVectorShift = 32;

Reduction reduction_of(u64 tag) {
  Reduction r;
  r.on = tag & kReduce;
  r.op = ReduceOp(tag >> kOpShift & 0xff);
  r.type = ReduceType(tag >> kTypeShift & 0xff);
  return r;
}

u32 bulk_size(Warp& warp, const Inst& inst, u32 lane) {
  const u32 bytes = warp.lanes<u32>(inst.op[0])[lane];
  if (bytes % 16)
    warp.fault("misaligned", "the size " + std::to_string(bytes) + " of a bulk copy is no multiple of 16", 1u << lane);
  return bytes;
}

void issue_to_shared(Warp& warp, const Inst& inst, u32 lane, const SharedSpot& to, const SharedSpot& barrier,
                     u32 bytes) {
  const i32* refs = pool_of(warp, inst);
  const u64 from = lane_address(warp, refs + kAddressWords, lane);
  auto op = std::make_unique<BulkToShared>(warp, lane);
  op->to = to;
  op->barrier = barrier;
  op->bytes = bytes;
  op->reduction = reduction_of(inst.imm);
  if (inst.imm & kFromShared) {
    op->source_shared = shared_spot(warp, lane, from, bytes, 16, false);
    async_proxy_read(warp, lane, op->source_shared, bytes);
    op->reads.push_back({op->source_shared.block, op->source_shared.offset, bytes, lane});
  } else {
    op->source_global = global_range(warp, warp.pc - 1, lane, from, bytes, 16, Access::kRead);
  }
  MbarrierRecord* record;
  mbarrier_load(warp, warp.pc - 1, lane, barrier, &record);
  op->token = mbarrier_token(barrier, *record);
  op->stamp = async_proxy_stamp(warp);
  if (op->reduction.on) {
    async_proxy_read(warp, lane, to, bytes);  // unordered reductions of the same bytes are no conflict
  } else {
    async_proxy_write(warp, lane, to, bytes, op->stamp);
    op->writes.push_back({to.block, to.offset, bytes, lane});
  }
  warp.block->cluster.async.issue(std::move(op), AsyncGroup::kNone);
}

// The blocks a multicast reaches: the same offsets in each.
void run_to_shared(Warp& warp, const Inst& inst, u32 mask) {
  const i32* refs = pool_of(warp, inst);
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    const u32 bytes = bulk_size(warp, inst, lane);
    if (bytes == 0) continue;
    const SharedSpot to = shared_spot(warp, lane, lane_address(warp, refs, lane), bytes, 16, false);
    const SharedSpot barrier = shared_spot(warp, lane, lane_address(warp, refs + 2 * kAddressWords, lane), 8, 8, false);
    warp.worker->counters.bulk_bytes += bytes;
    if (!(inst.imm & kMulticast)) {
      issue_to_shared(warp, inst, lane, to, barrier, bytes);
      continue;
    }
    for (const MulticastTarget& t : multicast_targets(warp, lane, warp.lanes<u16>(inst.op[1])[lane], to, barrier)) {
      issue_to_shared(warp, inst, lane, t.to, t.barrier, bytes);
    }
  }
}

void run_to_global(Warp& warp, const Inst& inst, u32 mask) {
  const i32* refs = pool_of(warp, inst);
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    const u32 bytes = bulk_size(warp, inst, lane);
    if (bytes == 0) continue;
    auto op = std::make_unique<BulkToGlobal>(warp, lane);
    op->bytes = bytes;
    op->reduction = reduction_of(inst.imm);
    op->from = shared_spot(warp, lane, lane_address(warp, refs + kAddressWords, lane), bytes, 16, false);
    async_proxy_read(warp, lane, op->from, bytes);
    op->reads.push_back({op->from.block, op->from.offset, bytes, lane});
    op->to = global_range(warp, warp.pc - 1, lane, lane_address(warp, refs, lane), bytes, 16,
                          op->reduction.on ? Access::kAtomic : Access::kWrite);
    warp.worker->counters.bulk_bytes += bytes;
    warp.block->cluster.async.issue(std::move(op), AsyncGroup::kBulk);
  }
}

// [dst], [src], size {, [mbar]} {, mask} {, policy}
void decode_bulk(DecodeContext& ctx, const Form& entry) {
  const bool barrier = !(entry.tag & kToGlobal);
  const size_t want = 3 + (barrier ? 1 : 0) + (entry.tag & kMulticast ? 1 : 0) + (entry.tag & kHint ? 1 : 0);
  ctx.require(ctx.count() == want, "the number of operands does not fit the form");
  std::vector<i32> pool;
  push_address(pool, address_operand(ctx, ctx.operand(0), false));
  push_address(pool, address_operand(ctx, ctx.operand(1), false));
  if (barrier) push_address(pool, address_operand(ctx, ctx.operand(3), false));
  ctx.out().op[0] = ctx.src(ctx.operand(2), 32);
  if (entry.tag & kMulticast) ctx.out().op[1] = ctx.src(ctx.operand(4), 16);
  if (entry.tag & kHint) ctx.src(ctx.operand(want - 1), 64);
  ctx.out().imm = entry.tag;
  ctx.out().ext = ctx.pool(pool);
  ctx.has_async();
}

// A hint for the L2 cache: nothing to execute beyond the checks of its operands.
void run_prefetch(Warp& warp, const Inst& inst, u32 mask) {
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    bulk_size(warp, inst, lane);
    if (lane_address(warp, pool_of(warp, inst), lane) % 16)
      warp.fault("misaligned", "a bulk prefetch needs a 16-byte aligned address", 1u << lane);
  }
}

void decode_prefetch(DecodeContext& ctx, const Form& entry) {
  const bool hint = entry.tag & kHint;
  ctx.require(ctx.count() == (hint ? 3u : 2u), "the number of operands does not fit the form");
  std::vector<i32> pool;
  push_address(pool, address_operand(ctx, ctx.operand(0), false));
  ctx.out().op[0] = ctx.src(ctx.operand(1), 32);
  if (hint) ctx.src(ctx.operand(2), 64);
  ctx.out().ext = ctx.pool(pool);
}

// ---- groups ----

void run_commit(Warp& warp, const Inst&, u32 mask) {
  warp.block->cluster.async.commit(AsyncGroup::kBulk, warp, mask);
}

void run_wait(Warp& warp, const Inst& inst, u32 mask) {
  warp.block->cluster.async.wait(AsyncGroup::kBulk, warp, mask, u32(inst.imm), inst.aux);
}

void decode_nothing(DecodeContext& ctx, const Form&) {
  ctx.require(ctx.count() == 0, "no operands are allowed");
}

void decode_wait(DecodeContext& ctx, const Form& entry) {
  u64 count = 0;
  ctx.require(ctx.count() == 1 && ctx.constant_value(ctx.operand(0), &count), "the number of groups must be a literal");
  ctx.out().imm = count;
  ctx.out().aux = u32(entry.tag);
}

// ---- st.async, red.async ----

void run_remote_store(Warp& warp, const Inst& inst, u32 mask) {
  const i32* refs = pool_of(warp, inst);
  const u32 width = u32(inst.imm >> kWidthShift & 0xff), vector = u32(inst.imm >> kVectorShift & 0xff);
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    const Reduction reduction = reduction_of(inst.imm);
    auto op = std::make_unique<RemoteStore>(warp, lane, reduction.on ? "red.async" : "st.async");
    op->bytes = width * vector;
    op->reduction = reduction;
    op->to = shared_spot(warp, lane, lane_address(warp, refs, lane), op->bytes, op->bytes, false);
    op->barrier = shared_spot(warp, lane, lane_address(warp, refs + kAddressWords, lane), 8, 8, false);
    for (u32 k = 0; k < vector; ++k) {
      const OperandRef value = refs[2 * kAddressWords + k];
      if (width == 4) {
        std::memcpy(op->data + 4 * k, &warp.lanes<u32>(value)[lane], 4);
      } else {
        std::memcpy(op->data + 8 * k, &warp.lanes<u64>(value)[lane], 8);
      }
    }
    if (op->to.block != op->barrier.block)
      warp.fault("invalid", "the mbarrier lies in another block than the destination", 1u << lane);
    MbarrierRecord* record;
    mbarrier_load(warp, warp.pc - 1, lane, op->barrier, &record);
    op->token = mbarrier_token(op->barrier, *record);
    op->stamp = async_proxy_stamp(warp);
    if (!reduction.on) {
      async_proxy_write(warp, lane, op->to, op->bytes, op->stamp);
      op->writes.push_back({op->to.block, op->to.offset, op->bytes, lane});
    }
    warp.block->cluster.async.issue(std::move(op), AsyncGroup::kNone);
  }
}

void decode_remote_store(DecodeContext& ctx, const Form& entry) {
  ctx.require(ctx.count() == 3, "three operands are needed");
  const u32 width = u32(entry.tag >> kWidthShift & 0xff), vector = u32(entry.tag >> kVectorShift & 0xff);
  const Operand& value = ctx.operand(1);
  const std::vector<Operand> single{value};
  const std::vector<Operand>& values = value.kind == Operand::Kind::kVector ? value.elements : single;
  ctx.require(values.size() == vector, "the number of values does not fit the form");
  std::vector<i32> pool;
  push_address(pool, address_operand(ctx, ctx.operand(0), false));
  push_address(pool, address_operand(ctx, ctx.operand(2), false));
  const bool is_float = entry.name.find(".f32") != std::string::npos || entry.name.find(".f64") != std::string::npos;
  for (const Operand& o : values)
    pool.push_back(ctx.src(o, int(8 * width), !is_float ? Imm::kInteger : width == 4 ? Imm::kFloat32 : Imm::kFloat64));
  ctx.out().imm = entry.tag;
  ctx.out().ext = ctx.pool(pool);
  ctx.has_async();
}

// ---- tables ----

struct NamedReduction {
  const char* op;
  const char* type;
  ReduceOp code;
  ReduceType kind;
};

std::vector<NamedReduction> reductions() {
  static constexpr const char* kOps[] = {"add", "min", "max", "inc", "dec", "and", "or", "xor"};
  static constexpr const char* kTypes[] = {"u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64", "b32", "b64"};
  std::vector<NamedReduction> out;
  for (size_t o = 0; o < std::size(kOps); ++o) {
    for (size_t t = 0; t < std::size(kTypes); ++t) {
      if (bulk_reduce_supported(ReduceOp(o), ReduceType(t)))
        out.push_back({kOps[o], kTypes[t], ReduceOp(o), ReduceType(t)});
    }
  }
  return out;
}

u64 reduction_tag(const NamedReduction& r) {
  return kReduce | u64(r.code) << kOpShift | u64(r.kind) << kTypeShift;
}

void register_bulk_reductions(Registry& registry) {
  for (const NamedReduction& r : reductions()) {
    // The half-precision sums carry .noftz; the forms into shared memory only exist for integers.
    const bool half = r.kind == ReduceType::kF16 || r.kind == ReduceType::kBF16;
    const bool is_float = half || r.kind == ReduceType::kF32 || r.kind == ReduceType::kF64;
    const std::string tail = std::string(".") + r.op + (half && r.code == ReduceOp::kAdd ? ".noftz." : ".") + r.type;
    for (const char* hint : {"", ".L2::cache_hint"}) {
      registry.add("cp.reduce.async.bulk.global.shared::cta.bulk_group" + std::string(hint) + tail,
                   InstClass::kAsyncCopy, decode_bulk, run_to_global,
                   reduction_tag(r) | kToGlobal | kFromShared | (*hint ? kHint : 0));
    }
    if (is_float || ((r.kind == ReduceType::kU64 || r.kind == ReduceType::kS64) && r.code != ReduceOp::kAdd) ||
        r.kind == ReduceType::kB64)
      continue;
    registry.add("cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes" + tail,
                 InstClass::kAsyncCopy, decode_bulk, run_to_shared, reduction_tag(r) | kFromShared);
  }
}

void register_remote_stores(Registry& registry) {
  for (const char* weak : {"", ".weak"}) {
    for (const char* space : {"", ".shared::cluster"}) {
      for (const char* type : {"b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"}) {
        const u64 width = type[1] == '3' ? 4 : 8;
        for (u64 vector : {1, 2, 4}) {
          if (width * vector > 16) continue;
          const std::string v = vector == 1 ? "" : ".v" + std::to_string(vector);
          registry.add(std::string("st.async") + weak + space + ".mbarrier::complete_tx::bytes" + v + "." + type,
                       InstClass::kAsyncCopy, decode_remote_store, run_remote_store,
                       width << kWidthShift | vector << kVectorShift);
        }
      }
    }
  }
  for (const NamedReduction& r : reductions()) {
    const bool word = r.kind == ReduceType::kU32 || r.kind == ReduceType::kS32 || r.kind == ReduceType::kB32;
    if (!word && !(r.kind == ReduceType::kU64 && r.code == ReduceOp::kAdd)) continue;
    for (const char* space : {"", ".shared::cluster"}) {
      registry.add(
          std::string("red.async.relaxed.cluster") + space + ".mbarrier::complete_tx::bytes." + r.op + "." + r.type,
          InstClass::kAsyncCopy, decode_remote_store, run_remote_store,
          reduction_tag(r) | u64(word ? 4 : 8) << kWidthShift | 1ull << kVectorShift);
    }
  }
}

}  // namespace

void register_bulk_forms(Registry& registry) {
  const std::string counted = ".mbarrier::complete_tx::bytes";
  for (const char* hint : {"", ".L2::cache_hint"}) {
    const u64 h = *hint ? kHint : 0;
    registry.add("cp.async.bulk.shared::cluster.global" + counted + hint, InstClass::kAsyncCopy, decode_bulk,
                 run_to_shared, h);
    registry.add("cp.async.bulk.shared::cta.global" + counted + hint, InstClass::kAsyncCopy, decode_bulk, run_to_shared,
                 h);
    registry.add("cp.async.bulk.shared::cluster.global" + counted + ".multicast::cluster" + hint, InstClass::kAsyncCopy,
                 decode_bulk, run_to_shared, h | kMulticast);
    registry.add(std::string("cp.async.bulk.global.shared::cta.bulk_group") + hint, InstClass::kAsyncCopy, decode_bulk,
                 run_to_global, h | kToGlobal | kFromShared);
    registry.add(std::string("cp.async.bulk.prefetch.L2.global") + hint, InstClass::kAsyncCopy, decode_prefetch,
                 run_prefetch, h);
  }
  registry.add("cp.async.bulk.shared::cluster.shared::cta" + counted, InstClass::kAsyncCopy, decode_bulk, run_to_shared,
               kFromShared);
  register_bulk_reductions(registry);
  register_remote_stores(registry);
  registry.add("cp.async.bulk.commit_group", InstClass::kAsyncCopy, decode_nothing, run_commit);
  registry.add("cp.async.bulk.wait_group", InstClass::kAsyncCopy, decode_wait, run_wait, 0);
  registry.add("cp.async.bulk.wait_group.read", InstClass::kAsyncCopy, decode_wait, run_wait, 1);
}

}  // namespace pagedkern::vgpu
