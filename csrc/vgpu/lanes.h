// Lane loops and the handler templates that most families are made of.
#pragma once

#include <bit>

#include "vgpu/decode.h"
#include "vgpu/level.h"
#include "vgpu/registry.h"
#include "vgpu/warp.h"

namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL {

// f(lane) for the lanes of mask; the converged case is a plain loop that the compiler vectorises. Lane arrays are
// either the same or disjoint, so lanes never depend on each other.
template <class F>
[[gnu::always_inline]] inline void for_lanes(u32 mask, F&& f) {
  if (mask == kFullMask) {
#pragma GCC ivdep
    for (int lane = 0; lane < kLanes; ++lane) f(lane);
  } else {
    for (u32 m = mask; m; m &= m - 1) f(int(std::countr_zero(m)));
  }
}

// d = F(a), F(a, b), F(a, b, c) lane by lane: `unary<[](u32 a) { return ~a; }, u32, u32>`.
template <auto F, class D, class A>
void unary(Warp& w, const Inst& inst, u32 mask) {
  D* d = w.lanes<D>(inst.op[0]);
  const A* a = w.lanes<A>(inst.op[1]);
  for_lanes(mask, [=](int i) { d[i] = F(a[i]); });
}

template <auto F, class D, class A, class B = A>
void binary(Warp& w, const Inst& inst, u32 mask) {
  D* d = w.lanes<D>(inst.op[0]);
  const A* a = w.lanes<A>(inst.op[1]);
  const B* b = w.lanes<B>(inst.op[2]);
  for_lanes(mask, [=](int i) { d[i] = F(a[i], b[i]); });
}

template <auto F, class D, class A, class B = A, class C = A>
void ternary(Warp& w, const Inst& inst, u32 mask) {
  D* d = w.lanes<D>(inst.op[0]);
  const A* a = w.lanes<A>(inst.op[1]);
  const B* b = w.lanes<B>(inst.op[2]);
  const C* c = w.lanes<C>(inst.op[3]);
  for_lanes(mask, [=](int i) { d[i] = F(a[i], b[i], c[i]); });
}

inline void set_pred(Warp& w, OperandRef ref, u32 mask, u32 value) {
  u32& p = w.pred(ref);
  p = (p & ~mask) | (value & mask);
}

inline u32 read_pred(const Warp& w, const Inst& inst, int slot) {
  u32 p = w.pred(inst.op[slot]);
  return inst.negate >> slot & 1 ? ~p : p;
}

}  // namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL
