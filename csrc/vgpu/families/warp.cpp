// Instructions among the lanes of a warp: shfl, vote, match, elect, redux, activemask.
#include <algorithm>

#include "vgpu/lanes.h"

namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL {
namespace {

constexpr InstClass kClass = InstClass::kWarp;

// The member mask of a .sync instruction; false: not all members are here yet.
bool gather(Warp& w, u32 mask, u32 members) {
  if (mask & ~members)
    w.fault("invalid", "a lane outside the member mask executes a .sync instruction", mask & ~members);
  return w.converge(mask, members);
}

u32 member_mask(const Warp& w, OperandRef ref, u32 mask) {
  return w.lanes<u32>(ref)[std::countr_zero(mask)];
}

enum class Shuffle { kUp, kDown, kBfly, kIdx };

// Lanes that do not take part have no defined value: readers get all ones.
template <Shuffle kMode>
void shfl(Warp& w, const Inst& inst, u32 mask) {
  if (!gather(w, mask, member_mask(w, inst.op[5], mask))) return;
  u32* d = w.lanes<u32>(inst.op[0]);
  const u32* a = w.lanes<u32>(inst.op[2]);
  const u32* b = w.lanes<u32>(inst.op[3]);
  const u32* c = w.lanes<u32>(inst.op[4]);
  u32 values[kLanes];
  std::copy_n(a, kLanes, values);
  u32 valid = 0;
  for (u32 m = mask; m; m &= m - 1) {
    u32 lane = u32(std::countr_zero(m));
    u32 value = b[lane] & 31, clamp = c[lane] & 31, segment = c[lane] >> 8 & 31;
    u32 top = (lane & segment) | (clamp & ~segment);
    u32 low = lane & segment;
    u32 from = 0;
    bool inside = false;
    switch (kMode) {
      case Shuffle::kUp:
        from = lane - value;
        inside = i32(from) >= i32(top);
        break;
      case Shuffle::kDown:
        from = lane + value;
        inside = from <= top;
        break;
      case Shuffle::kBfly:
        from = lane ^ value;
        inside = from <= top;
        break;
      case Shuffle::kIdx:
        from = low | (value & ~segment);
        inside = from <= top;
        break;
    }
    if (!inside) from = lane;
    d[lane] = mask >> from & 1 ? values[from] : kFullMask;
    valid |= u32(inside) << lane;
  }
  set_pred(w, inst.op[1], mask, valid);
}

enum class Vote { kAll, kAny, kUni };

template <Vote kVote>
void vote(Warp& w, const Inst& inst, u32 mask) {
  if (!gather(w, mask, member_mask(w, inst.op[2], mask))) return;
  u32 yes = read_pred(w, inst, 1) & mask;
  bool result = kVote == Vote::kAll ? yes == mask : kVote == Vote::kAny ? yes != 0 : yes == 0 || yes == mask;
  set_pred(w, inst.op[0], mask, result ? kFullMask : 0);
}

void ballot(Warp& w, const Inst& inst, u32 mask) {
  if (!gather(w, mask, member_mask(w, inst.op[2], mask))) return;
  u32 yes = read_pred(w, inst, 1) & mask;
  u32* d = w.lanes<u32>(inst.op[0]);
  for_lanes(mask, [=](int i) { d[i] = yes; });
}

template <class T>
void match_any(Warp& w, const Inst& inst, u32 mask) {
  if (!gather(w, mask, member_mask(w, inst.op[2], mask))) return;
  const T* a = w.lanes<T>(inst.op[1]);
  u32 result[kLanes];
  for (u32 m = mask; m; m &= m - 1) {
    int i = std::countr_zero(m);
    result[i] = 0;
    for (u32 n = mask; n; n &= n - 1) {
      int j = std::countr_zero(n);
      result[i] |= u32(a[j] == a[i]) << j;
    }
  }
  u32* d = w.lanes<u32>(inst.op[0]);
  for (u32 m = mask; m; m &= m - 1) d[std::countr_zero(m)] = result[std::countr_zero(m)];
}

template <class T>
void match_all(Warp& w, const Inst& inst, u32 mask) {  // d|p
  if (!gather(w, mask, member_mask(w, inst.op[3], mask))) return;
  const T* a = w.lanes<T>(inst.op[2]);
  T first = a[std::countr_zero(mask)];
  bool same = true;
  for (u32 m = mask; m; m &= m - 1) same &= a[std::countr_zero(m)] == first;
  u32* d = w.lanes<u32>(inst.op[0]);
  u32 result = same ? mask : 0;
  for_lanes(mask, [=](int i) { d[i] = result; });
  set_pred(w, inst.op[1], mask, same ? kFullMask : 0);
}

void elect(Warp& w, const Inst& inst, u32 mask) {  // d|p, membermask: the lowest lane leads
  if (!gather(w, mask, member_mask(w, inst.op[2], mask))) return;
  u32 leader = u32(std::countr_zero(mask));
  u32* d = w.lanes<u32>(inst.op[0]);
  for_lanes(mask, [=](int i) { d[i] = leader; });
  set_pred(w, inst.op[1], mask, 1u << leader);
}

void activemask(Warp& w, const Inst& inst, u32 mask) {
  u32* d = w.lanes<u32>(inst.op[0]);
  for_lanes(mask, [=](int i) { d[i] = mask; });
}

template <class T, T (*F)(T, T)>
void redux(Warp& w, const Inst& inst, u32 mask) {
  if (!gather(w, mask, member_mask(w, inst.op[2], mask))) return;
  const T* a = w.lanes<T>(inst.op[1]);
  T result = a[std::countr_zero(mask)];
  for (u32 m = mask & (mask - 1); m; m &= m - 1) result = F(result, a[std::countr_zero(m)]);
  T* d = w.lanes<T>(inst.op[0]);
  for_lanes(mask, [=](int i) { d[i] = result; });
}

template <class T>
T r_min(T a, T b) {
  return std::min(a, b);
}
template <class T>
T r_max(T a, T b) {
  return std::max(a, b);
}
u32 r_add(u32 a, u32 b) {
  return a + b;
}
u32 r_and(u32 a, u32 b) {
  return a & b;
}
u32 r_or(u32 a, u32 b) {
  return a | b;
}
u32 r_xor(u32 a, u32 b) {
  return a ^ b;
}

}  // namespace

void register_warp(Registry& r) {
  r.add("shfl.sync.up.b32", kClass, "W|Pwwww", shfl<Shuffle::kUp>);
  r.add("shfl.sync.down.b32", kClass, "W|Pwwww", shfl<Shuffle::kDown>);
  r.add("shfl.sync.bfly.b32", kClass, "W|Pwwww", shfl<Shuffle::kBfly>);
  r.add("shfl.sync.idx.b32", kClass, "W|Pwwww", shfl<Shuffle::kIdx>);
  r.add("vote.sync.all.pred", kClass, "Ppw", vote<Vote::kAll>);
  r.add("vote.sync.any.pred", kClass, "Ppw", vote<Vote::kAny>);
  r.add("vote.sync.uni.pred", kClass, "Ppw", vote<Vote::kUni>);
  r.add("vote.sync.ballot.b32", kClass, "Wpw", ballot);
  r.add("match.any.sync.b32", kClass, "Www", match_any<u32>);
  r.add("match.any.sync.b64", kClass, "Wxw", match_any<u64>);
  r.add("match.all.sync.b32", kClass, "W|Pww", match_all<u32>);
  r.add("match.all.sync.b64", kClass, "W|Pxw", match_all<u64>);
  r.add("elect.sync", kClass, "W|Pw", elect);
  r.add("activemask.b32", kClass, "W", activemask);
  r.add("redux.sync.add.u32", kClass, "Www", redux<u32, r_add>);
  r.add("redux.sync.add.s32", kClass, "Www", redux<u32, r_add>);
  r.add("redux.sync.min.u32", kClass, "Www", redux<u32, r_min<u32>>);
  r.add("redux.sync.min.s32", kClass, "Www", redux<i32, r_min<i32>>);
  r.add("redux.sync.max.u32", kClass, "Www", redux<u32, r_max<u32>>);
  r.add("redux.sync.max.s32", kClass, "Www", redux<i32, r_max<i32>>);
  r.add("redux.sync.and.b32", kClass, "Www", redux<u32, r_and>);
  r.add("redux.sync.or.b32", kClass, "Www", redux<u32, r_or>);
  r.add("redux.sync.xor.b32", kClass, "Www", redux<u32, r_xor>);
}

}  // namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL
