// Logic and bits: and, or, xor, not, cnot, lop3, shifts, bit fields, prmt, popc, clz, brev, bfind, fns, bmsk, szext.
#include <algorithm>

#include "vgpu/lanes.h"

namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL {
namespace {

constexpr InstClass kClass = InstClass::kLogic;

template <class T>
void register_logic(Registry& r, const std::string& type, const char* two, const char* one) {
  r.add("and" + type, kClass, two, binary<[](T a, T b) { return T(a & b); }, T, T>);
  r.add("or" + type, kClass, two, binary<[](T a, T b) { return T(a | b); }, T, T>);
  r.add("xor" + type, kClass, two, binary<[](T a, T b) { return T(a ^ b); }, T, T>);
  r.add("not" + type, kClass, one, unary<[](T a) { return T(~a); }, T, T>);
  r.add("cnot" + type, kClass, one, unary<[](T a) { return T(a == 0); }, T, T>);
}

template <class T>
void register_shifts(Registry& r, const std::string& size, const char* sig) {
  using S = std::make_signed_t<T>;
  constexpr u32 kBits = sizeof(T) * 8;
  auto left = binary<[](T a, u32 n) { return n >= kBits ? T(0) : T(a << (n & (kBits - 1))); }, T, T, u32>;
  auto right = binary<[](T a, u32 n) { return n >= kBits ? T(0) : T(a >> (n & (kBits - 1))); }, T, T, u32>;
  auto arithmetic = binary<[](S a, u32 n) { return S(a >> std::min(n, kBits - 1)); }, S, S, u32>;
  r.add("shl.b" + size, kClass, sig, left);
  r.add("shr.b" + size, kClass, sig, right);
  r.add("shr.u" + size, kClass, sig, right);
  r.add("shr.s" + size, kClass, sig, arithmetic);
}

template <u32 (*Op)(u32, u32)>
void pred2(Warp& w, const Inst& inst, u32 mask) {
  set_pred(w, inst.op[0], mask, Op(read_pred(w, inst, 1), read_pred(w, inst, 2)));
}
u32 pand(u32 a, u32 b) {
  return a & b;
}
u32 por(u32 a, u32 b) {
  return a | b;
}
u32 pxor(u32 a, u32 b) {
  return a ^ b;
}
void pred_not(Warp& w, const Inst& inst, u32 mask) {
  set_pred(w, inst.op[0], mask, ~read_pred(w, inst, 1));
}

u32 lut3(u32 a, u32 b, u32 c, u32 lut) {
  u32 result = 0;
  for (u32 k = 0; k < 8; ++k) {
    u32 term = (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    result |= lut >> k & 1 ? term : 0;
  }
  return result;
}

template <int kBool>  // 0 plain, 1 .or, 2 .and
void lop3(Warp& w, const Inst& inst, u32 mask) {
  constexpr int kFirst = kBool ? 2 : 1;
  u32* d = w.lanes<u32>(inst.op[0]);
  const u32* a = w.lanes<u32>(inst.op[kFirst]);
  const u32* b = w.lanes<u32>(inst.op[kFirst + 1]);
  const u32* c = w.lanes<u32>(inst.op[kFirst + 2]);
  const u32 lut = inst.aux;
  u32 nonzero = 0;
  for_lanes(mask, [&](int i) {
    u32 v = lut3(a[i], b[i], c[i], lut);
    d[i] = v;
    if (kBool) nonzero |= u32(v != 0) << i;
  });
  if (kBool) {
    u32 q = w.pred(i32(inst.imm));
    if (inst.negate & 1) q = ~q;
    set_pred(w, inst.op[1], mask, kBool == 1 ? nonzero | q : nonzero & q);
  }
}

void decode_lop3(DecodeContext& ctx, const Form& form) {
  bool with_pred = form.tag != 0;
  ctx.require(ctx.count() == (with_pred ? 6u : 5u), "wrong number of operands");
  u64 lut;
  if (!ctx.constant_value(ctx.operand(4), &lut) || lut > 255)
    ctx.reject("the look-up table must be an immediate of 8 bits");
  Inst& out = ctx.out();
  int slot = 0;
  out.op[slot++] = ctx.dst(ctx.operand(0), 32);
  if (with_pred) {
    const auto& pair = ctx.operand(0).pair;
    out.op[slot++] = pair.empty() ? ctx.scratch(1) : ctx.dst(pair[0], 1);
  }
  for (int k = 1; k <= 3; ++k) out.op[slot++] = ctx.src(ctx.operand(size_t(k)), 32);
  out.aux = u32(lut);
  if (with_pred) {
    bool negated;
    out.imm = u32(ctx.src_pred(ctx.operand(5), &negated));
    out.negate = negated;
  }
}

template <bool kLeft, bool kWrap>
u32 funnel(u32 low, u32 high, u32 n) {
  n = kWrap ? n & 31 : std::min(n, 32u);
  u64 both = u64(high) << 32 | low;
  return kLeft ? u32((both << n) >> 32) : u32(both >> n);
}

template <class T>
T bit_extract(T value, u32 position, u32 length) {
  constexpr u32 kBits = sizeof(T) * 8;
  using U = std::make_unsigned_t<T>;
  position &= 255;
  length &= 255;
  U bits = position >= kBits ? 0 : U(U(value) >> position);
  U keep = length >= kBits ? ~U(0) : U((U(1) << length) - 1);
  bits &= keep;
  if (std::is_signed_v<T>) {  // the sign is the field's top bit, or the value's when the field runs over it
    u32 top = std::min(position + length - 1, kBits - 1);
    bool negative = length && (U(value) >> top & 1);
    if (negative) bits |= ~keep;
    if (negative && position < kBits && position + length > kBits) bits |= ~(U(~U(0)) >> position);
    if (negative && position >= kBits) bits = ~U(0);
  }
  return T(bits);
}

template <class T>
T bit_insert(T field, T into, u32 position, u32 length) {
  constexpr u32 kBits = sizeof(T) * 8;
  position &= 255;
  length &= 255;
  if (position >= kBits || length == 0) return into;
  T keep = length >= kBits ? ~T(0) : T((T(1) << length) - 1);
  T mask = T(keep << position);
  return (into & ~mask) | (T(field << position) & mask);
}

template <class T>
void bfi(Warp& w, const Inst& inst, u32 mask) {
  T* d = w.lanes<T>(inst.op[0]);
  const T* a = w.lanes<T>(inst.op[1]);
  const T* b = w.lanes<T>(inst.op[2]);
  const u32* c = w.lanes<u32>(inst.op[3]);
  const u32* n = w.lanes<u32>(inst.op[4]);
  for_lanes(mask, [=](int i) { d[i] = bit_insert(a[i], b[i], c[i], n[i]); });
}

u32 permute(u32 a, u32 b, u32 selectors) {
  u64 bytes = u64(b) << 32 | a;
  u32 result = 0;
  for (u32 k = 0; k < 4; ++k) {
    u32 s = selectors >> (4 * k) & 15;
    u32 byte = u32(bytes >> (8 * (s & 7))) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * k);
  }
  return result;
}

// prmt with a mode: four selectors derived from the two low bits of c.
u32 mode_selectors(int mode, u32 c) {
  static const u32 table[6][4] = {{0x3210, 0x4321, 0x5432, 0x6543}, {0x5670, 0x6701, 0x7012, 0x0123},
                                  {0x0000, 0x1111, 0x2222, 0x3333}, {0x3210, 0x3211, 0x3222, 0x3333},
                                  {0x0000, 0x1110, 0x2210, 0x3210}, {0x1010, 0x3232, 0x1010, 0x3232}};
  return table[mode][c & 3];
}

template <int kMode>
u32 permute_mode(u32 a, u32 b, u32 c) {
  return permute(a, b, mode_selectors(kMode, c));
}

template <class T>
u32 population(T a) {
  return u32(std::popcount(a));
}
template <class T>
u32 leading_zeros(T a) {
  return u32(std::countl_zero(a));
}
template <class T>
T reverse_bits(T a) {
  T r = 0;
  for (size_t k = 0; k < sizeof(T) * 8; ++k) r |= T(a >> k & 1) << (sizeof(T) * 8 - 1 - k);
  return r;
}

template <class T, bool kShift>
u32 find_top(T a) {
  using U = std::make_unsigned_t<T>;
  U v = std::is_signed_v<T> && a < 0 ? U(~a) : U(a);
  if (v == 0) return kFullMask;
  u32 zeros = u32(std::countl_zero(v));
  return kShift ? zeros : u32(sizeof(T) * 8 - 1) - zeros;
}

u32 find_nth(u32 mask, u32 base, i32 offset) {
  if (offset == 0) return base < 32 && (mask >> base & 1) ? base : kFullMask;
  i64 step = offset > 0 ? 1 : -1, count = offset > 0 ? i64(offset) : -i64(offset);
  for (i64 k = base; k >= 0 && k < 32; k += step) {
    if ((mask >> k & 1) && --count == 0) return u32(k);
  }
  return kFullMask;
}

template <bool kWrap>
u32 bit_mask(u32 position, u32 length) {
  if (kWrap) {
    position &= 31;
    length &= 31;
  } else if (position >= 32) {
    return 0;
  }
  u64 ones = length >= 32 ? 0xffffffffull : (1ull << length) - 1;
  return u32(ones << position);
}

template <class T, bool kWrap>
u32 sign_zero_extend(u32 a, u32 n) {
  if (kWrap) n &= 31;
  if (n >= 32) return a;
  if (n == 0) return 0;
  u32 low = a & ((1u << n) - 1);
  if (std::is_signed_v<T> && (a >> (n - 1) & 1)) low |= ~((1u << n) - 1);
  return low;
}

}  // namespace

void register_logic(Registry& r) {
  register_logic<u16>(r, ".b16", "Hhh", "Hh");
  register_logic<u32>(r, ".b32", "Www", "Ww");
  register_logic<u64>(r, ".b64", "Xxx", "Xx");
  r.add("and.pred", kClass, "Ppp", pred2<pand>);
  r.add("or.pred", kClass, "Ppp", pred2<por>);
  r.add("xor.pred", kClass, "Ppp", pred2<pxor>);
  r.add("not.pred", kClass, "Pp", pred_not);
  register_shifts<u16>(r, "16", "Hhw");
  register_shifts<u32>(r, "32", "Www");
  register_shifts<u64>(r, "64", "Xxw");
  r.add("shf.l.wrap.b32", kClass, "Wwww", ternary<funnel<true, true>, u32, u32>);
  r.add("shf.l.clamp.b32", kClass, "Wwww", ternary<funnel<true, false>, u32, u32>);
  r.add("shf.r.wrap.b32", kClass, "Wwww", ternary<funnel<false, true>, u32, u32>);
  r.add("shf.r.clamp.b32", kClass, "Wwww", ternary<funnel<false, false>, u32, u32>);
  r.add("lop3.b32", kClass, decode_lop3, lop3<0>, 0);
  r.add("lop3.or.b32", kClass, decode_lop3, lop3<1>, 1);
  r.add("lop3.and.b32", kClass, decode_lop3, lop3<2>, 2);
  r.add("bfe.u32", kClass, "Wwww", ternary<bit_extract<u32>, u32, u32>);
  r.add("bfe.s32", kClass, "Wwww", ternary<bit_extract<i32>, i32, i32, u32, u32>);
  r.add("bfe.u64", kClass, "Xxww", ternary<bit_extract<u64>, u64, u64, u32, u32>);
  r.add("bfe.s64", kClass, "Xxww", ternary<bit_extract<i64>, i64, i64, u32, u32>);
  r.add("bfi.b32", kClass, "Wwwww", bfi<u32>);
  r.add("bfi.b64", kClass, "Xxxww", bfi<u64>);
  r.add("prmt.b32", kClass, "Wwww", ternary<permute, u32, u32>);
  r.add("prmt.b32.f4e", kClass, "Wwww", ternary<permute_mode<0>, u32, u32>);
  r.add("prmt.b32.b4e", kClass, "Wwww", ternary<permute_mode<1>, u32, u32>);
  r.add("prmt.b32.rc8", kClass, "Wwww", ternary<permute_mode<2>, u32, u32>);
  r.add("prmt.b32.ecl", kClass, "Wwww", ternary<permute_mode<3>, u32, u32>);
  r.add("prmt.b32.ecr", kClass, "Wwww", ternary<permute_mode<4>, u32, u32>);
  r.add("prmt.b32.rc16", kClass, "Wwww", ternary<permute_mode<5>, u32, u32>);
  r.add("popc.b32", kClass, "Ww", unary<population<u32>, u32, u32>);
  r.add("popc.b64", kClass, "Wx", unary<population<u64>, u32, u64>);
  r.add("clz.b32", kClass, "Ww", unary<leading_zeros<u32>, u32, u32>);
  r.add("clz.b64", kClass, "Wx", unary<leading_zeros<u64>, u32, u64>);
  r.add("brev.b32", kClass, "Ww", unary<reverse_bits<u32>, u32, u32>);
  r.add("brev.b64", kClass, "Xx", unary<reverse_bits<u64>, u64, u64>);
  r.add("bfind.u32", kClass, "Ww", unary<find_top<u32, false>, u32, u32>);
  r.add("bfind.s32", kClass, "Ww", unary<find_top<i32, false>, u32, i32>);
  r.add("bfind.u64", kClass, "Wx", unary<find_top<u64, false>, u32, u64>);
  r.add("bfind.s64", kClass, "Wx", unary<find_top<i64, false>, u32, i64>);
  r.add("bfind.shiftamt.u32", kClass, "Ww", unary<find_top<u32, true>, u32, u32>);
  r.add("bfind.shiftamt.s32", kClass, "Ww", unary<find_top<i32, true>, u32, i32>);
  r.add("bfind.shiftamt.u64", kClass, "Wx", unary<find_top<u64, true>, u32, u64>);
  r.add("bfind.shiftamt.s64", kClass, "Wx", unary<find_top<i64, true>, u32, i64>);
  r.add("fns.b32", kClass, "Wwww", ternary<find_nth, u32, u32, u32, i32>);
  r.add("bmsk.clamp.b32", kClass, "Www", binary<bit_mask<false>, u32, u32>);
  r.add("bmsk.wrap.b32", kClass, "Www", binary<bit_mask<true>, u32, u32>);
  r.add("szext.clamp.u32", kClass, "Www", binary<sign_zero_extend<u32, false>, u32, u32>);
  r.add("szext.clamp.s32", kClass, "Www", binary<sign_zero_extend<i32, false>, u32, u32>);
  r.add("szext.wrap.u32", kClass, "Www", binary<sign_zero_extend<u32, true>, u32, u32>);
  r.add("szext.wrap.s32", kClass, "Www", binary<sign_zero_extend<i32, true>, u32, u32>);
}

}  // namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL
