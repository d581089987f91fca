// f16 and bf16 arithmetic, scalar and packed in pairs, each operation rounded once.
#include "vgpu/half.h"

#include <cmath>
#include <limits>

#include "vgpu/lanes.h"
#include "vgpu/round.h"

namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL {
namespace {

constexpr InstClass kClass = InstClass::kHalf;

struct F16 {
  static constexpr u16 kExponent = 0x7c00, kOne = 0x3c00;
  static float up(u16 v) { return half_to_float(v); }
  static u16 down(float v) { return float_to_half(v); }
  static u16 down64(double v) { return double_to_half(v); }
};
struct BF16 {
  static constexpr u16 kExponent = 0x7f80, kOne = 0x3f80;
  static float up(u16 v) { return bf16_to_float(v); }
  static u16 down(float v) { return float_to_bf16(v); }
  static u16 down64(double v) { return double_to_bf16(v); }
};

constexpr u32 kFtz = 1, kSat = 2, kRelu = 4, kNan = 8, kXor = 16;

template <class F, u32 kFlags>
u16 in(u16 v) {
  if (!(kFlags & kFtz)) return v;
  return (v & F::kExponent) == 0 ? v & 0x8000 : v;
}

template <class F, u32 kFlags>
u16 out(u16 v) {
  bool nan = (v & 0x7fff) > F::kExponent;
  if (kFlags & kFtz) v = in<F, kFlags>(v);
  if (kFlags & kSat) {
    u16 clamped = v & 0x8000 ? 0 : v > F::kOne ? F::kOne : v;
    v = nan ? 0 : clamped;
  }
  if (kFlags & kRelu) v = nan ? 0x7fff : v & 0x8000 ? 0 : v;
  return v;
}

// Products of bf16 may fall below float's subnormals, so products go through double; sums are safe in float.
template <class F, u32 kFlags>
u16 add(u16 a, u16 b) {
  return out<F, kFlags>(F::down(F::up(in<F, kFlags>(a)) + F::up(in<F, kFlags>(b))));
}
template <class F, u32 kFlags>
u16 sub(u16 a, u16 b) {
  return out<F, kFlags>(F::down(F::up(in<F, kFlags>(a)) - F::up(in<F, kFlags>(b))));
}
template <class F, u32 kFlags>
u16 mul(u16 a, u16 b) {
  return out<F, kFlags>(F::down64(double(F::up(in<F, kFlags>(a))) * double(F::up(in<F, kFlags>(b)))));
}
template <class F, u32 kFlags>
u16 fma(u16 a, u16 b, u16 c) {
  double product = double(F::up(in<F, kFlags>(a))) * double(F::up(in<F, kFlags>(b)));
  return out<F, kFlags>(F::down64(fma_odd(product, double(F::up(in<F, kFlags>(c))))));
}
template <class F, u32 kFlags>
u16 neg(u16 a) {
  return in<F, kFlags>(a) ^ 0x8000;
}
template <class F, u32 kFlags>
u16 absolute(u16 a) {
  return in<F, kFlags>(a) & 0x7fff;
}

template <class F, u32 kFlags, bool kMax>
u16 pick(u16 a, u16 b) {
  a = in<F, kFlags>(a);
  b = in<F, kFlags>(b);
  u16 sign = (a ^ b) & 0x8000;
  if (kFlags & kXor) a &= 0x7fff, b &= 0x7fff;
  bool a_nan = (a & 0x7fff) > F::kExponent, b_nan = (b & 0x7fff) > F::kExponent;
  i32 x = a & 0x8000 ? -i32(a & 0x7fff) - 1 : a,
      y = b & 0x8000 ? -i32(b & 0x7fff) - 1 : b;  // ordered like the values, -0 < +0
  u16 r = (x < y) == kMax ? b : a;
  r = a_nan ? b : b_nan ? a : r;
  bool nan = kFlags & kNan ? a_nan || b_nan : a_nan && b_nan;
  if (kFlags & kXor) r = (r & 0x7fff) | sign;
  return nan ? 0x7fff : r;
}

template <class F>
u16 ex2(u16 a) {
  return F::down64(std::exp2(double(F::up(a))));
}
template <class F>
u16 ex2_ftz(u16 a) {
  return out<F, kFtz>(F::down64(std::exp2(double(F::up(in<F, kFtz>(a))))));
}
template <class F>
u16 tangent_h(u16 a) {
  return F::down64(std::tanh(double(F::up(a))));
}

template <u16 (*G)(u16)>
u32 pair1(u32 a) {
  return u32(G(u16(a))) | u32(G(u16(a >> 16))) << 16;
}
template <u16 (*G)(u16, u16)>
u32 pair2(u32 a, u32 b) {
  return u32(G(u16(a), u16(b))) | u32(G(u16(a >> 16), u16(b >> 16))) << 16;
}
template <u16 (*G)(u16, u16, u16)>
u32 pair3(u32 a, u32 b, u32 c) {
  return u32(G(u16(a), u16(b), u16(c))) | u32(G(u16(a >> 16), u16(b >> 16), u16(c >> 16))) << 16;
}

struct Adder {
  Registry& r;
  std::string type;  // ".f16"

  template <u16 (*G)(u16)>
  void one(const std::string& name) {
    r.add(name + type, kClass, "Hh", unary<G, u16, u16>);
    r.add(name + type + "x2", kClass, "Ww", unary<pair1<G>, u32, u32>);
  }
  template <u16 (*G)(u16, u16)>
  void two(const std::string& name) {
    r.add(name + type, kClass, "Hhh", binary<G, u16, u16>);
    r.add(name + type + "x2", kClass, "Www", binary<pair2<G>, u32, u32>);
  }
  template <u16 (*G)(u16, u16, u16)>
  void three(const std::string& name) {
    r.add(name + type, kClass, "Hhhh", ternary<G, u16, u16>);
    r.add(name + type + "x2", kClass, "Wwww", ternary<pair3<G>, u32, u32>);
  }
};

template <class F, u32 kFlags>
void register_arithmetic(Adder a, const std::string& tail) {
  for (const char* round : {"", ".rn"}) {
    a.two<add<F, kFlags>>(std::string("add") + round + tail);
    a.two<sub<F, kFlags>>(std::string("sub") + round + tail);
    a.two<mul<F, kFlags>>(std::string("mul") + round + tail);
  }
}

template <class F>
void register_common(Registry& r, const std::string& type) {
  Adder a{r, type};
  register_arithmetic<F, 0>(a, "");
  a.three<fma<F, 0>>("fma.rn");
  a.three<fma<F, kRelu>>("fma.rn.relu");
  a.one<neg<F, 0>>("neg");
  a.one<absolute<F, 0>>("abs");
  a.two<pick<F, 0, false>>("min");
  a.two<pick<F, 0, true>>("max");
  a.two<pick<F, kNan, false>>("min.NaN");
  a.two<pick<F, kNan, true>>("max.NaN");
  a.two<pick<F, kXor, false>>("min.xorsign.abs");
  a.two<pick<F, kXor, true>>("max.xorsign.abs");
  a.two<pick<F, kXor | kNan, false>>("min.NaN.xorsign.abs");
  a.two<pick<F, kXor | kNan, true>>("max.NaN.xorsign.abs");
  a.one<tangent_h<F>>("tanh.approx");
}

}  // namespace

void register_half(Registry& r) {
  register_common<F16>(r, ".f16");
  register_common<BF16>(r, ".bf16");
  Adder h{r, ".f16"};
  register_arithmetic<F16, kFtz>(h, ".ftz");
  register_arithmetic<F16, kSat>(h, ".sat");
  register_arithmetic<F16, kFtz | kSat>(h, ".ftz.sat");
  h.three<fma<F16, kFtz>>("fma.rn.ftz");
  h.three<fma<F16, kSat>>("fma.rn.sat");
  h.three<fma<F16, kFtz | kSat>>("fma.rn.ftz.sat");
  h.three<fma<F16, kFtz | kRelu>>("fma.rn.ftz.relu");
  h.one<neg<F16, kFtz>>("neg.ftz");
  h.one<absolute<F16, kFtz>>("abs.ftz");
  h.two<pick<F16, kFtz, false>>("min.ftz");
  h.two<pick<F16, kFtz, true>>("max.ftz");
  h.two<pick<F16, kFtz | kNan, false>>("min.ftz.NaN");
  h.two<pick<F16, kFtz | kNan, true>>("max.ftz.NaN");
  h.one<ex2<F16>>("ex2.approx");
  Adder b{r, ".bf16"};
  b.one<ex2_ftz<BF16>>("ex2.approx.ftz");
}

}  // namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL
