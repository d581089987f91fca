// setp, set, selp, slct.
#include <cmath>

#include "vgpu/half.h"
#include "vgpu/lanes.h"
#include "vgpu/round.h"

namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL {
namespace {

constexpr InstClass kClass = InstClass::kCompare;

enum class Cmp { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan };
enum class Bool { kNone, kAnd, kOr, kXor };

template <Cmp kCmp, class V>
[[gnu::always_inline]] inline bool compare(V a, V b) {
  switch (kCmp) {
    case Cmp::kEq: return a == b;
    case Cmp::kNe: return a != b && a == a && b == b;
    case Cmp::kLt: return a < b;
    case Cmp::kLe: return a <= b;
    case Cmp::kGt: return a > b;
    case Cmp::kGe: return a >= b;
    case Cmp::kEqu: return !(a != b && a == a && b == b);
    case Cmp::kNeu: return a != b;
    case Cmp::kLtu: return !(a >= b);
    case Cmp::kLeu: return !(a > b);
    case Cmp::kGtu: return !(a <= b);
    case Cmp::kGeu: return !(a < b);
    case Cmp::kNum: return a == a && b == b;
    case Cmp::kNan: return a != a || b != b;
  }
}

// How lane bits become comparable values.
template <class T>
struct Plain {
  using Lane = T;
  static T value(T v) { return v; }
};
struct Flushed {
  using Lane = float;
  static float value(float v) { return flush(v); }
};
struct Half {
  using Lane = u16;
  static float value(u16 v) { return half_to_float(v); }
};
struct HalfFlushed {
  using Lane = u16;
  static float value(u16 v) { return (v & 0x7c00) == 0 ? 0.0f : half_to_float(v); }
};
struct Brain {
  using Lane = u16;
  static float value(u16 v) { return bf16_to_float(v); }
};

template <Cmp kCmp, class S>
[[gnu::always_inline]] inline u32 compare_lanes(const typename S::Lane* a, const typename S::Lane* b) {
  alignas(32) u32 bits[kLanes];
#pragma GCC ivdep
  for (int i = 0; i < kLanes; ++i) bits[i] = compare<kCmp>(S::value(a[i]), S::value(b[i])) ? 1u << i : 0;
  u32 result = 0;
  for (int i = 0; i < kLanes; ++i) result |= bits[i];
  return result;
}

u32 combine(u32 op, u32 a, u32 b) {
  switch (Bool(op)) {
    case Bool::kAnd: return a & b;
    case Bool::kOr: return a | b;
    case Bool::kXor: return a ^ b;
    case Bool::kNone: break;
  }
  return a;
}

// Form::tag: boolean operator, signature letter of the sources << 8, bits of the result << 16 (set).
// setp p|q, a, b{, c}: p = (a cmp b) op c, q = !(a cmp b) op c. Inst::aux holds the operator.
template <Cmp kCmp, class S>
void setp(Warp& w, const Inst& inst, u32 mask) {
  using Lane = typename S::Lane;
  u32 r = compare_lanes<kCmp, S>(w.lanes<Lane>(inst.op[2]), w.lanes<Lane>(inst.op[3]));
  if (inst.aux == 0 && inst.op[1] == kNoOperand) {
    set_pred(w, inst.op[0], mask, r);
    return;
  }
  u32 c = inst.aux ? read_pred(w, inst, 4) : 0;
  u32 p = combine(inst.aux, r, c), q = combine(inst.aux, ~r, c);
  set_pred(w, inst.op[0], mask, p);
  if (inst.op[1] != kNoOperand) set_pred(w, inst.op[1], mask, q);
}

template <Cmp kCmp, class S>
void setp_pair(Warp& w, const Inst& inst, u32 mask) {  // f16x2, bf16x2: one predicate per half
  const u32* a = w.lanes<u32>(inst.op[2]);
  const u32* b = w.lanes<u32>(inst.op[3]);
  u32 low = 0, high = 0, c = inst.aux ? read_pred(w, inst, 4) : 0;
  for_lanes(mask, [&](int i) {
    low |= u32(compare<kCmp>(S::value(u16(a[i])), S::value(u16(b[i])))) << i;
    high |= u32(compare<kCmp>(S::value(u16(a[i] >> 16)), S::value(u16(b[i] >> 16)))) << i;
  });
  set_pred(w, inst.op[0], mask, combine(inst.aux, low, c));
  if (inst.op[1] != kNoOperand) set_pred(w, inst.op[1], mask, combine(inst.aux, high, c));
}

void decode_setp(DecodeContext& ctx, const Form& form) {
  Bool op = Bool(form.tag & 15);
  char width = char(form.tag >> 8);
  int bits = width == 'h' || width == 'e' ? 16 : width == 'x' || width == 'g' ? 64 : 32;
  Imm imm = width == 'f' ? Imm::kFloat32 : width == 'g' ? Imm::kFloat64 : width == 'e' ? Imm::kFloat16 : Imm::kInteger;
  ctx.require(ctx.count() == (op == Bool::kNone ? 3u : 4u), "wrong number of operands");
  Inst& out = ctx.out();
  const Operand& d = ctx.operand(0);
  out.op[0] = ctx.dst(d, 1);
  ctx.require(width != 'e' || d.pair.empty(), "one predicate is the result for a single f16 or bf16");
  if (!d.pair.empty()) out.op[1] = ctx.dst(d.pair[0], 1);
  out.op[2] = ctx.src(ctx.operand(1), bits, imm);
  out.op[3] = ctx.src(ctx.operand(2), bits, imm);
  out.aux = u32(op);
  if (op == Bool::kNone) return;
  bool negated;
  out.op[4] = ctx.src_pred(ctx.operand(3), &negated);
  if (negated) out.negate |= 1u << 4;
}

// set.cmp{.op}.dtype.stype d, a, b{, c}
template <Cmp kCmp, class S, class D, u32 kTrue>
void set(Warp& w, const Inst& inst, u32 mask) {
  using Lane = typename S::Lane;
  u32 r = compare_lanes<kCmp, S>(w.lanes<Lane>(inst.op[2]), w.lanes<Lane>(inst.op[3]));
  if (inst.aux) r = combine(inst.aux, r, read_pred(w, inst, 4));
  D* d = w.lanes<D>(inst.op[0]);
  for_lanes(mask, [=](int i) { d[i] = r >> i & 1 ? D(kTrue) : D(0); });
}

template <Cmp kCmp, class S, u32 kTrue>
void set_pair(Warp& w, const Inst& inst, u32 mask) {
  const u32* a = w.lanes<u32>(inst.op[2]);
  const u32* b = w.lanes<u32>(inst.op[3]);
  u32* d = w.lanes<u32>(inst.op[0]);
  u32 c = inst.aux ? read_pred(w, inst, 4) : 0, op = inst.aux;
  for_lanes(mask, [=](int i) {
    u32 low = compare<kCmp>(S::value(u16(a[i])), S::value(u16(b[i])));
    u32 high = compare<kCmp>(S::value(u16(a[i] >> 16)), S::value(u16(b[i] >> 16)));
    low = combine(op, low, c >> i & 1) & 1;
    high = combine(op, high, c >> i & 1) & 1;
    d[i] = (low ? kTrue : 0) | (high ? kTrue << 16 : 0);
  });
}

void decode_set(DecodeContext& ctx, const Form& form) {
  Bool op = Bool(form.tag & 15);
  char width = char(form.tag >> 8);
  int result = int(form.tag >> 16 & 255);
  int bits = width == 'h' || width == 'e' ? 16 : width == 'x' || width == 'g' ? 64 : 32;
  Imm imm = width == 'f' ? Imm::kFloat32 : width == 'g' ? Imm::kFloat64 : width == 'e' ? Imm::kFloat16 : Imm::kInteger;
  ctx.require(ctx.count() == (op == Bool::kNone ? 3u : 4u), "wrong number of operands");
  Inst& out = ctx.out();
  out.op[0] = ctx.dst(ctx.operand(0), result);
  out.op[2] = ctx.src(ctx.operand(1), bits, imm);
  out.op[3] = ctx.src(ctx.operand(2), bits, imm);
  out.aux = u32(op);
  if (op == Bool::kNone) return;
  bool negated;
  out.op[4] = ctx.src_pred(ctx.operand(3), &negated);
  if (negated) out.negate |= 1u << 4;
}

const char* const kBoolNames[] = {"", ".and", ".or", ".xor"};

template <Cmp kCmp, class S>
void add_setp(Registry& r, const std::string& cmp, const std::string& tail, char width) {
  for (u64 op = 0; op < 4; ++op) {
    r.add("setp." + cmp + kBoolNames[op] + tail, kClass, decode_setp, setp<kCmp, S>, op | u64(width) << 8);
  }
}

template <Cmp kCmp, class S>
void add_setp_pair(Registry& r, const std::string& cmp, const std::string& tail) {
  for (u64 op = 0; op < 4; ++op) {
    r.add("setp." + cmp + kBoolNames[op] + tail, kClass, decode_setp, setp_pair<kCmp, S>, op | u64('w') << 8);
  }
}

template <Cmp kCmp, class S>
void add_set(Registry& r, const std::string& cmp, const std::string& mode, const std::string& source, char width) {
  for (u64 op = 0; op < 4; ++op) {
    u64 tag = op | u64(width) << 8;
    std::string head = "set." + cmp + kBoolNames[op] + mode;
    r.add(head + ".u32" + source, kClass, decode_set, set<kCmp, S, u32, 0xffffffffu>, tag | 32u << 16);
    r.add(head + ".s32" + source, kClass, decode_set, set<kCmp, S, u32, 0xffffffffu>, tag | 32u << 16);
    r.add(head + ".f32" + source, kClass, decode_set, set<kCmp, S, u32, 0x3f800000u>, tag | 32u << 16);
  }
}

template <Cmp kCmp>
void add_both(Registry& r, const std::string& cmp, bool integers, bool order) {
  if (integers) {
    add_setp<kCmp, Plain<u16>>(r, cmp, ".u16", 'h');
    add_setp<kCmp, Plain<u32>>(r, cmp, ".u32", 'w');
    add_setp<kCmp, Plain<u64>>(r, cmp, ".u64", 'x');
    add_setp<kCmp, Plain<i16>>(r, cmp, ".s16", 'h');
    add_setp<kCmp, Plain<i32>>(r, cmp, ".s32", 'w');
    add_setp<kCmp, Plain<i64>>(r, cmp, ".s64", 'x');
    add_set<kCmp, Plain<u32>>(r, cmp, "", ".u32", 'w');
    add_set<kCmp, Plain<i32>>(r, cmp, "", ".s32", 'w');
    if (!order) {
      add_setp<kCmp, Plain<u16>>(r, cmp, ".b16", 'h');
      add_setp<kCmp, Plain<u32>>(r, cmp, ".b32", 'w');
      add_setp<kCmp, Plain<u64>>(r, cmp, ".b64", 'x');
      add_set<kCmp, Plain<u32>>(r, cmp, "", ".b32", 'w');
    }
  }
  add_setp<kCmp, Plain<float>>(r, cmp, ".f32", 'f');
  add_setp<kCmp, Flushed>(r, cmp, ".ftz.f32", 'f');
  add_setp<kCmp, Plain<double>>(r, cmp, ".f64", 'g');
  add_set<kCmp, Plain<float>>(r, cmp, "", ".f32", 'f');
  add_set<kCmp, Flushed>(r, cmp, ".ftz", ".f32", 'f');
  add_setp<kCmp, Half>(r, cmp, ".f16", 'e');
  add_setp<kCmp, HalfFlushed>(r, cmp, ".ftz.f16", 'e');
  add_setp<kCmp, Brain>(r, cmp, ".bf16", 'e');
  add_setp_pair<kCmp, Half>(r, cmp, ".f16x2");
  add_setp_pair<kCmp, HalfFlushed>(r, cmp, ".ftz.f16x2");
  add_setp_pair<kCmp, Brain>(r, cmp, ".bf16x2");
  for (u64 op = 0; op < 4; ++op) {
    std::string head = "set." + cmp + kBoolNames[op];
    r.add(head + ".f16x2.f16x2", kClass, decode_set, set_pair<kCmp, Half, 0x3c00>, op | u64('w') << 8 | 32u << 16);
    r.add(head + ".u32.f16x2", kClass, decode_set, set_pair<kCmp, Half, 0xffff>, op | u64('w') << 8 | 32u << 16);
    r.add(head + ".bf16x2.bf16x2", kClass, decode_set, set_pair<kCmp, Brain, 0x3f80>, op | u64('w') << 8 | 32u << 16);
    r.add(head + ".u32.bf16x2", kClass, decode_set, set_pair<kCmp, Brain, 0xffff>, op | u64('w') << 8 | 32u << 16);
    r.add(head + ".f16.f16", kClass, decode_set, set<kCmp, Half, u16, 0x3c00>, op | u64('e') << 8 | 16u << 16);
    r.add(head + ".bf16.bf16", kClass, decode_set, set<kCmp, Brain, u16, 0x3f80>, op | u64('e') << 8 | 16u << 16);
  }
}

void add_unsigned_names(Registry& r) {  // lo, ls, hi, hs: unsigned integers only
  add_setp<Cmp::kLt, Plain<u16>>(r, "lo", ".u16", 'h');
  add_setp<Cmp::kLt, Plain<u32>>(r, "lo", ".u32", 'w');
  add_setp<Cmp::kLt, Plain<u64>>(r, "lo", ".u64", 'x');
  add_setp<Cmp::kLe, Plain<u16>>(r, "ls", ".u16", 'h');
  add_setp<Cmp::kLe, Plain<u32>>(r, "ls", ".u32", 'w');
  add_setp<Cmp::kLe, Plain<u64>>(r, "ls", ".u64", 'x');
  add_setp<Cmp::kGt, Plain<u16>>(r, "hi", ".u16", 'h');
  add_setp<Cmp::kGt, Plain<u32>>(r, "hi", ".u32", 'w');
  add_setp<Cmp::kGt, Plain<u64>>(r, "hi", ".u64", 'x');
  add_setp<Cmp::kGe, Plain<u16>>(r, "hs", ".u16", 'h');
  add_setp<Cmp::kGe, Plain<u32>>(r, "hs", ".u32", 'w');
  add_setp<Cmp::kGe, Plain<u64>>(r, "hs", ".u64", 'x');
}

template <class T>
void selp(Warp& w, const Inst& inst, u32 mask) {
  T* d = w.lanes<T>(inst.op[0]);
  const T* a = w.lanes<T>(inst.op[1]);
  const T* b = w.lanes<T>(inst.op[2]);
  const u32 p = read_pred(w, inst, 3);
  for_lanes(mask, [=](int i) { d[i] = (p >> i & 1) ? a[i] : b[i]; });
}

template <class T, class C, bool kFlush>
void slct(Warp& w, const Inst& inst, u32 mask) {
  T* d = w.lanes<T>(inst.op[0]);
  const T* a = w.lanes<T>(inst.op[1]);
  const T* b = w.lanes<T>(inst.op[2]);
  const C* c = w.lanes<C>(inst.op[3]);
  for_lanes(mask, [=](int i) { d[i] = c[i] >= C(0) || (kFlush && std::fabs(float(c[i])) < 0x1p-126f) ? a[i] : b[i]; });
}

template <class T>
void add_select(Registry& r, const std::string& type, const std::string& letter, const std::string& upper) {
  static std::deque<std::string> kept;  // signatures live as long as the registry
  auto keep = [](const std::string& s) { return kept.emplace_back(s).c_str(); };
  r.add("selp" + type, kClass, keep(upper + letter + letter + "p"), selp<T>);
  if (sizeof(T) == 2) {
    r.add("slct" + type + ".s32", kClass, keep(upper + letter + letter + "w"), slct<T, i32, false>);
    return;
  }
  r.add("slct" + type + ".s32", kClass, keep(upper + letter + letter + "w"), slct<T, i32, false>);
  r.add("slct" + type + ".f32", kClass, keep(upper + letter + letter + "f"), slct<T, float, false>);
  r.add("slct.ftz" + type + ".f32", kClass, keep(upper + letter + letter + "f"), slct<T, float, true>);
}

}  // namespace

void register_compare(Registry& r) {
  add_both<Cmp::kEq>(r, "eq", true, false);
  add_both<Cmp::kNe>(r, "ne", true, false);
  add_both<Cmp::kLt>(r, "lt", true, true);
  add_both<Cmp::kLe>(r, "le", true, true);
  add_both<Cmp::kGt>(r, "gt", true, true);
  add_both<Cmp::kGe>(r, "ge", true, true);
  add_both<Cmp::kEqu>(r, "equ", false, true);
  add_both<Cmp::kNeu>(r, "neu", false, true);
  add_both<Cmp::kLtu>(r, "ltu", false, true);
  add_both<Cmp::kLeu>(r, "leu", false, true);
  add_both<Cmp::kGtu>(r, "gtu", false, true);
  add_both<Cmp::kGeu>(r, "geu", false, true);
  add_both<Cmp::kNum>(r, "num", false, true);
  add_both<Cmp::kNan>(r, "nan", false, true);
  add_unsigned_names(r);
  for (const char* t : {".b16", ".u16", ".s16"}) add_select<u16>(r, t, "h", "H");
  for (const char* t : {".b32", ".u32", ".s32"}) add_select<u32>(r, t, "w", "W");
  for (const char* t : {".b64", ".u64", ".s64"}) add_select<u64>(r, t, "x", "X");
  add_select<u32>(r, ".f32", "f", "F");
  add_select<u64>(r, ".f64", "g", "G");
}

}  // namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL
