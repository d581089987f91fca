// bar, barrier, barrier.cluster, fences and membars.
#include "vgpu/block.h"
#include "vgpu/lanes.h"

namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL {
namespace {

constexpr InstClass kClass = InstClass::kBarrier;

u32 uniform(Warp& w, OperandRef ref, u32 mask, const char* what) {
  const u32* v = w.lanes<u32>(ref);
  u32 first = v[std::countr_zero(mask)];
  for (u32 m = mask; m; m &= m - 1) {
    if (v[std::countr_zero(m)] != first)
      w.fault("divergent_barrier", std::string("lanes give different barrier ") + what, m & (0 - m));
  }
  return first;
}

// bar.sync a{, b}; bar.arrive a, b. op[0] id, op[1] thread count or none.
template <bool kWait>
void bar(Warp& w, const Inst& inst, u32 mask) {
  if (!w.converge(mask, w.live)) return;
  u32 id = uniform(w, inst.op[0], mask, "numbers");
  u32 count = inst.op[1] == kNoOperand ? 0 : uniform(w, inst.op[1], mask, "thread counts");
  if (inst.op[1] != kNoOperand && count == 0) w.fault("invalid", "barrier thread count 0", mask);
  w.block->arrive(w, mask, id, count, kWait);
}

enum class Reduce { kPopc, kAnd, kOr };

// barrier.red.op d, a{, b}, c. op[0] destination, op[1] id, op[2] thread count or none, op[3] predicate.
template <Reduce kReduce>
void bar_red(Warp& w, const Inst& inst, u32 mask) {
  if (!w.converge(mask, w.live)) return;
  u32 id = uniform(w, inst.op[1], mask, "numbers");
  u32 count = inst.op[2] == kNoOperand ? 0 : uniform(w, inst.op[2], mask, "thread counts");
  if (id >= w.block->barriers.size()) w.fault("invalid", "barrier " + std::to_string(id) + " does not exist", mask);
  Barrier& b = w.block->barriers[id];
  u32 yes = read_pred(w, inst, 3) & mask;
  b.reduction_count += u32(std::popcount(yes));
  b.reduction_or |= yes ? 1 : 0;
  b.reduction_and &= yes == mask ? kFullMask : 0;
  Warp* warp = &w;
  OperandRef to = inst.op[0];
  w.block->arrive(w, mask, id, count, true, [warp, to, mask](const Barrier& done) {
    if (kReduce != Reduce::kPopc) {
      set_pred(*warp, to, mask, (kReduce == Reduce::kAnd ? done.reduction_and : done.reduction_or) ? kFullMask : 0);
      return;
    }
    u32* d = warp->lanes<u32>(to);
    u32 v = done.reduction_count;
    for_lanes(mask, [=](int i) { d[i] = v; });
  });
}

void decode_bar(DecodeContext& ctx, const Form& form) {
  bool count_needed = form.tag != 0;
  ctx.require(ctx.count() == 2 || (ctx.count() == 1 && !count_needed), "wrong number of operands");
  ctx.out().op[0] = ctx.src(ctx.operand(0), 32);
  if (ctx.count() == 2) ctx.out().op[1] = ctx.src(ctx.operand(1), 32);
}

void decode_bar_red(DecodeContext& ctx, const Form& form) {
  ctx.require(ctx.count() == 3 || ctx.count() == 4, "wrong number of operands");
  Inst& out = ctx.out();
  out.op[0] = ctx.dst(ctx.operand(0), int(form.tag));
  out.op[1] = ctx.src(ctx.operand(1), 32);
  if (ctx.count() == 4) out.op[2] = ctx.src(ctx.operand(2), 32);
  bool negated;
  out.op[3] = ctx.src_pred(ctx.operand(ctx.count() - 1), &negated);
  if (negated) out.negate |= 8;
}

void bar_warp(Warp& w, const Inst& inst, u32 mask) {
  u32 members = w.lanes<u32>(inst.op[0])[std::countr_zero(mask)];
  if (mask & ~members) w.fault("invalid", "a lane outside the member mask executes bar.warp.sync", mask & ~members);
  w.converge(mask, members, true);
}

void cluster_arrive(Warp& w, const Inst&, u32 mask) {
  if (!w.converge(mask, w.live)) return;
  w.block->cluster.arrive(w, mask);
}

void cluster_wait(Warp& w, const Inst&, u32 mask) {
  if (!w.converge(mask, w.live)) return;
  w.block->cluster.wait(w, mask);
}

void fence(Warp&, const Inst&, u32) {}

template <u32 kOrdering>
void fence_gpu(Warp& w, const Inst&, u32) {
  w.fence_gpu(kOrdering);
}

// Between the generic and the asynchronous proxy: what this warp knows of is now visible to both.
void fence_async(Warp& w, const Inst&, u32) {
  if (w.tracks_races()) w.knowledge.seen_by_async_proxy.join(w.knowledge.seen);
}

void register_fences(Registry& r) {
  const InstClass f = InstClass::kFence;
  r.any_order("fence");
  constexpr u32 both = kAcquire | kRelease;
  r.add("membar.cta", f, "", fence);
  for (const char* level : {"gl", "sys"}) r.add(std::string("membar.") + level, f, "", fence_gpu<both>);
  for (const char* sem : {"", ".sc", ".acq_rel", ".acquire", ".release"}) {
    const std::string name = std::string("fence") + sem;
    for (const char* scope : {".cta", ".cluster"}) r.add(name + scope, f, "", fence);
    for (const char* scope : {".gpu", ".sys"}) {
      r.add(name + scope, f, "",
            name == "fence.acquire"   ? fence_gpu<kAcquire>
            : name == "fence.release" ? fence_gpu<kRelease>
                                      : fence_gpu<both>);
    }
  }
  r.add("fence.mbarrier_init.release.cluster", f, "", fence);
  r.add("fence.proxy.alias", f, "", fence);
  for (const char* space : {"", ".global", ".shared::cta", ".shared::cluster"}) {
    r.add(std::string("fence.proxy.async") + space, f, "", fence_async);
  }
  for (const char* scope : {".cta", ".cluster", ".gpu", ".sys"}) {
    r.add(std::string("fence.proxy.tensormap::generic.release") + scope, f, "", fence);
    r.add(
        std::string("fence.proxy.tensormap::generic.acquire") + scope, f,
        [](DecodeContext& ctx, const Form&) {
          ctx.require(ctx.count() == 2, "wrong number of operands");
          ctx.address(ctx.operand(0));
        },
        fence);
  }
}

}  // namespace

void register_barrier(Registry& r) {
  for (const char* head : {"bar", "bar.cta", "barrier", "barrier.cta"}) {
    for (const char* tail : {"", ".aligned"}) {
      if (std::string(head).substr(0, 4) != "barr" && *tail) continue;
      std::string h = head, t = tail;
      r.add(h + ".sync" + t, kClass, decode_bar, bar<true>, 0);
      r.add(h + ".arrive" + t, kClass, decode_bar, bar<false>, 1);
      r.add(h + ".red.popc" + t + ".u32", kClass, decode_bar_red, bar_red<Reduce::kPopc>, 32);
      r.add(h + ".red.and" + t + ".pred", kClass, decode_bar_red, bar_red<Reduce::kAnd>, 1);
      r.add(h + ".red.or" + t + ".pred", kClass, decode_bar_red, bar_red<Reduce::kOr>, 1);
    }
  }
  r.add("bar.warp.sync", kClass, "w", bar_warp);
  for (const char* sem : {"", ".release", ".relaxed"}) {
    for (const char* tail : {"", ".aligned"})
      r.add(std::string("barrier.cluster.arrive") + sem + tail, kClass, "", cluster_arrive);
  }
  for (const char* sem : {"", ".acquire"}) {
    for (const char* tail : {"", ".aligned"})
      r.add(std::string("barrier.cluster.wait") + sem + tail, kClass, "", cluster_wait);
  }
  register_fences(r);
}

}  // namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL
