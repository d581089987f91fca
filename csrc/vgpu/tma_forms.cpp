// Tensor copies (TMA) and tensormap instructions.
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
#include "vgpu/tma_map.h"

namespace pagedkern::vgpu {
namespace {

constexpr u32 kSwizzleChunk = 16;
constexpr u32 kBoxAlignment = 128;
constexpr u32 kMaxRowBytes = 256 * 8;

// Form::tag and Inst::imm: the rank in the low bits.
constexpr u64 kRankMask = 7, kMulticast = 8, kHint = 16, kReduce = 32;
constexpr int kOpShift = 8;

// Copies a row of the box between a buffer and shared memory, through the swizzle of the shared address.
template <typename Copy>
void through_swizzle(const TensorMap& map, const SharedSpot& spot, const TmaRow& row, Copy copy) {
  u8* shared = spot.block->shared.data();
  const SmemSwizzle mode = map.smem_swizzle();
  for (u32 at = 0; at < row.bytes; at += kSwizzleChunk) {
    const u32 address = smem_swizzle(kSharedBase + spot.offset + row.shared_offset + at, mode);
    copy(shared + (address - kSharedBase), at);
  }
}

class TensorLoad : public AsyncOperation {
 public:
  TensorLoad(Warp& warp, u32 lane) : AsyncOperation(warp, 1u << lane) {}
  const char* name() const override { return "cp.async.bulk.tensor"; }
  void perform(Cluster&, u32) override {
    u8 buffer[kMaxRowBytes];
    const u64 fill = tma_fill_element(map);
    const u32 element = u32(tma_type_bytes(map.type));
    for (const TmaRow& row : rows) {
      if (row.begin > 0 || row.end < row.bytes) {
        for (u32 at = 0; at < row.bytes; at += element) std::memcpy(buffer + at, &fill, element);
      }
      if (row.begin < row.end) {
        std::memcpy(buffer + row.begin, reinterpret_cast<const u8*>(row.global), row.end - row.begin);
        tma_convert_loaded(map, buffer + row.begin, row.end - row.begin);
      }
      through_swizzle(map, to, row, [&](u8* shared, u32 at) { std::memcpy(shared, buffer + at, kSwizzleChunk); });
    }
    mbarrier_complete(*this, barrier, u32(map.box_bytes()), stamp);
  }
  TensorMap map;
  std::vector<TmaRow> rows;
  SharedSpot to, barrier;
  VectorClock stamp;
};

class TensorStore : public AsyncOperation {
 public:
  TensorStore(Warp& warp, u32 lane) : AsyncOperation(warp, 1u << lane) {}
  const char* name() const override { return "cp.async.bulk.tensor"; }
  void capture(Cluster&, u32) override {
    data.resize(map.box_bytes());
    for (const TmaRow& row : rows) {
      through_swizzle(map, from, row, [&](u8* shared, u32 at) {
        std::memcpy(data.data() + row.shared_offset + at, shared, kSwizzleChunk);
      });
    }
  }
  void perform(Cluster&, u32) override {
    for (const TmaRow& row : rows) {
      if (row.begin >= row.end) continue;
      u8* global = reinterpret_cast<u8*>(row.global);
      const u8* in = data.data() + row.shared_offset + row.begin;
      if (reduce) {
        atomic_bulk_reduce(op, type, global, in, (row.end - row.begin) / u32(reduce_type_bytes(type)));
      } else {
        std::memcpy(global, in, row.end - row.begin);
      }
    }
  }
  TensorMap map;
  std::vector<TmaRow> rows;
  SharedSpot from;
  bool reduce = false;
  ReduceOp op = ReduceOp::kAdd;
  ReduceType type = ReduceType::kU32;
  std::vector<u8> data;
};

// ---- operands: pool = map, coordinates, then addresses ----

TensorMap map_at(Warp& warp, u32 lane, const i32* refs) {
  const u64 address = lane_address(warp, refs, lane);
  if (address & 63) warp.fault("misaligned", "a tensor map needs 64-byte alignment", 1u << lane);
  const u8* bytes;
  if (address >> kWindowShift == 0) {
    bytes = global_range(warp, warp.pc - 1, lane, address, kTensorMapBytes, 64, Access::kRead);
  } else {
    u64 addresses[kLanes];
    u8* pointers[kLanes];
    addresses[lane] = address;
    warp.resolve(Space::kGeneric, addresses, 1u << lane, kTensorMapBytes, 64, Access::kRead, pointers);
    bytes = pointers[lane];
  }
  TensorMap map;
  std::string why;
  if (!tensor_map_decode(bytes, map, why)) warp.fault("invalid", why, 1u << lane);
  why = tensor_map_unsupported(map);
  if (!why.empty()) warp.fault("unsupported", why, 1u << lane);
  return map;
}

TensorMap read_operands(Warp& warp, const Inst& inst, u32 lane, i32* coordinates) {
  const i32* refs = pool_of(warp, inst);
  const u32 rank = u32(inst.imm & kRankMask);
  for (u32 d = 0; d < rank; ++d) coordinates[d] = i32(warp.lanes<u32>(refs[kAddressWords + d])[lane]);
  TensorMap map = map_at(warp, lane, refs);
  if (map.rank != rank) {
    warp.fault(
        "invalid",
        "the tensor map has " + std::to_string(map.rank) + " dimensions, the instruction " + std::to_string(rank),
        1u << lane);
  }
  if (map.box_bytes() > DeviceLimits::kMaxSharedBytes) {
    warp.fault("out_of_bounds", "the box has " + std::to_string(map.box_bytes()) + " bytes, more than shared memory",
               1u << lane);
  }
  return map;
}

void check_rows(Warp& warp, u32 lane, const std::vector<TmaRow>& rows, Access access) {
  for (const TmaRow& row : rows) {
    if (row.begin < row.end) global_range(warp, warp.pc - 1, lane, row.global, row.end - row.begin, 1, access);
  }
}

void run_load(Warp& warp, const Inst& inst, u32 mask) {
  const i32* refs = pool_of(warp, inst) + kAddressWords + (inst.imm & kRankMask);
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    i32 coordinates[kMaxTensorRank];
    const TensorMap map = read_operands(warp, inst, lane, coordinates);
    const std::vector<TmaRow> rows = tma_rows(map, coordinates);
    check_rows(warp, lane, rows, Access::kRead);
    const u32 bytes = u32(map.box_bytes());
    const SharedSpot to = shared_spot(warp, lane, lane_address(warp, refs, lane), bytes, kBoxAlignment, false);
    const SharedSpot barrier = shared_spot(warp, lane, lane_address(warp, refs + kAddressWords, lane), 8, 8, false);
    std::vector<MulticastTarget> targets{{to, barrier}};
    if (inst.imm & kMulticast) targets = multicast_targets(warp, lane, warp.lanes<u16>(inst.op[0])[lane], to, barrier);
    warp.worker->counters.bulk_bytes += bytes;
    for (const MulticastTarget& t : targets) {
      if (t.to.block != t.barrier.block)
        warp.fault("invalid", "the mbarrier lies in another block than the destination", 1u << lane);
      auto op = std::make_unique<TensorLoad>(warp, lane);
      op->map = map;
      op->rows = rows;
      op->to = t.to;
      op->barrier = t.barrier;
      MbarrierRecord* record;
      mbarrier_load(warp, warp.pc - 1, lane, t.barrier, &record);
      op->token = mbarrier_token(t.barrier, *record);
      op->stamp = async_proxy_stamp(warp);
      async_proxy_write(warp, lane, t.to, bytes, op->stamp);
      op->writes.push_back({t.to.block, t.to.offset, bytes, lane});
      warp.block->cluster.async.issue(std::move(op), AsyncGroup::kNone);
    }
  }
}

void run_store(Warp& warp, const Inst& inst, u32 mask) {
  const i32* refs = pool_of(warp, inst) + kAddressWords + (inst.imm & kRankMask);
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    auto op = std::make_unique<TensorStore>(warp, lane);
    i32 coordinates[kMaxTensorRank];
    op->map = read_operands(warp, inst, lane, coordinates);
    op->rows = tma_rows(op->map, coordinates);
    if (inst.imm & kReduce) {
      op->reduce = true;
      op->op = ReduceOp(inst.imm >> kOpShift & 0xff);
      if (!tma_reduce_type(op->map.type, op->op, op->type)) {
        warp.fault("invalid",
                   std::string("the reduction does not exist for tensor maps of ") + tma_type_name(op->map.type),
                   1u << lane);
      }
    }
    check_rows(warp, lane, op->rows, op->reduce ? Access::kAtomic : Access::kWrite);
    const u32 bytes = u32(op->map.box_bytes());
    op->from = shared_spot(warp, lane, lane_address(warp, refs, lane), bytes, kBoxAlignment, false);
    async_proxy_read(warp, lane, op->from, bytes);
    op->reads.push_back({op->from.block, op->from.offset, bytes, lane});
    warp.worker->counters.bulk_bytes += bytes;
    warp.block->cluster.async.issue(std::move(op), AsyncGroup::kBulk);
  }
}

void run_prefetch(Warp& warp, const Inst& inst, u32 mask) {
  for (u32 m = mask; m; m &= m - 1) {
    i32 coordinates[kMaxTensorRank];
    read_operands(warp, inst, u32(std::countr_zero(m)), coordinates);
  }
}

// [map, {coordinates}] with the pool's first part.
void push_tensor(DecodeContext& ctx, const Operand& o, size_t rank, std::vector<i32>& pool) {
  Address map = address_operand(ctx, o, true);
  if (map.symbol == Space::kParam) map.offset |= i64(kParamWindow);
  ctx.require(
      o.elements.size() == 1 && o.elements[0].kind == Operand::Kind::kVector && o.elements[0].elements.size() == rank,
      "the number of coordinates does not fit the form");
  push_address(pool, map);
  for (const Operand& c : o.elements[0].elements) pool.push_back(ctx.src(c, 32));
}

void finish(DecodeContext& ctx, const Form& entry, const std::vector<i32>& pool) {
  if (entry.tag & kHint) ctx.src(ctx.operand(ctx.count() - 1), 64);
  ctx.out().imm = entry.tag;
  ctx.out().ext = ctx.pool(pool);
  ctx.has_async();
}

void decode_load(DecodeContext& ctx, const Form& entry) {
  const size_t want = 3 + (entry.tag & kMulticast ? 1 : 0) + (entry.tag & kHint ? 1 : 0);
  ctx.require(ctx.count() == want, "the number of operands does not fit the form");
  std::vector<i32> pool;
  push_tensor(ctx, ctx.operand(1), entry.tag & kRankMask, pool);
  push_address(pool, address_operand(ctx, ctx.operand(0), false));
  push_address(pool, address_operand(ctx, ctx.operand(2), false));
  if (entry.tag & kMulticast) ctx.out().op[0] = ctx.src(ctx.operand(3), 16);
  finish(ctx, entry, pool);
}

void decode_store(DecodeContext& ctx, const Form& entry) {
  ctx.require(ctx.count() == (entry.tag & kHint ? 3u : 2u), "the number of operands does not fit the form");
  std::vector<i32> pool;
  push_tensor(ctx, ctx.operand(0), entry.tag & kRankMask, pool);
  push_address(pool, address_operand(ctx, ctx.operand(1), false));
  finish(ctx, entry, pool);
}

void decode_prefetch(DecodeContext& ctx, const Form& entry) {
  ctx.require(ctx.count() == (entry.tag & kHint ? 2u : 1u), "the number of operands does not fit the form");
  std::vector<i32> pool;
  push_tensor(ctx, ctx.operand(0), entry.tag & kRankMask, pool);
  finish(ctx, entry, pool);
}

// ---- tensormap.replace, tensormap.cp_fenceproxy ----

constexpr u64 kShared = 16, kGeneric = 32, kArray = 64, kWide = 128;  // with the TmaField in the low bits

u8* map_bytes(Warp& warp, u32 lane, u64 address, Space space, Access access) {
  u64 addresses[kLanes];
  u8* pointers[kLanes];
  addresses[lane] = address;
  warp.resolve(space, addresses, 1u << lane, kTensorMapBytes, 64, access, pointers);
  return pointers[lane];
}

void run_replace(Warp& warp, const Inst& inst, u32 mask) {
  const Space space = inst.imm & kShared ? Space::kShared : inst.imm & kGeneric ? Space::kGeneric : Space::kGlobal;
  for (u32 m = mask; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    const u64 address = lane_address(warp, pool_of(warp, inst), lane);
    map_bytes(warp, lane, address, space, Access::kRead);
    u8* bytes = map_bytes(warp, lane, address, space, Access::kWrite);
    const u64 value = inst.imm & kWide ? warp.lanes<u64>(inst.op[0])[lane] : warp.lanes<u32>(inst.op[0])[lane];
    std::string why;
    if (!tensor_map_replace(bytes, TmaField(inst.imm & 15), inst.aux, value, why))
      warp.fault("invalid", why, 1u << lane);
  }
}

void decode_replace(DecodeContext& ctx, const Form& entry) {
  const bool array = entry.tag & kArray;
  ctx.require(ctx.count() == (array ? 3u : 2u), "the number of operands does not fit the form");
  std::vector<i32> pool;
  push_address(pool, address_operand(ctx, ctx.operand(0), entry.tag & kGeneric));
  if (array) {
    u64 ordinal = 0;
    ctx.require(ctx.constant_value(ctx.operand(1), &ordinal) && ordinal < kMaxTensorRank,
                "the dimension must be a literal, 0 to 4");
    ctx.out().aux = u32(ordinal);
  }
  ctx.out().op[0] = ctx.src(ctx.operand(array ? 2 : 1), entry.tag & kWide ? 64 : 32);
  ctx.out().imm = entry.tag;
  ctx.out().ext = ctx.pool(pool);
}

void run_copy_map(Warp& warp, const Inst& inst, u32 mask) {
  if (!warp.converge(mask, kFullMask)) return;
  const u32 lane = u32(std::countr_zero(mask));
  const i32* refs = pool_of(warp, inst);
  const u8* from = map_bytes(warp, lane, lane_address(warp, refs + kAddressWords, lane), Space::kShared, Access::kRead);
  u8* to = map_bytes(warp, lane, lane_address(warp, refs, lane), Space::kGlobal, Access::kWrite);
  std::memcpy(to, from, kTensorMapBytes);
}

void decode_copy_map(DecodeContext& ctx, const Form&) {
  u64 bytes = 0;
  ctx.require(ctx.count() == 3 && ctx.constant_value(ctx.operand(2), &bytes) && bytes == kTensorMapBytes,
              "the size must be 128");
  std::vector<i32> pool;
  push_address(pool, address_operand(ctx, ctx.operand(0), false));
  push_address(pool, address_operand(ctx, ctx.operand(1), false));
  ctx.out().ext = ctx.pool(pool);
}

void register_tensormap(Registry& registry) {
  struct Field {
    const char* name;
    TmaField field;
    u64 flags;
  };
  static constexpr Field kFields[] = {{"global_address", TmaField::kGlobalAddress, kWide},
                                      {"rank", TmaField::kRank, 0},
                                      {"box_dim", TmaField::kBoxDim, kArray},
                                      {"global_dim", TmaField::kGlobalDim, kArray},
                                      {"global_stride", TmaField::kGlobalStride, kArray | kWide},
                                      {"element_stride", TmaField::kElementStride, kArray},
                                      {"elemtype", TmaField::kElemType, 0},
                                      {"interleave_layout", TmaField::kInterleave, 0},
                                      {"swizzle_mode", TmaField::kSwizzle, 0},
                                      {"fill_mode", TmaField::kFill, 0}};
  for (const Field& f : kFields) {
    for (const char* space : {"", ".global", ".shared::cta"}) {
      const u64 where = !*space ? kGeneric : space[1] == 's' ? kShared : 0;
      registry.add(
          std::string("tensormap.replace.tile.") + f.name + space + ".b1024" + (f.flags & kWide ? ".b64" : ".b32"),
          InstClass::kOther, decode_replace, run_replace, u64(f.field) | f.flags | where);
    }
  }
  for (const char* scope : {"cta", "cluster", "gpu", "sys"}) {
    registry.add(
        std::string("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.") + scope + ".sync.aligned",
        InstClass::kFence, decode_copy_map, run_copy_map);
  }
}

}  // namespace

void register_tma_forms(Registry& registry) {
  static constexpr const char* kOps[] = {"add", "min", "max", "inc", "dec", "and", "or", "xor"};
  for (u64 rank = 1; rank <= kMaxTensorRank; ++rank) {
    const std::string dim = std::to_string(rank) + "d";
    for (const char* hint : {"", ".L2::cache_hint"}) {
      const u64 tag = rank | (*hint ? kHint : 0);
      for (const char* tile : {"", ".tile"}) {
        const std::string load = std::string(".global") + tile + ".mbarrier::complete_tx::bytes";
        registry.add("cp.async.bulk.tensor." + dim + ".shared::cluster" + load + hint, InstClass::kAsyncCopy,
                     decode_load, run_load, tag);
        registry.add("cp.async.bulk.tensor." + dim + ".shared::cta" + load + hint, InstClass::kAsyncCopy, decode_load,
                     run_load, tag);
        registry.add("cp.async.bulk.tensor." + dim + ".shared::cluster" + load + ".multicast::cluster" + hint,
                     InstClass::kAsyncCopy, decode_load, run_load, tag | kMulticast);
        const std::string store = std::string(tile) + ".bulk_group" + hint;
        registry.add("cp.async.bulk.tensor." + dim + ".global.shared::cta" + store, InstClass::kAsyncCopy, decode_store,
                     run_store, tag);
        for (size_t op = 0; op < std::size(kOps); ++op) {
          registry.add("cp.reduce.async.bulk.tensor." + dim + ".global.shared::cta." + kOps[op] + store,
                       InstClass::kAsyncCopy, decode_store, run_store, tag | kReduce | u64(op) << kOpShift);
        }
        registry.add("cp.async.bulk.prefetch.tensor." + dim + ".L2.global" + tile + hint, InstClass::kAsyncCopy,
                     decode_prefetch, run_prefetch, tag);
      }
    }
  }
  register_tensormap(registry);
}

}  // namespace pagedkern::vgpu
