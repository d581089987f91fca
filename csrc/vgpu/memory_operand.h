// The address operand of memory instructions: op[5] base register, imm offset, `reserved` space and flags.
#pragma once

#include "vgpu/lanes.h"

namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL {

// Inst::reserved: space | wide base << 4 | strong << 5.
inline Space memory_space(const Inst& inst) {
  return Space(inst.reserved & 15);
}
inline bool memory_strong(const Inst& inst) {
  return inst.reserved >> 5 & 1;
}

inline bool is_strong(const std::string& modifiers) {
  for (const char* m : {".volatile", ".relaxed", ".acquire", ".release", ".mmio"}) {
    if (modifiers.find(m) != std::string::npos) return true;
  }
  return false;
}

// kAcquire, kRelease, kNarrow and kNonCoherent as the modifiers say. Atomics and strong accesses without a scope are at
// GPU scope.
inline u32 ordering_of(const std::string& modifiers) {
  const auto has = [&](const char* m) { return modifiers.find(m) != std::string::npos; };
  const bool narrow = has(".shared") || ((has(".cta") || has(".cluster")) && !has(".gpu") && !has(".sys"));
  return (has(".nc") ? kNonCoherent : 0) | (has(".acquire") || has(".acq_rel") ? kAcquire : 0) |
         (has(".release") || has(".acq_rel") ? kRelease : 0) | (narrow ? kNarrow : 0);
}

// Parameter addresses in registers are generic (they may name kernel parameters or a call's .param variables).
inline Address decode_memory_operand(DecodeContext& ctx, const Operand& o, Space space) {
  Address a = ctx.address(o);
  if (space == Space::kParam) {
    if (a.symbol == Space::kParam) a.offset |= i64(kParamWindow);
    if (a.symbol == Space::kLocal) a.offset |= i64(kLocalWindow);
    space = Space::kGeneric;
  }
  Inst& out = ctx.out();
  out.op[5] = a.base;
  out.imm = u64(a.offset);
  out.reserved = u8(u32(space) | u32(a.wide) << 4 | u32(is_strong(ctx.inst().modifiers)) << 5);
  return a;
}

inline void memory_addresses(const Warp& w, const Inst& inst, u32 mask, u64* addresses) {
  const u64 offset = inst.imm;
  (void)mask;
  if (inst.op[5] == kNoOperand) {
    for (int i = 0; i < kLanes; ++i) addresses[i] = offset;
  } else if (inst.reserved >> 4 & 1) {
    const u64* base = w.lanes<u64>(inst.op[5]);
    Space s = memory_space(inst);
    const u64 keep = s == Space::kLocal ? kWindowMask : ~0ull;
    for (int i = 0; i < kLanes; ++i) addresses[i] = (base[i] + offset) & keep;
  } else {
    const u32* base = w.lanes<u32>(inst.op[5]);
    for (int i = 0; i < kLanes; ++i) addresses[i] = u32(base[i] + u32(offset));
  }
}

}  // namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL
