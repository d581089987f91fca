// mov with packs and special registers, cvta, isspacep, mapa, getctarank, prefetch hints.
#include <algorithm>
#include <chrono>

#include "vgpu/block.h"
#include "vgpu/lanes.h"

namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL {
namespace {

constexpr InstClass kClass = InstClass::kMove;

template <class T>
T same(T v) {
  return v;
}

void mov_pred(Warp& w, const Inst& inst, u32 mask) {
  set_pred(w, inst.op[0], mask, read_pred(w, inst, 1));
}

// mov.b32 d, {a, b}: part 0 is the least significant. op[0] the whole, op[1..] the parts.
template <class D, class P, int kParts>
void pack(Warp& w, const Inst& inst, u32 mask) {
  D* d = w.lanes<D>(inst.op[0]);
  const P* p[kParts];
  for (int k = 0; k < kParts; ++k) p[k] = w.lanes<P>(inst.op[1 + k]);
  for_lanes(mask, [=](int i) {
    D v = 0;
    for (int k = 0; k < kParts; ++k) v |= D(p[k][i]) << (k * sizeof(P) * 8);
    d[i] = v;
  });
}

template <class D, class P, int kParts>
void unpack(Warp& w, const Inst& inst, u32 mask) {
  const D* s = w.lanes<D>(inst.op[0]);
  P* p[kParts];
  for (int k = 0; k < kParts; ++k) p[k] = w.lanes<P>(inst.op[1 + k]);
  for_lanes(mask, [=](int i) {
    D v = s[i];
    for (int k = 0; k < kParts; ++k) p[k][i] = P(v >> (k * sizeof(P) * 8));
  });
}

// Parts of 8 bits live in 16-bit registers.
void decode_pack(DecodeContext& ctx, int whole, const Operand& vector, bool packing) {
  size_t parts = vector.elements.size();
  ctx.require(parts == 2 || parts == 4, "a vector of 2 or 4 parts");
  int bits = whole / int(parts);
  ctx.require(bits >= 16, "parts of 8 bits are not supported");
  Inst& out = ctx.out();
  out.op[0] = packing ? ctx.dst(ctx.operand(0), whole) : ctx.src(ctx.operand(1), whole);
  for (size_t k = 0; k < parts; ++k) {
    const Operand& o = vector.elements[k];
    out.op[1 + k] = packing ? ctx.src(o, bits) : ctx.dst(o, bits);
  }
  if (whole == 32)
    out.fn = packing ? pack<u32, u16, 2> : unpack<u32, u16, 2>;
  else if (parts == 2)
    out.fn = packing ? pack<u64, u32, 2> : unpack<u64, u32, 2>;
  else
    out.fn = packing ? pack<u64, u16, 4> : unpack<u64, u16, 4>;
}

u64 clock_value(const Warp& w) {
  return w.worker->counters.warp_instructions;
}

template <class T, int kShift>
void mov_clock(Warp& w, const Inst& inst, u32 mask) {
  T* d = w.lanes<T>(inst.op[0]);
  T v = T(clock_value(w) >> kShift);
  for_lanes(mask, [=](int i) { d[i] = v; });
}

template <class T, int kShift>
void mov_timer(Warp& w, const Inst& inst, u32 mask) {
  T* d = w.lanes<T>(inst.op[0]);
  u64 now =
      u64(std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
              .count());
  T v = T(now >> kShift);
  for_lanes(mask, [=](int i) { d[i] = v; });
}

bool decode_clock(DecodeContext& ctx, int bits) {
  const std::string& name = ctx.operand(1).name;
  Handler h = nullptr;
  if (bits == 32 && name == "%clock") h = mov_clock<u32, 0>;
  if (bits == 32 && name == "%clock_hi") h = mov_clock<u32, 32>;
  if (bits == 64 && name == "%clock64") h = mov_clock<u64, 0>;
  if (bits == 64 && name == "%globaltimer") h = mov_timer<u64, 0>;
  if (bits == 32 && name == "%globaltimer_lo") h = mov_timer<u32, 0>;
  if (bits == 32 && name == "%globaltimer_hi") h = mov_timer<u32, 32>;
  if (!h) return false;
  ctx.out().op[0] = ctx.dst(ctx.operand(0), bits);
  ctx.out().fn = h;
  return true;
}

void decode_mov(DecodeContext& ctx, const Form& form) {
  int bits = int(form.tag & 255);
  Imm imm = form.tag >> 8 == 'f' ? bits == 64 ? Imm::kFloat64 : Imm::kFloat32 : Imm::kInteger;
  ctx.require(ctx.count() == 2, "wrong number of operands");
  bool into = ctx.operand(0).kind == Operand::Kind::kVector, from = ctx.operand(1).kind == Operand::Kind::kVector;
  if (into || from) {
    ctx.require(into != from, "both sides are vectors");
    ctx.require(bits >= 32, "a pack of 8-bit parts is not supported");
    return decode_pack(ctx, bits, ctx.operand(from ? 1 : 0), from);
  }
  if (decode_clock(ctx, bits)) return;
  Inst& out = ctx.out();
  out.op[0] = ctx.dst(ctx.operand(0), bits);
  int source = ctx.register_bits(ctx.operand(1));
  if (bits == 64 && source == 32 && ctx.operand(1).name[0] == '%' &&
      ctx.operand(1).name.find('.') != std::string::npos) {
    out.op[1] = ctx.src(ctx.operand(1), 32);  // mov.u64 %rd, %ctaid.x
    out.fn = unary<[](u32 v) { return u64(v); }, u64, u32>;
    return;
  }
  if (bits == 16 && source == 32 && ctx.operand(1).name.find('.') != std::string::npos) {
    out.op[1] = ctx.src(ctx.operand(1), 32);
    out.fn = unary<[](u32 v) { return u16(v); }, u16, u32>;
    return;
  }
  out.op[1] = ctx.src(ctx.operand(1), bits, imm);
  out.fn = bits == 16   ? unary<same<u16>, u16, u16>
           : bits == 32 ? unary<same<u32>, u32, u32>
                        : unary<same<u64>, u64, u64>;
}

// cvta: generic = space address | window. Global, const and param addresses are generic already.
template <u64 kWindow>
u64 to_generic(u64 a) {
  return a | kWindow;
}
template <u64 kWindow>
u64 from_generic(u64 a) {
  return a & kWindowMask;
}
u64 unchanged(u64 a) {
  return a;
}

void register_cvta(Registry& r) {
  for (const char* space : {".global", ".const", ".param", ".param::entry"}) {
    r.add(std::string("cvta") + space + ".u64", kClass, "Xx", unary<unchanged, u64, u64>);
    r.add(std::string("cvta.to") + space + ".u64", kClass, "Xx", unary<unchanged, u64, u64>);
  }
  for (const char* space : {".shared", ".shared::cta", ".shared::cluster"}) {
    r.add(std::string("cvta") + space + ".u64", kClass, "Xx", unary<to_generic<kSharedWindow>, u64, u64>);
    r.add(std::string("cvta.to") + space + ".u64", kClass, "Xx", unary<from_generic<kSharedWindow>, u64, u64>);
  }
  r.add("cvta.local.u64", kClass, "Xx", unary<to_generic<kLocalWindow>, u64, u64>);
  r.add("cvta.to.local.u64", kClass, "Xx", unary<from_generic<kLocalWindow>, u64, u64>);
}

enum : u32 { kIsGlobal, kIsConst, kIsShared, kIsSharedCta, kIsLocal, kIsParam };

void isspacep(Warp& w, const Inst& inst, u32 mask) {
  const u64* a = w.lanes<u64>(inst.op[1]);
  u32 result = 0;
  for (u32 m = mask; m; m &= m - 1) {
    int i = std::countr_zero(m);
    u64 window = a[i] >> kWindowShift << kWindowShift;
    bool yes = false;
    switch (inst.aux) {
      case kIsGlobal:
      case kIsConst: {
        Allocation* own = window == 0 ? w.launch->memory->find(a[i]) : nullptr;
        bool is_const = false;
        for (const auto& v : w.kernel().program->variables)
          is_const |= v->is_const && own && own->base == reinterpret_cast<u64>(v->data);
        yes = window == 0 && (inst.aux == kIsConst ? is_const : !is_const);
        break;
      }
      case kIsShared: yes = window == kSharedWindow; break;
      case kIsSharedCta: {
        const u32 rank = u32(a[i]) >> kSharedRankShift;
        yes = window == kSharedWindow && (rank == 0 || rank - 1 == w.block->rank);
        break;
      }
      case kIsLocal: yes = window == kLocalWindow; break;
      default: yes = window == kParamWindow; break;
    }
    result |= u32(yes) << i;
  }
  set_pred(w, inst.op[0], mask, result);
}

void decode_isspacep(DecodeContext& ctx, const Form& form) {
  decode_signature(ctx, form);
  ctx.out().aux = u32(form.tag);
}

// mapa: the same shared offset in the block of rank b.
template <class T>
T map_shared(T a, u32 rank) {
  return (a & ~T(~kSharedOffsetMask)) | (sizeof(T) == 8 ? (a & ~T(0xffffffffu)) : T(0)) |
         T((rank + 1) << kSharedRankShift);
}

template <class T>
void mapa(Warp& w, const Inst& inst, u32 mask) {
  T* d = w.lanes<T>(inst.op[0]);
  const T* a = w.lanes<T>(inst.op[1]);
  const u32* b = w.lanes<u32>(inst.op[2]);
  for (u32 m = mask; m; m &= m - 1) {
    int i = std::countr_zero(m);
    if (b[i] >= w.block->cluster.size())
      w.fault("invalid",
              "mapa to block " + std::to_string(b[i]) + " of a cluster of " + std::to_string(w.block->cluster.size()),
              1u << i);
    d[i] = map_shared<T>(a[i], b[i]);
  }
}

template <class T>
void getctarank(Warp& w, const Inst& inst, u32 mask) {
  u32* d = w.lanes<u32>(inst.op[0]);
  const T* a = w.lanes<T>(inst.op[1]);
  u32 own = w.block->rank;
  for_lanes(mask, [=](int i) {
    u32 rank = u32(a[i]) >> kSharedRankShift;
    d[i] = rank ? rank - 1 : own;
  });
}

void nothing(Warp&, const Inst&, u32) {}

void decode_prefetch(DecodeContext& ctx, const Form&) {
  ctx.require(ctx.count() == 1 || ctx.count() == 2, "wrong number of operands");
  ctx.address(ctx.operand(0));
}

}  // namespace

void register_move(Registry& r) {
  for (const char* t : {".b16", ".u16", ".s16"}) r.add(std::string("mov") + t, kClass, decode_mov, nullptr, 16);
  for (const char* t : {".b32", ".u32", ".s32"}) r.add(std::string("mov") + t, kClass, decode_mov, nullptr, 32);
  for (const char* t : {".b64", ".u64", ".s64"}) r.add(std::string("mov") + t, kClass, decode_mov, nullptr, 64);
  r.add("mov.f32", kClass, decode_mov, nullptr, 32 | u64('f') << 8);
  r.add("mov.f64", kClass, decode_mov, nullptr, 64 | u64('f') << 8);
  r.add("mov.pred", kClass, "Pp", mov_pred);
  register_cvta(r);
  r.add("isspacep.global", kClass, "Px", decode_isspacep, isspacep, kIsGlobal);
  r.add("isspacep.const", kClass, "Px", decode_isspacep, isspacep, kIsConst);
  r.add("isspacep.shared", kClass, "Px", decode_isspacep, isspacep, kIsShared);
  r.add("isspacep.shared::cta", kClass, "Px", decode_isspacep, isspacep, kIsSharedCta);
  r.add("isspacep.shared::cluster", kClass, "Px", decode_isspacep, isspacep, kIsShared);
  r.add("isspacep.local", kClass, "Px", decode_isspacep, isspacep, kIsLocal);
  r.add("isspacep.param", kClass, "Px", decode_isspacep, isspacep, kIsParam);
  r.add("isspacep.param::entry", kClass, "Px", decode_isspacep, isspacep, kIsParam);
  r.add("mapa.u32", kClass, "Www", mapa<u32>);
  r.add("mapa.shared::cluster.u32", kClass, "Www", mapa<u32>);
  r.add("mapa.u64", kClass, "Xxw", mapa<u64>);
  r.add("mapa.shared::cluster.u64", kClass, "Xxw", mapa<u64>);
  r.add("getctarank.u32", kClass, "Ww", getctarank<u32>);
  r.add("getctarank.shared::cluster.u32", kClass, "Ww", getctarank<u32>);
  r.add("getctarank.u64", kClass, "Wx", getctarank<u64>);
  for (const char* name :
       {"prefetch.global.L1", "prefetch.global.L2", "prefetch.global.L2::evict_last",
        "prefetch.global.L2::evict_normal", "prefetch.L1", "prefetch.L2", "prefetch.local.L1", "prefetch.local.L2",
        "prefetchu.L1", "prefetch.tensormap", "prefetch.param.tensormap", "prefetch.const.tensormap"}) {
    r.add(name, InstClass::kOther, decode_prefetch, nothing);
  }
}

}  // namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL
