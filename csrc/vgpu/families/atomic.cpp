// atom and red. Lanes go in order; every one is a compare-and-swap on host memory, so that blocks on other threads see
// it whole.
#include <cmath>
#include <cstring>

#include "vgpu/block.h"
#include "vgpu/half.h"
#include "vgpu/lanes.h"
#include "vgpu/memory_operand.h"
#include "vgpu/round.h"

namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL {
namespace {

constexpr InstClass kClass = InstClass::kAtomic;

// Inst: op[0] destination (kNoOperand for red), op[1] value, op[2] swap value of cas, aux vector length | ordering.
template <class T, class F>
T swap_in(u8* pointer, F&& next) {
  T* p = reinterpret_cast<T*>(pointer);
  T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (!__atomic_compare_exchange_n(p, &old, next(old), true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}

// What an atomic knows while it runs: it publishes before, and collects once it has read.
class Atomic {
 public:
  Atomic(Warp& w, const Inst& inst, u32 mask, u32 bytes, u8** pointers);
  ~Atomic() { w_.after_strong_read(addresses_, mask_, ordering_); }

 private:
  Warp& w_;
  u32 mask_, ordering_;
  u64 addresses_[kLanes];
};

Atomic::Atomic(Warp& w, const Inst& inst, u32 mask, u32 bytes, u8** pointers)
    : w_(w), mask_(mask), ordering_(inst.aux) {
  memory_addresses(w, inst, mask, addresses_);
  w.resolve(memory_space(inst), addresses_, mask, bytes, bytes, Access::kAtomic, pointers);
  ++w.worker->counters.atomics;
  if (w.tracks_races()) {  // atomics order what comes before and after them
    w.release(w.block->strong);
    w.acquire(w.block->strong);
  }
  w.before_strong_write(addresses_, mask, ordering_);
}

template <class T, T (*F)(T old, T value)>
void rmw(Warp& w, const Inst& inst, u32 mask) {
  u8* pointers[kLanes];
  const Atomic atomic(w, inst, mask, sizeof(T), pointers);
  const T* a = w.lanes<T>(inst.op[1]);
  T* d = inst.op[0] == kNoOperand ? nullptr : w.lanes<T>(inst.op[0]);
  for (u32 m = mask; m; m &= m - 1) {
    int i = std::countr_zero(m);
    T value = a[i];
    T old = swap_in<T>(pointers[i], [=](T v) { return F(v, value); });
    if (d) d[i] = old;
  }
}

// add.f32 flushes subnormals in global memory, not in shared memory.
float add_flush(float a, float b) {
  return canonical(flush(flush(a) + flush(b)));
}
float add_plain(float a, float b) {
  return canonical(a + b);
}

void add_float(Warp& w, const Inst& inst, u32 mask) {
  const u32 count = inst.aux & 15;
  u8* pointers[kLanes];
  const Atomic atomic(w, inst, mask, 4 * count, pointers);
  Space space = memory_space(inst);
  bool shared = space == Space::kShared || space == Space::kSharedCluster;
  const i32* regs = count > 1 ? &w.kernel().pool[inst.ext] : nullptr;
  for (u32 m = mask; m; m &= m - 1) {
    int i = std::countr_zero(m);
    for (u32 k = 0; k < count; ++k) {
      float value = w.lanes<float>(regs ? regs[count + k] : inst.op[1])[i];
      OperandRef to = regs ? regs[k] : inst.op[0];
      u32 old = swap_in<u32>(pointers[i] + 4 * k, [=](u32 v) {
        float f = std::bit_cast<float>(v);
        return std::bit_cast<u32>(shared ? add_plain(f, value) : add_flush(f, value));
      });
      if (to != kNoOperand) w.lanes<u32>(to)[i] = old;
    }
  }
}

template <u32 (*F)(u32, u32)>
void packed_vector(Warp& w, const Inst& inst, u32 mask) {  // f16x2, bf16x2 with .v2, .v4
  const u32 count = inst.aux & 15;
  u8* pointers[kLanes];
  const Atomic atomic(w, inst, mask, 4 * count, pointers);
  const i32* regs = &w.kernel().pool[inst.ext];
  for (u32 m = mask; m; m &= m - 1) {
    int i = std::countr_zero(m);
    for (u32 k = 0; k < count; ++k) {
      u32 value = w.lanes<u32>(regs[count + k])[i];
      u32 old = swap_in<u32>(pointers[i] + 4 * k, [=](u32 v) { return F(v, value); });
      if (regs[k] != kNoOperand) w.lanes<u32>(regs[k])[i] = old;
    }
  }
}

template <class T>
void cas(Warp& w, const Inst& inst, u32 mask) {
  u8* pointers[kLanes];
  const Atomic atomic(w, inst, mask, sizeof(T), pointers);
  const T* expected = w.lanes<T>(inst.op[1]);
  const T* value = w.lanes<T>(inst.op[2]);
  T* d = w.lanes<T>(inst.op[0]);
  for (u32 m = mask; m; m &= m - 1) {
    int i = std::countr_zero(m);
    T e = expected[i], v = value[i];
    d[i] = swap_in<T>(pointers[i], [=](T old) { return old == e ? v : old; });
  }
}

u16 add_half(u16 a, u16 b) {
  return float_to_half(half_to_float(a) + half_to_float(b));
}
u16 add_brain(u16 a, u16 b) {
  return float_to_bf16(bf16_to_float(a) + bf16_to_float(b));
}
template <u16 (*G)(u16, u16)>
u32 both(u32 a, u32 b) {
  return u32(G(u16(a), u16(b))) | u32(G(u16(a >> 16), u16(b >> 16))) << 16;
}

template <class T>
T f_add(T a, T b) {
  return T(a + b);
}
template <class T>
T f_and(T a, T b) {
  return a & b;
}
template <class T>
T f_or(T a, T b) {
  return a | b;
}
template <class T>
T f_xor(T a, T b) {
  return a ^ b;
}
template <class T>
T f_exch(T, T b) {
  return b;
}
template <class T, class S>
T f_min(T a, T b) {
  return S(a) < S(b) ? a : b;
}
template <class T, class S>
T f_max(T a, T b) {
  return S(a) > S(b) ? a : b;
}
u32 f_inc(u32 a, u32 b) {
  return a >= b ? 0 : a + 1;
}
u32 f_dec(u32 a, u32 b) {
  return a == 0 || a > b ? b : a - 1;
}
u64 f_add_double(u64 a, u64 b) {
  return std::bit_cast<u64>(std::bit_cast<double>(a) + std::bit_cast<double>(b));
}

// Form::tag: register bits | has result << 8 | is cas << 9 | vector length << 12 | space << 16 | float immediates
// << 24.
void decode_atomic(DecodeContext& ctx, const Form& form) {
  int bits = int(form.tag & 255);
  bool result = form.tag >> 8 & 1, is_cas = form.tag >> 9 & 1;
  u32 count = form.tag >> 12 & 15;
  Imm imm = form.tag >> 24 & 1 ? (bits == 64 ? Imm::kFloat64 : Imm::kFloat32) : Imm::kInteger;
  bool hint = ctx.inst().modifiers.find(".L2::cache_hint") != std::string::npos;
  size_t operands = size_t(result) + 2 + is_cas;
  ctx.require(ctx.count() == operands + hint, "wrong number of operands");
  if (hint) ctx.src(ctx.operand(operands), 64);
  size_t k = 0;
  Inst& out = ctx.out();
  if (count > 1) {
    std::vector<i32> regs;
    for (u32 e = 0; e < count; ++e) {
      ctx.require(!result || ctx.operand(0).elements.size() == count, "wrong number of registers");
      regs.push_back(result ? ctx.dst(ctx.operand(0).elements[e], bits) : kNoOperand);
    }
    const Operand& value = ctx.operand(result ? 2 : 1);
    ctx.require(value.elements.size() == count, "wrong number of registers");
    for (u32 e = 0; e < count; ++e) regs.push_back(ctx.src(value.elements[e], bits, imm));
    ctx.out().ext = ctx.pool(regs);
    k = result;
  } else {
    if (result) out.op[0] = ctx.dst(ctx.operand(k++), bits);
    out.op[1] = ctx.src(ctx.operand(k + 1), bits, imm);
    if (is_cas) out.op[2] = ctx.src(ctx.operand(k + 2), bits, imm);
  }
  decode_memory_operand(ctx, ctx.operand(k), Space(form.tag >> 16 & 255));
  ctx.out().aux = count | ordering_of(ctx.inst().modifiers);
}

struct Adder {
  Registry& r;
  std::string space_name;
  Space space;

  void add(const std::string& tail, int bits, Handler h, u32 count = 1, bool is_float = false) {
    u64 tag = u64(bits) | u64(count) << 12 | u64(space) << 16 | u64(is_float) << 24;
    r.add("atom" + space_name + tail, kClass, decode_atomic, h, tag | 1u << 8);
    r.add("red" + space_name + tail, kClass, decode_atomic, h, tag);
  }
  void only_atom(const std::string& tail, int bits, Handler h, bool is_cas) {
    r.add("atom" + space_name + tail, kClass, decode_atomic, h,
          u64(bits) | 1u << 8 | u32(is_cas) << 9 | 1u << 12 | u64(space) << 16);
  }

  void run() {
    add(".add.u32", 32, rmw<u32, f_add<u32>>);
    add(".add.s32", 32, rmw<u32, f_add<u32>>);
    add(".add.u64", 64, rmw<u64, f_add<u64>>);
    add(".add.f32", 32, add_float, 1, true);
    add(".add.f64", 64, rmw<u64, f_add_double>, 1, true);
    add(".add.noftz.f16", 16, rmw<u16, add_half>);
    add(".add.noftz.bf16", 16, rmw<u16, add_brain>);
    add(".add.noftz.f16x2", 32, rmw<u32, both<add_half>>);
    add(".add.noftz.bf16x2", 32, rmw<u32, both<add_brain>>);
    add(".and.b32", 32, rmw<u32, f_and<u32>>);
    add(".or.b32", 32, rmw<u32, f_or<u32>>);
    add(".xor.b32", 32, rmw<u32, f_xor<u32>>);
    add(".and.b64", 64, rmw<u64, f_and<u64>>);
    add(".or.b64", 64, rmw<u64, f_or<u64>>);
    add(".xor.b64", 64, rmw<u64, f_xor<u64>>);
    add(".inc.u32", 32, rmw<u32, f_inc>);
    add(".dec.u32", 32, rmw<u32, f_dec>);
    add(".min.u32", 32, rmw<u32, f_min<u32, u32>>);
    add(".min.s32", 32, rmw<u32, f_min<u32, i32>>);
    add(".min.u64", 64, rmw<u64, f_min<u64, u64>>);
    add(".min.s64", 64, rmw<u64, f_min<u64, i64>>);
    add(".max.u32", 32, rmw<u32, f_max<u32, u32>>);
    add(".max.s32", 32, rmw<u32, f_max<u32, i32>>);
    add(".max.u64", 64, rmw<u64, f_max<u64, u64>>);
    add(".max.s64", 64, rmw<u64, f_max<u64, i64>>);
    only_atom(".exch.b32", 32, rmw<u32, f_exch<u32>>, false);
    only_atom(".exch.b64", 64, rmw<u64, f_exch<u64>>, false);
    only_atom(".cas.b16", 16, cas<u16>, true);
    only_atom(".cas.b32", 32, cas<u32>, true);
    only_atom(".cas.b64", 64, cas<u64>, true);
  }

  void vectors() {  // global only
    add(".add.v2.f32", 32, add_float, 2, true);
    add(".add.v4.f32", 32, add_float, 4, true);
    add(".add.noftz.v2.f16x2", 32, packed_vector<both<add_half>>, 2);
    add(".add.noftz.v4.f16x2", 32, packed_vector<both<add_half>>, 4);
    add(".add.noftz.v2.bf16x2", 32, packed_vector<both<add_brain>>, 2);
    add(".add.noftz.v4.bf16x2", 32, packed_vector<both<add_brain>>, 4);
  }
};

}  // namespace

void register_atomic(Registry& r) {
  for (const char* root : {"atom", "red"}) {
    r.any_order(root);
    r.ignore(root, {"relaxed", "release", "cta", "cluster", "gpu", "sys", "L2::cache_hint"});
  }
  r.ignore("atom", {"acquire", "acq_rel"});
  Adder{r, "", Space::kGeneric}.run();
  Adder{r, ".global", Space::kGlobal}.run();
  Adder{r, ".shared", Space::kShared}.run();
  Adder{r, ".shared::cta", Space::kShared}.run();
  Adder{r, ".shared::cluster", Space::kSharedCluster}.run();
  Adder{r, ".global", Space::kGlobal}.vectors();
}

}  // namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL
