// Integer arithmetic: add, sub, mul, mad, div, rem, abs, neg, min, max, sad, carries, dot products.
#include <algorithm>
#include <limits>

#include "vgpu/lanes.h"

namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL {
namespace {

constexpr InstClass kClass = InstClass::kInteger;

template <class T>
constexpr const char* signature2() {
  return sizeof(T) == 2 ? "Hhh" : sizeof(T) == 4 ? "Www" : "Xxx";
}
template <class T>
constexpr const char* signature3() {
  return sizeof(T) == 2 ? "Hhhh" : sizeof(T) == 4 ? "Wwww" : "Xxxx";
}
template <class T>
constexpr const char* signature1() {
  return sizeof(T) == 2 ? "Hh" : sizeof(T) == 4 ? "Ww" : "Xx";
}

template <class T>
struct WideOf;
template <>
struct WideOf<i16> {
  using type = i32;
};
template <>
struct WideOf<u16> {
  using type = u32;
};
template <>
struct WideOf<i32> {
  using type = i64;
};
template <>
struct WideOf<u32> {
  using type = u64;
};
template <>
struct WideOf<i64> {
  using type = __int128;
};
template <>
struct WideOf<u64> {
  using type = unsigned __int128;
};
template <class T>
using Wide = typename WideOf<T>::type;
template <class T>
using Unsigned = std::make_unsigned_t<T>;

template <class T>
T wrap_add(T a, T b) {
  return T(Unsigned<T>(a) + Unsigned<T>(b));
}
template <class T>
T wrap_sub(T a, T b) {
  return T(Unsigned<T>(a) - Unsigned<T>(b));
}
template <class T>
T mul_lo(T a, T b) {
  return T(u64(a) * u64(b));
}
template <class T>
T mul_hi(T a, T b) {
  return T((Wide<T>(a) * Wide<T>(b)) >> (sizeof(T) * 8));
}
template <class T>
Wide<T> mul_wide(T a, T b) {
  return Wide<T>(a) * Wide<T>(b);
}
template <class T>
T mad_lo(T a, T b, T c) {
  return T(u64(a) * u64(b) + u64(c));
}
template <class T>
T mad_hi(T a, T b, T c) {
  return wrap_add(mul_hi(a, b), c);
}
template <class T>
Wide<T> mad_wide(T a, T b, Wide<T> c) {
  return wrap_add(mul_wide(a, b), c);
}
// Division by zero has no defined result in PTX; hardware gives all ones. The most negative value by -1 wraps.
template <class T>
T divide(T a, T b) {
  if (b == 0) return T(-1);
  if (std::is_signed_v<T> && b == T(-1)) return wrap_sub(T(0), a);
  return T(a / b);
}
template <class T>
T remainder(T a, T b) {
  if (b == 0) return a;
  if (std::is_signed_v<T> && b == T(-1)) return 0;
  return T(a % b);
}
template <class T>
T absolute(T a) {
  return a < 0 ? wrap_sub(T(0), a) : a;
}
template <class T>
T negate(T a) {
  return wrap_sub(T(0), a);
}
template <class T>
T minimum(T a, T b) {
  return a < b ? a : b;
}
template <class T>
T maximum(T a, T b) {
  return a > b ? a : b;
}
template <class T>
T sum_abs(T a, T b, T c) {
  return wrap_add(c, T(a < b ? Unsigned<T>(b) - Unsigned<T>(a) : Unsigned<T>(a) - Unsigned<T>(b)));
}

i32 saturate(i64 v) {
  return v > INT32_MAX ? INT32_MAX : v < INT32_MIN ? INT32_MIN : i32(v);
}
i32 add_sat(i32 a, i32 b) {
  return saturate(i64(a) + b);
}
i32 sub_sat(i32 a, i32 b) {
  return saturate(i64(a) - b);
}
i32 mad_hi_sat(i32 a, i32 b, i32 c) {
  return saturate(i64(mul_hi(a, b)) + c);
}

// Modes of the carry instructions, in Inst::aux.
enum : u32 { kCarryIn = 1, kCarryOut = 2 };

template <class T, bool kSubtract>
void add_carry(Warp& w, const Inst& inst, u32 mask) {
  T* d = w.lanes<T>(inst.op[0]);
  const T* a = w.lanes<T>(inst.op[1]);
  const T* b = w.lanes<T>(inst.op[2]);
  u32 in = inst.aux & kCarryIn ? w.pred(inst.op[5]) : 0, out = 0;
  for_lanes(mask, [&](int i) {
    unsigned __int128 carry = in >> i & 1;
    unsigned __int128 r =
        kSubtract ? (unsigned __int128)(a[i]) - b[i] - carry : (unsigned __int128)(a[i]) + b[i] + carry;
    d[i] = T(r);
    out |= u32(r >> (sizeof(T) * 8) & 1) << i;
  });
  if (inst.aux & kCarryOut) set_pred(w, inst.op[5], mask, out);
}

template <class T, class S, bool kHigh>
void mad_carry(Warp& w, const Inst& inst, u32 mask) {
  T* d = w.lanes<T>(inst.op[0]);
  const T* a = w.lanes<T>(inst.op[1]);
  const T* b = w.lanes<T>(inst.op[2]);
  const T* c = w.lanes<T>(inst.op[3]);
  u32 in = inst.aux & kCarryIn ? w.pred(inst.op[5]) : 0, out = 0;
  for_lanes(mask, [&](int i) {
    T product = kHigh ? T(mul_hi(S(a[i]), S(b[i]))) : T(a[i] * b[i]);
    unsigned __int128 r = (unsigned __int128)(product) + c[i] + (in >> i & 1);
    d[i] = T(r);
    out |= u32(r >> (sizeof(T) * 8) & 1) << i;
  });
  if (inst.aux & kCarryOut) set_pred(w, inst.op[5], mask, out);
}

void decode_carry(DecodeContext& ctx, const Form& form) {
  decode_signature(ctx, form);
  ctx.out().op[5] = ctx.carry();
  ctx.out().aux = u32(form.tag);
}

template <class T, class S>
void register_carry(Registry& r, const std::string& type) {
  const char* two = signature2<T>();
  const char* three = signature3<T>();
  r.add("add.cc" + type, kClass, two, decode_carry, add_carry<T, false>, kCarryOut);
  r.add("addc" + type, kClass, two, decode_carry, add_carry<T, false>, kCarryIn);
  r.add("addc.cc" + type, kClass, two, decode_carry, add_carry<T, false>, kCarryIn | kCarryOut);
  r.add("sub.cc" + type, kClass, two, decode_carry, add_carry<T, true>, kCarryOut);
  r.add("subc" + type, kClass, two, decode_carry, add_carry<T, true>, kCarryIn);
  r.add("subc.cc" + type, kClass, two, decode_carry, add_carry<T, true>, kCarryIn | kCarryOut);
  r.add("mad.lo.cc" + type, kClass, three, decode_carry, mad_carry<T, S, false>, kCarryOut);
  r.add("mad.hi.cc" + type, kClass, three, decode_carry, mad_carry<T, S, true>, kCarryOut);
  r.add("madc.lo" + type, kClass, three, decode_carry, mad_carry<T, S, false>, kCarryIn);
  r.add("madc.hi" + type, kClass, three, decode_carry, mad_carry<T, S, true>, kCarryIn);
  r.add("madc.lo.cc" + type, kClass, three, decode_carry, mad_carry<T, S, false>, kCarryIn | kCarryOut);
  r.add("madc.hi.cc" + type, kClass, three, decode_carry, mad_carry<T, S, true>, kCarryIn | kCarryOut);
}

template <class T>
void register_type(Registry& r, const std::string& type) {
  r.add("add" + type, kClass, signature2<T>(), binary<wrap_add<T>, T, T>);
  r.add("sub" + type, kClass, signature2<T>(), binary<wrap_sub<T>, T, T>);
  r.add("mul.lo" + type, kClass, signature2<T>(), binary<mul_lo<T>, T, T>);
  r.add("mul.hi" + type, kClass, signature2<T>(), binary<mul_hi<T>, T, T>);
  r.add("mad.lo" + type, kClass, signature3<T>(), ternary<mad_lo<T>, T, T>);
  r.add("mad.hi" + type, kClass, signature3<T>(), ternary<mad_hi<T>, T, T>);
  r.add("div" + type, kClass, signature2<T>(), binary<divide<T>, T, T>);
  r.add("rem" + type, kClass, signature2<T>(), binary<remainder<T>, T, T>);
  r.add("min" + type, kClass, signature2<T>(), binary<minimum<T>, T, T>);
  r.add("max" + type, kClass, signature2<T>(), binary<maximum<T>, T, T>);
  r.add("sad" + type, kClass, signature3<T>(), ternary<sum_abs<T>, T, T>);
  if constexpr (std::is_signed_v<T>) {
    r.add("abs" + type, kClass, signature1<T>(), unary<absolute<T>, T, T>);
    r.add("neg" + type, kClass, signature1<T>(), unary<negate<T>, T, T>);
  }
  if constexpr (sizeof(T) < 8) {
    using W = Wide<T>;
    r.add("mul.wide" + type, kClass, sizeof(T) == 2 ? "Whh" : "Xww", binary<mul_wide<T>, W, T>);
    r.add("mad.wide" + type, kClass, sizeof(T) == 2 ? "Whhw" : "Xwwx", ternary<mad_wide<T>, W, T, T, W>);
  }
}

template <class T, T (*F)(T, T)>
u32 halves(u32 a, u32 b) {
  u32 low = u16(F(T(a), T(b))), high = u16(F(T(a >> 16), T(b >> 16)));
  return low | high << 16;
}

template <bool kSignedA, bool kSignedB>
u32 dot4(u32 a, u32 b, u32 c) {
  for (int k = 0; k < 32; k += 8) {
    i32 x = kSignedA ? i32(i8(a >> k)) : i32(u8(a >> k)), y = kSignedB ? i32(i8(b >> k)) : i32(u8(b >> k));
    c += u32(x * y);
  }
  return c;
}

template <bool kSignedA, bool kSignedB, int kShift>
u32 dot2(u32 a, u32 b, u32 c) {
  for (int k = 0; k < 2; ++k) {
    i32 x = kSignedA ? i32(i16(a >> (16 * k))) : i32(u16(a >> (16 * k)));
    i32 y = kSignedB ? i32(i8(b >> (kShift + 8 * k))) : i32(u8(b >> (kShift + 8 * k)));
    c += u32(x * y);
  }
  return c;
}

template <bool kA, bool kB>
void register_dots(Registry& r, const std::string& types) {
  r.add("dp4a" + types, kClass, "Wwww", ternary<dot4<kA, kB>, u32, u32>);
  r.add("dp2a.lo" + types, kClass, "Wwww", ternary<dot2<kA, kB, 0>, u32, u32>);
  r.add("dp2a.hi" + types, kClass, "Wwww", ternary<dot2<kA, kB, 16>, u32, u32>);
}

template <class T>
T mul24_lo(T a, T b) {
  return T(i64(T(a << 8) >> 8) * i64(T(b << 8) >> 8));
}
template <class T>
T mul24_hi(T a, T b) {
  return T((i64(T(a << 8) >> 8) * i64(T(b << 8) >> 8)) >> 16);
}
template <class T>
T mad24_lo(T a, T b, T c) {
  return wrap_add(mul24_lo(a, b), c);
}
template <class T>
T mad24_hi(T a, T b, T c) {
  return wrap_add(mul24_hi(a, b), c);
}

template <class T>
void register_24(Registry& r, const std::string& type) {
  r.add("mul24.lo" + type, kClass, "Www", binary<mul24_lo<T>, T, T>);
  r.add("mul24.hi" + type, kClass, "Www", binary<mul24_hi<T>, T, T>);
  r.add("mad24.lo" + type, kClass, "Wwww", ternary<mad24_lo<T>, T, T>);
  r.add("mad24.hi" + type, kClass, "Wwww", ternary<mad24_hi<T>, T, T>);
}

i32 relu(i32 v) {
  return v < 0 ? 0 : v;
}

}  // namespace

void register_integer(Registry& r) {
  register_type<i16>(r, ".s16");
  register_type<u16>(r, ".u16");
  register_type<i32>(r, ".s32");
  register_type<u32>(r, ".u32");
  register_type<i64>(r, ".s64");
  register_type<u64>(r, ".u64");
  register_carry<u32, u32>(r, ".u32");
  register_carry<u32, i32>(r, ".s32");
  register_carry<u64, u64>(r, ".u64");
  register_carry<u64, i64>(r, ".s64");
  r.add("add.sat.s32", kClass, "Www", binary<add_sat, i32, i32>);
  r.add("sub.sat.s32", kClass, "Www", binary<sub_sat, i32, i32>);
  r.add("mad.hi.sat.s32", kClass, "Wwww", ternary<mad_hi_sat, i32, i32>);
  register_24<i32>(r, ".s32");
  register_24<u32>(r, ".u32");
  r.add("add.s16x2", kClass, "Www", binary<halves<i16, wrap_add<i16>>, u32, u32>);
  r.add("add.u16x2", kClass, "Www", binary<halves<u16, wrap_add<u16>>, u32, u32>);
  r.add("min.s16x2", kClass, "Www", binary<halves<i16, minimum<i16>>, u32, u32>);
  r.add("min.u16x2", kClass, "Www", binary<halves<u16, minimum<u16>>, u32, u32>);
  r.add("max.s16x2", kClass, "Www", binary<halves<i16, maximum<i16>>, u32, u32>);
  r.add("max.u16x2", kClass, "Www", binary<halves<u16, maximum<u16>>, u32, u32>);
  r.add("min.relu.s32", kClass, "Www", binary<[](i32 a, i32 b) { return relu(minimum(a, b)); }, i32, i32>);
  r.add("max.relu.s32", kClass, "Www", binary<[](i32 a, i32 b) { return relu(maximum(a, b)); }, i32, i32>);
  register_dots<true, true>(r, ".s32.s32");
  register_dots<true, false>(r, ".s32.u32");
  register_dots<false, true>(r, ".u32.s32");
  register_dots<false, false>(r, ".u32.u32");
}

}  // namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL
