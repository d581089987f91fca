// Instruction forms of wgmma. Each warp of the warpgroup computes its own sixteen rows of D.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "vgpu/async_support.h"
#include "vgpu/registry.h"
#include "vgpu/tensor_forms.h"
#include "vgpu/tensor_wgmma.h"
#include "vgpu/warp.h"

namespace pagedkern::vgpu {
namespace {

constexpr u32 kChunk = 16;
constexpr int kWarpRows = 16;
constexpr int kMaxARegisters = 4;

u64 pack_form(const WgmmaForm& f) {
  return u64(f.n) | u64(f.k) << 12 | u64(f.a) << 20 | u64(f.b) << 24 | u64(f.accumulator) << 28 |
         u64(f.saturate) << 32 | u64(f.a_in_registers) << 33 | u64(f.a_transposed) << 34 | u64(f.b_transposed) << 35 |
         u64(f.negate_a) << 36 | u64(f.negate_b) << 37;
}

WgmmaForm unpack_form(u64 tag) {
  WgmmaForm f;
  f.n = int(tag & 0xfff);
  f.k = int(tag >> 12 & 0xff);
  f.a = TensorType(tag >> 20 & 0xf);
  f.b = TensorType(tag >> 24 & 0xf);
  f.accumulator = TensorType(tag >> 28 & 0xf);
  f.saturate = tag >> 32 & 1;
  f.a_in_registers = tag >> 33 & 1;
  f.a_transposed = tag >> 34 & 1;
  f.b_transposed = tag >> 35 & 1;
  f.negate_a = tag >> 36 & 1;
  f.negate_b = tag >> 37 & 1;
  return f;
}

TrackState& track_of(const Warp& warp, const RegisterCheck& check) {
  return *reinterpret_cast<TrackState*>(warp.regs + check.track);
}

const CheckList& checks_at(const Warp& warp, u32 pc) {
  const Kernel& k = warp.kernel();
  return k.checks[k.check_of[pc]];
}

class WgmmaOperation : public AsyncOperation {
 public:
  WgmmaOperation(Warp& warp, const WgmmaForm& form, const i32* refs)
      : AsyncOperation(warp, kFullMask), form_(form), refs_(refs) {}
  const char* name() const override { return "wgmma.mma_async"; }
  void perform(Cluster& cluster, u32 lanes) override;
  // The four warps' parts are one operation: it begins when the last of them has come to it.
  bool ready() const override {
    const u32 first = warp.index / 4 * 4;
    for (u32 k = first; k < first + 4; ++k) {
      if (warp.block->warps[k]->wgmma_issued <= sequence) return false;
    }
    return true;
  }
  // D is written and A's registers are read until a wait covers this operation.
  void mark_registers() const;

  bool accumulate = false;
  int a_chunks = 0, b_chunks = 0;
  u32 chunks[kMaxWgmmaChunks + 2 * kWarpRows];  // addresses of A's, then of B's

 private:
  void gather(const u32* addresses, int count, u8* out) const;
  WgmmaForm form_;
  const i32* refs_;  // D, then A's registers where it has them
};

void WgmmaOperation::gather(const u32* addresses, int count, u8* out) const {
  const u8* shared = warp.block->shared.data();
  for (int c = 0; c < count; ++c) std::memcpy(out + c * kChunk, shared + (addresses[c] - kSharedBase), kChunk);
}

void WgmmaOperation::perform(Cluster&, u32) {
  thread_local u8 bytes[kMaxWgmmaChunks * kChunk];
  thread_local float a[kWarpRows * 32], b[256 * 32];
  thread_local LaneWords d[128];
  const int d_count = wgmma_accumulator_registers(form_);
  if (form_.a_in_registers) {
    LaneWords words[kMaxARegisters];
    for (int r = 0; r < kMaxARegisters; ++r)
      std::memcpy(words[r].data(), warp.lanes<u32>(refs_[d_count + r]), sizeof words[r]);
    unpack_a_fragment(form_.a, form_.k, words, form_.negate_a, a);
  } else {
    gather(chunks, a_chunks, bytes);
    wgmma_unpack_a(form_.a, form_.a_transposed, kWarpRows, form_.k, bytes, form_.negate_a, a);
  }
  gather(chunks + a_chunks, b_chunks, bytes);
  wgmma_unpack_b(form_.b, form_.b_transposed, form_.n, form_.k, bytes, form_.negate_b, b);
  if (accumulate) {
    for (int r = 0; r < d_count; ++r) std::memcpy(d[r].data(), warp.lanes<u32>(refs_[r]), sizeof d[r]);
  }
  wgmma_rows(form_, a, b, accumulate, d);
  for (int r = 0; r < d_count; ++r) std::memcpy(warp.lanes<u32>(refs_[r]), d[r].data(), sizeof d[r]);
}

void WgmmaOperation::mark_registers() const {
  const CheckList& list = checks_at(warp, pc);
  for (const RegisterCheck& c : list.writes) track_of(warp, c).pending_write = kFullMask;
  if (!form_.a_in_registers) return;
  const i32* a = refs_ + wgmma_accumulator_registers(form_);
  for (const RegisterCheck& c : list.reads) {
    for (int r = 0; r < kMaxARegisters; ++r) {
      if (c.slot == u32(a[r])) track_of(warp, c).pending_read = kFullMask;
    }
  }
}

// The value all lanes of the warp must share.
template <typename T>
T uniform(Warp& warp, OperandRef ref, const char* what) {
  const T* values = warp.lanes<T>(ref);
  for (u32 lane = 1; lane < kLanes; ++lane) {
    if (values[lane] != values[0])
      warp.fault("invalid", std::string("the lanes of the warp differ in ") + what, 1u << lane);
  }
  return values[0];
}

// Neighbouring chunks are one range where they fill a stretch of one 128-byte line, in whatever order the swizzle
// gives.
void collect_ranges(Warp& warp, const u32* chunks, int count, std::vector<SharedRange>& out) {
  for (int c = 0; c < count;) {
    int take = 1;
    for (int want : {8, 4, 2}) {
      if (c + want > count) continue;
      u32 low = chunks[c], high = chunks[c];
      for (int k = 1; k < want; ++k) {
        low = std::min(low, chunks[c + k]);
        high = std::max(high, chunks[c + k]);
      }
      if (high - low == u32(want - 1) * kChunk && low / 128 == high / 128) {
        take = want;
        break;
      }
    }
    u32 low = chunks[c];
    for (int k = 1; k < take; ++k) low = std::min(low, chunks[c + k]);
    const SharedSpot spot = shared_spot(warp, 0, low, u32(take) * kChunk, kChunk, false);
    out.push_back({spot.block, spot.offset, u32(take) * kChunk, 0});
    c += take;
  }
}

int operand_chunks(Warp& warp, OperandRef ref, TensorType type, bool transposed, int first, int count, int k,
                   const char* which, u32* out) {
  const WgmmaDescriptor d = WgmmaDescriptor::decode(uniform<u64>(warp, ref, which));
  if (d.reserved_bits) warp.fault("invalid", std::string(which) + " has a reserved bit set", 1);
  return wgmma_chunk_addresses(d, type, transposed, first, count, k, out);
}

void check_registers(Warp& warp, const WgmmaForm& form, const i32* refs, bool accumulate) {
  const LaunchOptions& options = warp.launch->options;
  const Kernel& kernel = warp.kernel();
  const CheckList& list = checks_at(warp, warp.pc - 1);
  const auto fault = [&](const char* kind, const RegisterCheck& c, const char* what) {
    warp.fault(kind, "register " + kernel.register_names[c.name] + what, kFullMask);
  };
  for (const RegisterCheck& c : list.writes) {
    const TrackState& t = track_of(warp, c);
    if (accumulate && options.check_uninitialized && t.written != kFullMask)
      fault("uninitialized", c, " is accumulated on before anything wrote it");
    if (options.check_async && t.unfenced) fault("async", c, " was written since the last wgmma.fence");
  }
  if (!form.a_in_registers || !options.check_async) return;
  const i32* a = refs + wgmma_accumulator_registers(form);
  for (const RegisterCheck& c : list.reads) {
    const TrackState& t = track_of(warp, c);
    for (int r = 0; r < kMaxARegisters; ++r) {
      if (c.slot != u32(a[r])) continue;
      if (t.pending_write) fault("async", c, " is A's while an asynchronous operation may still write it");
      if (t.unfenced) fault("async", c, " was written since the last wgmma.fence");
    }
  }
}

void run_mma_async(Warp& warp, const Inst& inst, u32 mask) {
  if (!require_whole_warp(warp, mask)) return;
  const WgmmaForm form = unpack_form(inst.imm);
  const i32* refs = pool_of(warp, inst);
  if (warp.index / 4 * 4 + 4 > warp.block->warps.size())
    warp.fault("invalid", "wgmma needs a whole warpgroup of four warps", mask);
  const u32 scale = warp.pred(inst.op[0]) ^ (inst.negate & 1u ? kFullMask : 0u);
  if (scale != 0 && scale != kFullMask) warp.fault("invalid", "the lanes of the warp differ in scale-d", ~scale);
  auto op = std::make_unique<WgmmaOperation>(warp, form, refs);
  op->accumulate = scale != 0;
  check_registers(warp, form, refs, op->accumulate);
  if (!form.a_in_registers) {
    op->a_chunks = operand_chunks(warp, inst.op[1], form.a, form.a_transposed, kWarpRows * int(warp.index % 4),
                                  kWarpRows, form.k, "the descriptor of A", op->chunks);
  }
  op->b_chunks = operand_chunks(warp, inst.op[2], form.b, form.b_transposed, 0, form.n, form.k, "the descriptor of B",
                                op->chunks + op->a_chunks);
  collect_ranges(warp, op->chunks, op->a_chunks, op->reads);
  collect_ranges(warp, op->chunks + op->a_chunks, op->b_chunks, op->reads);
  op->sequence = warp.wgmma_issued++;
  const u32 actor = warp.block->cluster.wgmma_actor(warp.block->rank, warp.index);
  for (const SharedRange& r : op->reads) {
    async_proxy_read_as(warp, actor, u32(warp.wgmma_issued), {r.block, r.offset}, r.bytes);
  }
  op->mark_registers();
  warp.worker->counters.tensor_flops += 2ull * kWarpRows * u64(form.n) * u64(form.k);
  warp.block->cluster.async.issue(std::move(op), AsyncGroup::kWgmma);
}

void decode_mma_async(DecodeContext& ctx, const Form& entry) {
  WgmmaForm form = unpack_form(entry.tag);
  const auto flag = [&](size_t k, std::initializer_list<i64> allowed, const char* what) {
    u64 value = 0;
    ctx.require(ctx.constant_value(ctx.operand(k), &value), what);
    for (i64 a : allowed) {
      if (i64(value) == a) return a;
    }
    ctx.reject(what);
  };
  const bool integer = form.accumulator == TensorType::kS32;
  const bool half = tensor_type_bytes(form.a) == 2;
  ctx.require(ctx.count() >= 4, "too few operands");
  form.a_in_registers = ctx.operand(1).kind == Operand::Kind::kVector;
  const size_t want = integer ? 4 : !half ? 6 : form.a_in_registers ? 7 : 8;
  ctx.require(ctx.count() == want, "the number of operands does not fit the form");
  if (!integer) {
    form.negate_a = flag(4, {1, -1}, "imm-scale-a must be 1 or -1") == -1;
    form.negate_b = flag(5, {1, -1}, "imm-scale-b must be 1 or -1") == -1;
  }
  if (half && !form.a_in_registers) form.a_transposed = flag(6, {0, 1}, "imm-trans-a must be 0 or 1") == 1;
  if (half) form.b_transposed = flag(want - 1, {0, 1}, "imm-trans-b must be 0 or 1") == 1;

  const Operand& d = ctx.operand(0);
  ctx.require(d.kind == Operand::Kind::kVector && int(d.elements.size()) == wgmma_accumulator_registers(form),
              "D has the wrong number of registers");
  std::vector<i32> pool;
  for (const Operand& o : d.elements) {
    pool.push_back(ctx.dst(o, 32));
    ctx.mark_async(o);
  }
  if (form.a_in_registers) {
    const Operand& a = ctx.operand(1);
    ctx.require(int(a.elements.size()) == kMaxARegisters, "A has the wrong number of registers");
    for (const Operand& o : a.elements) {
      ctx.require(ctx.register_bits(o) == 32, "A's elements must be 32-bit registers");
      pool.push_back(ctx.src(o, 32));
      ctx.mark_async(o);
    }
  } else {
    ctx.out().op[1] = ctx.src(ctx.operand(1), 64);
  }
  ctx.out().op[2] = ctx.src(ctx.operand(2), 64);
  bool negated = false;
  ctx.out().op[0] = ctx.src_pred(ctx.operand(3), &negated);
  if (negated) ctx.out().negate |= 1;
  ctx.ignore_pending();
  ctx.has_async();
  ctx.out().imm = pack_form(form);
  ctx.out().ext = ctx.pool(pool);
}

// ---- fence, commit, wait ----

template <typename F>
void each_track_state(const Warp& warp, F&& f) {
  const Kernel& k = warp.kernel();
  for (u32 at = k.track_begin; at + sizeof(TrackState) <= k.register_bytes; at += sizeof(TrackState)) {
    f(*reinterpret_cast<TrackState*>(warp.regs + at));
  }
}

void run_fence(Warp& warp, const Inst&, u32 mask) {
  if (!require_whole_warp(warp, mask)) return;
  each_track_state(warp, [](TrackState& t) { t.unfenced = 0; });
}

void run_commit(Warp& warp, const Inst&, u32 mask) {
  if (!require_whole_warp(warp, mask)) return;
  warp.block->cluster.async.commit(AsyncGroup::kWgmma, warp, mask);
}

void run_wait(Warp& warp, const Inst& inst, u32 mask) {
  if (!require_whole_warp(warp, mask)) return;
  Cluster& cluster = warp.block->cluster;
  AsyncEngine& engine = cluster.async;
  if (!engine.ready_to_wait(AsyncGroup::kWgmma, warp, mask, u32(inst.imm))) {
    return warp.retry("the other warps of its warpgroup to issue the same wgmma");
  }
  engine.wait(AsyncGroup::kWgmma, warp, mask, u32(inst.imm), false);
  if (warp.tracks_races()) {  // what the completed ones read, in all four warps, is over
    u64 done = warp.wgmma_issued;
    engine.each(AsyncGroup::kWgmma, warp, [&](const AsyncOperation& op) { done = std::min(done, op.sequence); });
    u32& seen = warp.knowledge.seen.at[cluster.wgmma_actor(warp.block->rank, warp.index)];
    seen = std::max(seen, u32(std::min<u64>(done, kMaxClock)));
  }
  each_track_state(warp, [](TrackState& t) { t.pending_write = t.pending_read = 0; });
  engine.each(AsyncGroup::kWgmma, warp,
              [](const AsyncOperation& op) { static_cast<const WgmmaOperation&>(op).mark_registers(); });
}

void decode_nothing(DecodeContext& ctx, const Form&) {
  ctx.require(ctx.count() == 0, "no operands are allowed");
}

void decode_wait(DecodeContext& ctx, const Form&) {
  u64 count = 0;
  ctx.require(ctx.count() == 1 && ctx.constant_value(ctx.operand(0), &count) && count <= 7,
              "the number of groups must be a literal, 0 to 7");
  ctx.out().imm = count;
}

}  // namespace

void register_wgmma_forms(Registry& registry) {
  const TensorType inputs[] = {TensorType::kF16,  TensorType::kBF16, TensorType::kTF32, TensorType::kE4M3,
                               TensorType::kE5M2, TensorType::kS8,   TensorType::kU8};
  for (TensorType a : inputs) {
    for (TensorType b : inputs) {
      for (TensorType sum : {TensorType::kF16, TensorType::kF32, TensorType::kS32}) {
        for (int n = 8; n <= 256; n += 8) {
          for (bool saturate : {false, true}) {
            WgmmaForm f;
            f.n = n;
            f.k = 32 / tensor_type_bytes(a);
            f.a = a;
            f.b = b;
            f.accumulator = sum;
            f.saturate = saturate;
            if (!wgmma_supported(f)) continue;
            const std::string types =
                std::string(tensor_type_name(sum)) + "." + tensor_type_name(a) + "." + tensor_type_name(b);
            registry.add("wgmma.mma_async.sync.aligned.m64n" + std::to_string(n) + "k" + std::to_string(f.k) + "." +
                             types + (saturate ? ".satfinite" : ""),
                         InstClass::kTensorCore, decode_mma_async, run_mma_async, pack_form(f));
          }
        }
      }
    }
  }
  registry.add("wgmma.fence.sync.aligned", InstClass::kFence, decode_nothing, run_fence);
  registry.add("wgmma.commit_group.sync.aligned", InstClass::kTensorCore, decode_nothing, run_commit);
  registry.add("wgmma.wait_group.sync.aligned", InstClass::kTensorCore, decode_wait, run_wait);
}

}  // namespace pagedkern::vgpu
