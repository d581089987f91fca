// f32 and f64 arithmetic and special functions. Additions, products, fma, quotients and roots are IEEE in every
// rounding; .approx functions are computed in double and rounded once.
#include <limits>

#include "vgpu/lanes.h"
#include "vgpu/round.h"

namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL {
namespace {

constexpr InstClass kFloat = InstClass::kFloat;
constexpr InstClass kDouble = InstClass::kDouble;
constexpr InstClass kSpecial = InstClass::kSpecialFunction;

enum class Op { kAdd, kSub, kMul, kFma, kDiv, kSqrt, kRcp };

template <Op kOp, class T>
[[gnu::always_inline]] inline T compute(T a, T b, T c) {
  switch (kOp) {
    case Op::kAdd: return a + b;
    case Op::kSub: return a - b;
    case Op::kMul: return a * b;
    case Op::kFma: return std::fma(a, b, c);
    case Op::kDiv: return a / b;
    case Op::kSqrt: return std::sqrt(a);
    case Op::kRcp: return T(1) / a;
  }
}

template <class T, bool kFtz, bool kSat>
[[gnu::always_inline]] inline T finish(T v) {
  if constexpr (sizeof(T) == 4) {
    if (kFtz) v = flush(v);
    v = kSat ? saturate01(v) : canonical(v);
  }
  return v;
}

template <class T, bool kFtz>
[[gnu::always_inline]] inline T load(T v) {
  if constexpr (kFtz && sizeof(T) == 4) return flush(v);
  return v;
}

// Nearest even: plain vector loops.
template <Op kOp, class T, bool kFtz, bool kSat>
void nearest(Warp& w, const Inst& inst, u32 mask) {
  constexpr int kSources = kOp == Op::kFma ? 3 : kOp == Op::kSqrt || kOp == Op::kRcp ? 1 : 2;
  T* d = w.lanes<T>(inst.op[0]);
  const T* a = w.lanes<T>(inst.op[1]);
  const T* b = kSources > 1 ? w.lanes<T>(inst.op[2]) : a;
  const T* c = kSources > 2 ? w.lanes<T>(inst.op[3]) : a;
  for_lanes(mask, [=](int i) {
    d[i] = finish<T, kFtz, kSat>(compute<kOp, T>(load<T, kFtz>(a[i]), load<T, kFtz>(b[i]), load<T, kFtz>(c[i])));
  });
}

template <Op kOp, class T>
[[gnu::noinline]] T computed_in_mode(T a, T b, T c) {
  volatile T x = a, y = b, z = c;
  volatile T r = compute<kOp, T>(x, y, z);
  return r;
}

template <Op kOp, class T, Round kRound, bool kFtz, bool kSat>
void directed(Warp& w, const Inst& inst, u32 mask) {
  constexpr int kSources = kOp == Op::kFma ? 3 : kOp == Op::kSqrt || kOp == Op::kRcp ? 1 : 2;
  T* d = w.lanes<T>(inst.op[0]);
  const T* a = w.lanes<T>(inst.op[1]);
  const T* b = kSources > 1 ? w.lanes<T>(inst.op[2]) : a;
  const T* c = kSources > 2 ? w.lanes<T>(inst.op[3]) : a;
  RoundingScope scope(kRound);
  for (u32 m = mask; m; m &= m - 1) {
    int i = std::countr_zero(m);
    d[i] =
        finish<T, kFtz, kSat>(computed_in_mode<kOp, T>(load<T, kFtz>(a[i]), load<T, kFtz>(b[i]), load<T, kFtz>(c[i])));
  }
}

template <Op kOp, class T, bool kFtz, bool kSat>
void register_rounds(Registry& r, const std::string& name, const std::string& tail, const char* sig, bool plain) {
  InstClass cls = sizeof(T) == 4 ? kFloat : kDouble;
  if (plain) r.add(name + tail, cls, sig, nearest<kOp, T, kFtz, kSat>);
  r.add(name + ".rn" + tail, cls, sig, nearest<kOp, T, kFtz, kSat>);
  r.add(name + ".rz" + tail, cls, sig, directed<kOp, T, Round::kZero, kFtz, kSat>);
  r.add(name + ".rm" + tail, cls, sig, directed<kOp, T, Round::kDown, kFtz, kSat>);
  r.add(name + ".rp" + tail, cls, sig, directed<kOp, T, Round::kUp, kFtz, kSat>);
}

template <Op kOp>
void register_arithmetic(Registry& r, const std::string& name, bool plain, bool sat) {
  constexpr int kSources = kOp == Op::kFma ? 3 : kOp == Op::kSqrt || kOp == Op::kRcp ? 1 : 2;
  const char* f = kSources == 3 ? "Ffff" : kSources == 2 ? "Fff" : "Ff";
  const char* g = kSources == 3 ? "Gggg" : kSources == 2 ? "Ggg" : "Gg";
  register_rounds<kOp, float, false, false>(r, name, ".f32", f, plain);
  register_rounds<kOp, float, true, false>(r, name, ".ftz.f32", f, plain);
  if (sat) {
    register_rounds<kOp, float, false, true>(r, name, ".sat.f32", f, plain);
    register_rounds<kOp, float, true, true>(r, name, ".ftz.sat.f32", f, plain);
  }
  register_rounds<kOp, double, false, false>(r, name, ".f64", g, plain);
}

// ---- special functions, in double ----

// 2^x to about 1e-14: rounded to float this is right but for ties that no float input reaches.
[[gnu::always_inline]] inline double exp2_double(double x) {
  x = x < -200.0 ? -200.0 : x > 200.0 ? 200.0 : x;  // NaN stays
  double shifted = x + 0x1.8p52;
  double n = shifted - 0x1.8p52;
  double f = x - n;
  constexpr double kL = 0.69314718055994530942;
  constexpr double c1 = kL, c2 = c1 * kL / 2, c3 = c2 * kL / 3, c4 = c3 * kL / 4, c5 = c4 * kL / 5, c6 = c5 * kL / 6,
                   c7 = c6 * kL / 7, c8 = c7 * kL / 8, c9 = c8 * kL / 9, c10 = c9 * kL / 10, c11 = c10 * kL / 11,
                   c12 = c11 * kL / 12;
  double p = c12;
  p = p * f + c11;
  p = p * f + c10;
  p = p * f + c9;
  p = p * f + c8;
  p = p * f + c7;
  p = p * f + c6;
  p = p * f + c5;
  p = p * f + c4;
  p = p * f + c3;
  p = p * f + c2;
  p = p * f + c1;
  p = p * f + 1.0;
  u64 exponent = (std::bit_cast<u64>(shifted) + 1023) << 52;  // the low bits of `shifted` are n
  return p * std::bit_cast<double>(exponent);
}

float ex2(float a) {
  return float(exp2_double(double(a)));
}
float lg2(float a) {
  return float(std::log2(double(a)));
}
float rcp(float a) {
  return float(1.0 / double(a));
}
float rsqrt(float a) {
  return float(1.0 / std::sqrt(double(a)));
}
float root(float a) {
  return std::sqrt(a);
}
float sine(float a) {
  return float(std::sin(double(a)));
}
float cosine(float a) {
  return float(std::cos(double(a)));
}
float tangent_h(float a) {
  return float(std::tanh(double(a)));
}

template <float (*F)(float), bool kFtz>
void special(Warp& w, const Inst& inst, u32 mask) {
  float* d = w.lanes<float>(inst.op[0]);
  const float* a = w.lanes<float>(inst.op[1]);
  for_lanes(mask, [=](int i) { d[i] = finish<float, kFtz, false>(F(load<float, kFtz>(a[i]))); });
}

template <float (*F)(float)>
void register_special(Registry& r, const std::string& name) {
  r.add(name + ".approx.f32", kSpecial, "Ff", special<F, false>);
  r.add(name + ".approx.ftz.f32", kSpecial, "Ff", special<F, true>);
}

// The f64 approximations work on the upper 32 bits only; the lower half of the result is zero.
double upper_half(double v) {
  return std::bit_cast<double>(std::bit_cast<u64>(v) & 0xffffffff00000000ull);
}
double flush64(double v) {
  return std::fabs(v) < 0x1p-1022 ? std::copysign(0.0, v) : v;
}
double rcp64(double a) {
  return upper_half(flush64(1.0 / flush64(upper_half(a))));
}
double rsqrt64(double a) {
  return upper_half(1.0 / std::sqrt(flush64(upper_half(a))));
}

// ---- sign, min, max ----

template <bool kFtz>
float absolute(float a) {
  return canonical(std::fabs(kFtz ? flush(a) : a));
}
template <bool kFtz>
float negative(float a) {
  return canonical(-(kFtz ? flush(a) : a));
}

// NaN loses against a number, or wins with kNan; -0 < +0.
template <bool kMax, bool kNan, class T>
[[gnu::always_inline]] inline T pick(T a, T b) {
  bool a_nan = a != a, b_nan = b != b;
  bool a_less = a < b || (a == b && std::signbit(a));
  T r = a_less == kMax ? b : a;
  r = a_nan ? b : b_nan ? a : r;
  if (kNan && (a_nan || b_nan)) r = std::numeric_limits<T>::quiet_NaN();
  return r;
}

template <bool kMax, bool kFtz, bool kNan, bool kXor>
float pick_float(float a, float b) {
  if (kFtz) a = flush(a), b = flush(b);
  if (!kXor) return canonical(pick<kMax, kNan>(a, b));
  float r = pick<kMax, kNan>(std::fabs(a), std::fabs(b));
  u32 sign = (std::bit_cast<u32>(a) ^ std::bit_cast<u32>(b)) & 0x80000000u;
  return r != r ? canonical(r) : std::bit_cast<float>((std::bit_cast<u32>(r) & 0x7fffffffu) | sign);
}

template <bool kMax>
void register_pick(Registry& r, const std::string& name) {
  r.add(name + ".f32", kFloat, "Fff", binary<pick_float<kMax, false, false, false>, float, float>);
  r.add(name + ".ftz.f32", kFloat, "Fff", binary<pick_float<kMax, true, false, false>, float, float>);
  r.add(name + ".NaN.f32", kFloat, "Fff", binary<pick_float<kMax, false, true, false>, float, float>);
  r.add(name + ".ftz.NaN.f32", kFloat, "Fff", binary<pick_float<kMax, true, true, false>, float, float>);
  r.add(name + ".xorsign.abs.f32", kFloat, "Fff", binary<pick_float<kMax, false, false, true>, float, float>);
  r.add(name + ".ftz.xorsign.abs.f32", kFloat, "Fff", binary<pick_float<kMax, true, false, true>, float, float>);
  r.add(name + ".NaN.xorsign.abs.f32", kFloat, "Fff", binary<pick_float<kMax, false, true, true>, float, float>);
  r.add(name + ".ftz.NaN.xorsign.abs.f32", kFloat, "Fff", binary<pick_float<kMax, true, true, true>, float, float>);
  r.add(name + ".f64", kDouble, "Ggg", binary<pick<kMax, false, double>, double, double>);
}

template <u32 kBits>
u32 test_float(u32 bits) {
  u32 exponent = bits >> 23 & 255, fraction = bits & 0x7fffff;
  bool nan = exponent == 255 && fraction, inf = exponent == 255 && !fraction, sub = exponent == 0 && fraction;
  switch (kBits) {
    case 0: return !nan && !inf;  // finite
    case 1: return inf;
    case 2: return !nan;  // number
    case 3: return nan;
    case 4: return !nan && !inf && !sub;  // normal, zeros among them
    default: return sub;
  }
}

template <u32 kKind, class T>
void testp(Warp& w, const Inst& inst, u32 mask) {
  const T* a = w.lanes<T>(inst.op[1]);
  u32 result = 0;
  for_lanes(mask, [&](int i) {
    u32 bits;
    if constexpr (sizeof(T) == 4) {
      bits = a[i];
    } else {  // the same classes, told from a shortened copy
      u64 v = a[i], exponent = v >> 52 & 2047, fraction = v & ((1ull << 52) - 1);
      bits = u32(exponent == 2047 ? 255 : exponent ? 1 : 0) << 23 | u32(fraction != 0);
    }
    result |= test_float<kKind>(bits) << i;
  });
  set_pred(w, inst.op[0], mask, result);
}

template <u32 kKind>
void register_testp(Registry& r, const std::string& name) {
  r.add("testp." + name + ".f32", InstClass::kCompare, "Pf", testp<kKind, u32>);
  r.add("testp." + name + ".f64", InstClass::kCompare, "Pg", testp<kKind, u64>);
}

}  // namespace

void register_float(Registry& r) {
  register_arithmetic<Op::kAdd>(r, "add", true, true);
  register_arithmetic<Op::kSub>(r, "sub", true, true);
  register_arithmetic<Op::kMul>(r, "mul", true, true);
  register_arithmetic<Op::kFma>(r, "fma", false, true);
  register_arithmetic<Op::kFma>(r, "mad", false, true);
  register_arithmetic<Op::kDiv>(r, "div", false, false);
  register_arithmetic<Op::kSqrt>(r, "sqrt", false, false);
  register_arithmetic<Op::kRcp>(r, "rcp", false, false);
  for (const char* kind : {"approx", "full"}) {
    std::string name = std::string("div.") + kind;
    r.add(name + ".f32", kSpecial, "Fff", nearest<Op::kDiv, float, false, false>);
    r.add(name + ".ftz.f32", kSpecial, "Fff", nearest<Op::kDiv, float, true, false>);
  }
  register_special<ex2>(r, "ex2");
  register_special<lg2>(r, "lg2");
  register_special<rcp>(r, "rcp");
  register_special<rsqrt>(r, "rsqrt");
  register_special<root>(r, "sqrt");
  register_special<sine>(r, "sin");
  register_special<cosine>(r, "cos");
  r.add("tanh.approx.f32", kSpecial, "Ff", special<tangent_h, false>);
  r.add("rcp.approx.ftz.f64", kSpecial, "Gg", unary<rcp64, double, double>);
  r.add("rsqrt.approx.ftz.f64", kSpecial, "Gg", unary<rsqrt64, double, double>);
  r.add("rsqrt.approx.f64", kSpecial, "Gg", unary<[](double a) { return 1.0 / std::sqrt(a); }, double, double>);
  r.add("abs.f32", kFloat, "Ff", unary<absolute<false>, float, float>);
  r.add("abs.ftz.f32", kFloat, "Ff", unary<absolute<true>, float, float>);
  r.add("abs.f64", kDouble, "Gg", unary<[](double a) { return std::fabs(a); }, double, double>);
  r.add("neg.f32", kFloat, "Ff", unary<negative<false>, float, float>);
  r.add("neg.ftz.f32", kFloat, "Ff", unary<negative<true>, float, float>);
  r.add("neg.f64", kDouble, "Gg", unary<[](double a) { return -a; }, double, double>);
  r.add("copysign.f32", kFloat, "Fff",
        binary<[](u32 a, u32 b) { return (a & 0x80000000u) | (b & 0x7fffffffu); }, u32, u32>);
  r.add("copysign.f64", kDouble, "Ggg", binary<[](double a, double b) { return std::copysign(b, a); }, double, double>);
  register_pick<false>(r, "min");
  register_pick<true>(r, "max");
  register_testp<0>(r, "finite");
  register_testp<1>(r, "infinite");
  register_testp<2>(r, "number");
  register_testp<3>(r, "notanumber");
  register_testp<4>(r, "normal");
  register_testp<5>(r, "subnormal");
}

}  // namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL
