// cvt: one exact scalar conversion routine for every pair of types, rounding and modifier, and vector loops for the
// common ones.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "vgpu/half.h"
#include "vgpu/lanes.h"
#include "vgpu/round.h"

namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL {
namespace {

constexpr InstClass kClass = InstClass::kConvert;

enum Type : u32 { kS8, kU8, kS16, kU16, kS32, kU32, kS64, kU64, kF16, kBF16, kF32, kF64, kTF32, kTypes };
constexpr const char* kTypeNames[] = {".s8",  ".u8",  ".s16",  ".u16", ".s32", ".u32", ".s64",
                                      ".u64", ".f16", ".bf16", ".f32", ".f64", ".tf32"};
constexpr int kTypeBits[] = {8, 8, 16, 16, 32, 32, 64, 64, 16, 16, 32, 64, 32};
constexpr bool is_int(u32 t) {
  return t < kF16;
}
constexpr bool is_signed(u32 t) {
  return is_int(t) && t % 2 == 0;
}

enum RoundName : u32 { kNone, kRn, kRz, kRm, kRp, kRni, kRzi, kRmi, kRpi, kRna };
constexpr const char* kRoundNames[] = {"", ".rn", ".rz", ".rm", ".rp", ".rni", ".rzi", ".rmi", ".rpi", ".rna"};

struct Spec {
  u32 from, to, round;
  bool ftz, sat, relu, satfinite;
};
u64 pack(const Spec& s) {
  return s.from | s.to << 4 | s.round << 8 | u32(s.ftz) << 12 | u32(s.sat) << 13 | u32(s.relu) << 14 |
         u32(s.satfinite) << 15;
}
Spec unpack(u64 v) {
  return {u32(v & 15),       u32(v >> 4 & 15),  u32(v >> 8 & 15), bool(v >> 12 & 1),
          bool(v >> 13 & 1), bool(v >> 14 & 1), bool(v >> 15 & 1)};
}

double load_float(u32 type, u64 bits) {
  switch (type) {
    case kF16: return half_to_float(u16(bits));
    case kBF16: return bf16_to_float(u16(bits));
    case kF32:
    case kTF32: return std::bit_cast<float>(u32(bits));
    default: return std::bit_cast<double>(bits);
  }
}

__int128 load_int(u32 type, u64 bits) {
  int shift = 64 - kTypeBits[type];
  if (is_signed(type)) return i64(bits << shift) >> shift;
  return __int128(bits << shift >> shift);
}

double round_integral(double v, u32 round) {
  switch (round) {
    case kRni: return std::nearbyint(v);
    case kRzi: return std::trunc(v);
    case kRmi: return std::floor(v);
    case kRpi: return std::ceil(v);
    default: return v;
  }
}

u64 clamp_int(__int128 v, u32 to) {
  int bits = kTypeBits[to];
  __int128 low = is_signed(to) ? -(__int128(1) << (bits - 1)) : 0;
  __int128 high = is_signed(to) ? (__int128(1) << (bits - 1)) - 1 : (__int128(1) << bits) - 1;
  return u64(v < low ? low : v > high ? high : v);
}

u64 float_to_int(double v, const Spec& s) {
  if (v != v) return s.from == kF64 || kTypeBits[s.to] == 64 ? 1ull << (kTypeBits[s.to] - 1) : 0;
  v = round_integral(v, s.round);
  if (v >= 0x1p64) return clamp_int(__int128(1) << 100, s.to);
  if (v <= -0x1p64) return clamp_int(-(__int128(1) << 100), s.to);
  return clamp_int(__int128(v), s.to);
}

// Rounding by mode given the nearest-even candidate: bits grow with the magnitude in every format.
u64 adjust(u64 nearest, double value_of_nearest, double exact, u32 round, u64 sign_bit) {
  if (exact != exact || value_of_nearest == exact) return nearest;
  bool negative = std::signbit(exact);
  bool larger = std::fabs(value_of_nearest) > std::fabs(exact);
  bool want_larger = round == kRm ? negative : round == kRp ? !negative : false;
  u64 magnitude = nearest & ~sign_bit;
  if (larger && !want_larger) --magnitude;
  if (!larger && want_larger) ++magnitude;
  return magnitude | (negative ? sign_bit : 0);
}

u32 to_tf32(float v, u32 round) {
  u32 bits = std::bit_cast<u32>(v);
  if (v != v) return 0x7fffffff;
  if ((bits & 0x7f800000u) == 0x7f800000u) return bits;
  u32 rounded = round == kRz ? bits : round == kRna ? bits + 0x1000 : bits + 0xfff + (bits >> 13 & 1);
  return rounded & ~0x1fffu;
}

// `v` is exact up to a sticky odd last bit (int64 sources), which every target here is narrow enough for.
u64 store_float(double v, const Spec& s) {
  bool directed = s.round == kRz || s.round == kRm || s.round == kRp;
  if (s.relu && !(v > 0)) v = v != v ? v : 0.0;
  switch (s.to) {
    case kF16: {
      u16 r = double_to_half(v);
      if (directed) r = u16(adjust(r, half_to_float(r), v, s.round, 0x8000));
      if (s.sat) r = v != v ? 0 : r & 0x8000 ? 0 : std::min<u16>(r, 0x3c00);
      if (s.satfinite && (r & 0x7fff) == 0x7c00) r = (r & 0x8000) | 0x7bff;
      return r;
    }
    case kBF16: {
      u16 r = double_to_bf16(v);
      if (directed) r = u16(adjust(r, bf16_to_float(r), v, s.round, 0x8000));
      if (s.sat) r = v != v ? 0 : r & 0x8000 ? 0 : std::min<u16>(r, 0x3f80);
      if (s.satfinite && (r & 0x7fff) == 0x7f80) r = (r & 0x8000) | 0x7f7f;
      return r;
    }
    case kF32: {
      float f = float(v);
      if (directed) f = std::bit_cast<float>(u32(adjust(std::bit_cast<u32>(f), f, v, s.round, 0x80000000u)));
      if (s.ftz) f = flush(f);
      return std::bit_cast<u32>(s.sat ? saturate01(f) : canonical(f));
    }
    case kTF32: return to_tf32(float(v), s.round);
    default: return std::bit_cast<u64>(s.sat ? saturate01(v) : v);
  }
}

u64 int_to_float(__int128 v, const Spec& s) {
  double d = double(i64(v));
  if (v > __int128(INT64_MAX)) d = double(u64(v));
  __int128 back = __int128(d);
  if (s.to == kF64) {
    if (back == v) return std::bit_cast<u64>(d);
    Spec t = s;
    u64 bits = std::bit_cast<u64>(d), sign = 1ull << 63;
    if (t.round == kRn || t.round == kNone) return bits;
    bool larger = (back < 0 ? -back : back) > (v < 0 ? -v : v), negative = v < 0;
    bool want = t.round == kRm ? negative : t.round == kRp ? !negative : false;
    u64 magnitude = bits & ~sign;
    if (larger && !want) --magnitude;
    if (!larger && want) ++magnitude;
    return magnitude | (bits & sign);
  }
  if (back != v) {  // round to odd
    u64 bits = std::bit_cast<u64>(d);
    bool larger = (back < 0 ? -back : back) > (v < 0 ? -v : v);
    if (larger) --bits;
    d = std::bit_cast<double>(bits | 1);
  }
  return store_float(d, s);
}

u64 convert_bits(const Spec& s, u64 bits) {
  if (is_int(s.from)) {
    __int128 v = load_int(s.from, bits);
    if (is_int(s.to)) return s.sat ? clamp_int(v, s.to) : u64(v);
    return int_to_float(v, s);
  }
  double v = load_float(s.from, bits);
  if (s.ftz && s.from == kF32) v = flush(float(v));
  if (is_int(s.to)) return float_to_int(v, s);
  if (s.round >= kRni && s.round <= kRpi) v = round_integral(v, s.round);
  return store_float(v, s);
}

u64 read_lane(const Warp& w, OperandRef ref, u32 bits, int lane) {
  return bits == 16 ? w.lanes<u16>(ref)[lane] : bits == 32 ? w.lanes<u32>(ref)[lane] : w.lanes<u64>(ref)[lane];
}

// Register widths are in aux: source | destination << 8. Results fill wider registers by sign or zero.
void convert_any(Warp& w, const Inst& inst, u32 mask) {
  Spec s = unpack(inst.imm);
  u32 from_bits = inst.aux & 255, to_bits = inst.aux >> 8;
  for (u32 m = mask; m; m &= m - 1) {
    int i = std::countr_zero(m);
    u64 r = convert_bits(s, read_lane(w, inst.op[1], from_bits, i));
    int shift = 64 - kTypeBits[s.to];
    r = is_signed(s.to) ? u64(i64(r << shift) >> shift) : r << shift >> shift;
    if (to_bits == 16)
      w.lanes<u16>(inst.op[0])[i] = u16(r);
    else if (to_bits == 32)
      w.lanes<u32>(inst.op[0])[i] = u32(r);
    else
      w.lanes<u64>(inst.op[0])[i] = r;
  }
}

template <class D, class S>
D extend(S v) {
  return D(v);
}
float half_up(u16 v) {
  return canonical(half_to_float(v));
}
float bf16_up(u16 v) {
  return canonical(bf16_to_float(v));
}
i32 truncate_s32(float v) {
  return v != v ? 0 : v >= 0x1p31f ? INT32_MAX : v < -0x1p31f ? INT32_MIN : i32(v);
}

struct FastPath {
  u64 spec;
  Handler handler;
};

const std::vector<FastPath>& fast_paths() {
  auto spec = [](u32 to, u32 from, u32 round) { return pack({from, to, round, false, false, false, false}); };
  static const std::vector<FastPath> paths = {{spec(kS64, kS32, kNone), unary<extend<i64, i32>, i64, i32>},
                                              {spec(kU64, kU32, kNone), unary<extend<u64, u32>, u64, u32>},
                                              {spec(kU32, kU64, kNone), unary<extend<u32, u64>, u32, u64>},
                                              {spec(kS32, kS64, kNone), unary<extend<u32, u64>, u32, u64>},
                                              {spec(kU32, kU16, kNone), unary<extend<u32, u16>, u32, u16>},
                                              {spec(kS32, kS16, kNone), unary<extend<i32, i16>, i32, i16>},
                                              {spec(kU16, kU32, kNone), unary<extend<u16, u32>, u16, u32>},
                                              {spec(kU64, kU16, kNone), unary<extend<u64, u16>, u64, u16>},
                                              {spec(kU16, kU64, kNone), unary<extend<u16, u64>, u16, u64>},
                                              {spec(kF32, kBF16, kNone), unary<bf16_up, float, u16>},
                                              {spec(kF32, kF16, kNone), unary<half_up, float, u16>},
                                              {spec(kF16, kF32, kRn), unary<float_to_half, u16, float>},
                                              {spec(kBF16, kF32, kRn), unary<float_to_bf16, u16, float>},
                                              {spec(kF32, kS32, kRn), unary<extend<float, i32>, float, i32>},
                                              {spec(kF32, kU32, kRn), unary<extend<float, u32>, float, u32>},
                                              {spec(kS32, kF32, kRzi), unary<truncate_s32, i32, float>},
                                              {spec(kF64, kF32, kNone), unary<extend<double, float>, double, float>}};
  return paths;
}

void decode_cvt(DecodeContext& ctx, const Form& form) {
  ctx.require(ctx.count() == 2, "wrong number of operands");
  Spec s = unpack(form.tag);
  int from = ctx.register_bits(ctx.operand(1)), to = ctx.register_bits(ctx.operand(0));
  int from_least = std::max(16, kTypeBits[s.from]), to_least = std::max(16, kTypeBits[s.to]);
  if (from == 0) from = from_least;
  ctx.require(from >= from_least, "the source register is narrower than the type");
  ctx.require(to >= to_least, "the destination register is narrower than the type");
  const bool exact = (s.from != kBF16 && s.to != kBF16) || (from == from_least && to == to_least);
  ctx.require(exact, "conversions from and to bf16 need registers of their types' widths");
  Inst& out = ctx.out();
  out.op[0] = ctx.dst(ctx.operand(0), to);
  out.op[1] = ctx.src(ctx.operand(1), from,
                      s.from == kF32   ? Imm::kFloat32
                      : s.from == kF64 ? Imm::kFloat64
                                       : Imm::kInteger);
  out.imm = form.tag;
  out.aux = u32(from) | u32(to) << 8;
  if (from != kTypeBits[s.from] || to != kTypeBits[s.to]) return;
  for (const FastPath& p : fast_paths()) {
    if (p.spec == form.tag) out.fn = p.handler;
  }
}

void add_cvt(Registry& r, const Spec& s) {
  std::string name = std::string("cvt") + kRoundNames[s.round] + (s.ftz ? ".ftz" : "") + (s.sat ? ".sat" : "") +
                     (s.satfinite ? ".satfinite" : "") + (s.relu ? ".relu" : "") + kTypeNames[s.to] +
                     kTypeNames[s.from];
  r.add(name, kClass, decode_cvt, convert_any, pack(s));
}

// Every value of `from` is one of `to`: PTX has no .sat for those.
constexpr bool holds(u32 to, u32 from) {
  if (is_signed(from) && !is_signed(to)) return false;
  return kTypeBits[to] > kTypeBits[from] || (kTypeBits[to] == kTypeBits[from] && is_signed(to) == is_signed(from));
}

void add_int_forms(Registry& r) {
  for (u32 to = 0; to < kF16; ++to) {
    const bool byte = kTypeBits[to] == 8;
    for (u32 from = 0; from < kF16; ++from) {
      add_cvt(r, {from, to, kNone, false, false, false, false});
      if (!holds(to, from)) add_cvt(r, {from, to, kNone, false, true, false, false});
    }
    for (u32 from : {kF16, kBF16, kF32, kF64}) {
      if (from == kBF16 && byte) continue;
      for (u32 round : {kRni, kRzi, kRmi, kRpi}) {
        for (bool sat : {false, true}) {
          if (from == kBF16 && sat) continue;
          add_cvt(r, {from, to, round, false, sat, false, false});
          if (from == kF32) add_cvt(r, {from, to, round, true, sat, false, false});
        }
      }
    }
    for (u32 round : {kRn, kRz, kRm, kRp}) {
      for (u32 f : {kF16, kBF16, kF32, kF64}) {
        if (f != kBF16 || !byte) add_cvt(r, {to, f, round, false, false, false, false});
      }
    }
  }
}

void add_float_forms(Registry& r) {
  for (u32 t : {kF16, kF32, kF64}) {  // same type: rounding to an integral value, saturation, flush
    for (u32 round : {kNone, kRni, kRzi, kRmi, kRpi}) {
      for (bool sat : {false, true}) {
        add_cvt(r, {t, t, round, false, sat, false, false});
        if (t == kF32) add_cvt(r, {t, t, round, true, sat, false, false});
      }
    }
  }
  for (bool sat : {false, true}) {  // widening
    for (auto [from, to] : {std::pair{kF16, kF32}, {kF16, kF64}, {kBF16, kF32}, {kBF16, kF64}, {kF32, kF64}}) {
      if (sat && from == kBF16) continue;
      add_cvt(r, {from, to, kNone, false, sat, false, false});
      if (to == kF32 || from == kF32) add_cvt(r, {from, to, kNone, true, sat, false, false});
    }
    for (u32 round : {kRn, kRz, kRm, kRp}) {  // narrowing
      for (auto [from, to] : {std::pair{kF64, kF32}, {kF64, kF16}, {kF64, kBF16}, {kF32, kF16}, {kF32, kBF16}}) {
        if (sat && to == kBF16) continue;
        add_cvt(r, {from, to, round, false, sat, false, false});
        if (to == kF32 || from == kF32) add_cvt(r, {from, to, round, true, sat, false, false});
      }
    }
  }
  for (u32 round : {kRn, kRz}) {
    for (u32 to : {kF16, kBF16}) {
      add_cvt(r, {kF32, to, round, false, false, true, false});
      add_cvt(r, {kF32, to, round, false, false, false, true});
      add_cvt(r, {kF32, to, round, false, false, true, true});
    }
    add_cvt(r, {kF32, kTF32, round, false, false, false, false});
    add_cvt(r, {kF32, kTF32, round, false, false, true, false});
  }
  add_cvt(r, {kF32, kTF32, kRna, false, false, false, false});
  for (u32 round : {kNone, kRn, kRz, kRm, kRp}) {
    add_cvt(r, {kF16, kBF16, round, false, false, false, false});
    add_cvt(r, {kBF16, kF16, round, false, false, false, false});
  }
}

// ---- pairs ----

template <u16 (*F)(float)>
u32 pair_of(float high, float low) {
  return u32(F(high)) << 16 | F(low);
}

template <u32 kTo, u32 kRound, bool kRelu, bool kSatFinite>
u32 pair_any(float high, float low) {
  Spec s{kF32, kTo, kRound, false, false, kRelu, kSatFinite};
  return u32(store_float(high, s)) << 16 | u32(store_float(low, s));
}

template <u32 kTo>
void add_pairs(Registry& r, const std::string& tail) {
  r.add("cvt.rn.relu" + tail, kClass, "Wff", binary<pair_any<kTo, kRn, true, false>, u32, float>);
  r.add("cvt.rz" + tail, kClass, "Wff", binary<pair_any<kTo, kRz, false, false>, u32, float>);
  r.add("cvt.rz.relu" + tail, kClass, "Wff", binary<pair_any<kTo, kRz, true, false>, u32, float>);
  r.add("cvt.rn.satfinite" + tail, kClass, "Wff", binary<pair_any<kTo, kRn, false, true>, u32, float>);
  r.add("cvt.rn.satfinite.relu" + tail, kClass, "Wff", binary<pair_any<kTo, kRn, true, true>, u32, float>);
}

template <u8 (*F)(float), bool kRelu>
u16 fp8_pair(float high, float low) {
  if (kRelu) high = high <= 0 ? 0 : high, low = low <= 0 ? 0 : low;
  return u16(u16(F(high)) << 8 | F(low));
}
template <u8 (*F)(float), bool kRelu>
u16 fp8_pair_of_halves(u32 v) {
  return fp8_pair<F, kRelu>(half_to_float(u16(v >> 16)), half_to_float(u16(v)));
}
template <float (*F)(u8), bool kRelu>
u32 halves_of_fp8(u16 v) {
  u32 low = float_to_half(F(u8(v))), high = float_to_half(F(u8(v >> 8)));
  if (kRelu)
    low = low & 0x8000 && (low & 0x7fff) <= 0x7c00 ? 0 : low,
    high = high & 0x8000 && (high & 0x7fff) <= 0x7c00 ? 0 : high;
  return low | high << 16;
}

template <u8 (*Down)(float), float (*Up)(u8)>
void add_fp8(Registry& r, const std::string& type) {
  r.add("cvt.rn.satfinite" + type + ".f32", kClass, "Hff", binary<fp8_pair<Down, false>, u16, float>);
  r.add("cvt.rn.satfinite.relu" + type + ".f32", kClass, "Hff", binary<fp8_pair<Down, true>, u16, float>);
  r.add("cvt.rn.satfinite" + type + ".f16x2", kClass, "Hw", unary<fp8_pair_of_halves<Down, false>, u16, u32>);
  r.add("cvt.rn.satfinite.relu" + type + ".f16x2", kClass, "Hw", unary<fp8_pair_of_halves<Down, true>, u16, u32>);
  r.add("cvt.rn.f16x2" + type, kClass, "Wh", unary<halves_of_fp8<Up, false>, u32, u16>);
  r.add("cvt.rn.relu.f16x2" + type, kClass, "Wh", unary<halves_of_fp8<Up, true>, u32, u16>);
}

template <u32 kTo>
u32 pack16(i32 high, i32 low) {
  return u32(u16(clamp_int(high, kTo))) << 16 | u16(clamp_int(low, kTo));
}
template <u32 kTo>
u32 pack8(i32 high, i32 low, u32 rest) {
  return rest << 16 | u32(u8(clamp_int(high, kTo))) << 8 | u8(clamp_int(low, kTo));
}

}  // namespace

void register_convert(Registry& r) {
  add_int_forms(r);
  add_float_forms(r);
  r.add("cvt.rn.f16x2.f32", kClass, "Wff", binary<pair_of<float_to_half>, u32, float>);
  r.add("cvt.rn.bf16x2.f32", kClass, "Wff", binary<pair_of<float_to_bf16>, u32, float>);
  add_pairs<kF16>(r, ".f16x2.f32");
  add_pairs<kBF16>(r, ".bf16x2.f32");
  add_fp8<float_to_e4m3, e4m3_to_float>(r, ".e4m3x2");
  add_fp8<float_to_e5m2, e5m2_to_float>(r, ".e5m2x2");
  r.add("cvt.pack.sat.s16.s32", kClass, "Www", binary<pack16<kS16>, u32, i32>);
  r.add("cvt.pack.sat.u16.s32", kClass, "Www", binary<pack16<kU16>, u32, i32>);
  r.add("cvt.pack.sat.s8.s32.b32", kClass, "Wwww", ternary<pack8<kS8>, u32, i32, i32, u32>);
  r.add("cvt.pack.sat.u8.s32.b32", kClass, "Wwww", ternary<pack8<kU8>, u32, i32, i32, u32>);
}

}  // namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL
