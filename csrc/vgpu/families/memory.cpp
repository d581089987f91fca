// ld, st, ldu, and the cache operators and hints on them (which change nothing here).
#include <algorithm>
#include <cstring>

#include "vgpu/block.h"
#include "vgpu/lanes.h"
#include "vgpu/memory_operand.h"

namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL {
namespace {

// Inst::aux: element bytes (log2) | registers' bits / 16 << 4 | count << 8 | signed << 12 | ordering; Inst::ext: pool
// index of the registers.
struct Shape {
  u32 element_log2, register_bits, count;
  bool sign;
};
u32 pack(const Shape& s) {
  return s.element_log2 | s.register_bits / 16 << 4 | s.count << 8 | u32(s.sign) << 12;
}
Shape unpack(u32 v) {
  return {v & 15, (v >> 4 & 15) * 16, v >> 8 & 15, bool(v >> 12 & 1)};
}

template <class R, class T>
void load_lanes(R* d, u8* const* pointers, u32 offset, u32 mask) {
  for_lanes(mask, [=](int i) {
    T v;
    std::memcpy(&v, pointers[i] + offset, sizeof(T));
    d[i] = R(v);
  });
}

template <class R>
void load_element(R* d, u8* const* p, u32 offset, u32 mask, u32 log2, bool sign) {
  switch (log2 * 2 + sign) {
    case 0: return load_lanes<R, u8>(d, p, offset, mask);
    case 1: return load_lanes<R, i8>(d, p, offset, mask);
    case 2: return load_lanes<R, u16>(d, p, offset, mask);
    case 3: return load_lanes<R, i16>(d, p, offset, mask);
    case 4: return load_lanes<R, u32>(d, p, offset, mask);
    case 5: return load_lanes<R, i32>(d, p, offset, mask);
    default: return load_lanes<R, u64>(d, p, offset, mask);
  }
}

void load(Warp& w, const Inst& inst, u32 mask) {
  const Shape s = unpack(inst.aux);
  u64 addresses[kLanes];
  u8* pointers[kLanes];
  memory_addresses(w, inst, mask, addresses);
  u32 bytes = s.count << s.element_log2;
  Space space = memory_space(inst);
  Access access = memory_strong(inst) ? Access::kStrongRead : Access::kRead;
  w.resolve(space, addresses, mask, bytes, bytes, access, pointers);
  if (inst.aux & kNonCoherent) w.check_non_coherent(addresses, mask, bytes);
  const i32* regs = &w.kernel().pool[inst.ext];
  for (u32 k = 0; k < s.count; ++k) {
    u32 offset = k << s.element_log2;
    if (regs[k] == kNoOperand) continue;
    if (s.register_bits == 16)
      load_element(w.lanes<u16>(regs[k]), pointers, offset, mask, s.element_log2, s.sign);
    else if (s.register_bits == 32)
      load_element(w.lanes<u32>(regs[k]), pointers, offset, mask, s.element_log2, s.sign);
    else
      load_element(w.lanes<u64>(regs[k]), pointers, offset, mask, s.element_log2, s.sign);
  }
  if (access == Access::kStrongRead && w.tracks_races()) {
    if (!w.block->strong.seen.at.empty()) w.acquire(w.block->strong);
    w.after_strong_read(addresses, mask, inst.aux);
  }
}

// A kernel parameter at a known offset: one value for all lanes.
void load_param(Warp& w, const Inst& inst, u32 mask) {
  const Shape s = unpack(inst.aux);
  const i32* regs = &w.kernel().pool[inst.ext];
  const u8* from = w.launch->params + inst.imm;
  for (u32 k = 0; k < s.count; ++k) {
    u32 bytes = 1u << s.element_log2;
    u64 v = 0;
    std::memcpy(&v, from + k * bytes, bytes);
    if (s.sign) v = u64(i64(v << (64 - 8 * bytes)) >> (64 - 8 * bytes));
    if (regs[k] == kNoOperand) continue;
    if (s.register_bits == 16) {
      u16* d = w.lanes<u16>(regs[k]);
      for_lanes(mask, [=](int i) { d[i] = u16(v); });
    } else if (s.register_bits == 32) {
      u32* d = w.lanes<u32>(regs[k]);
      for_lanes(mask, [=](int i) { d[i] = u32(v); });
    } else {
      u64* d = w.lanes<u64>(regs[k]);
      for_lanes(mask, [=](int i) { d[i] = v; });
    }
  }
}

template <class T, class R>
void store_lanes(const R* s, u8* const* pointers, u32 offset, u32 mask) {
  for (u32 m = mask; m; m &= m - 1) {
    int i = std::countr_zero(m);
    T v = T(s[i]);
    std::memcpy(pointers[i] + offset, &v, sizeof(T));
  }
}

template <class R>
void store_element(const R* s, u8* const* p, u32 offset, u32 mask, u32 log2) {
  switch (log2) {
    case 0: return store_lanes<u8>(s, p, offset, mask);
    case 1: return store_lanes<u16>(s, p, offset, mask);
    case 2: return store_lanes<u32>(s, p, offset, mask);
    default: return store_lanes<u64>(s, p, offset, mask);
  }
}

void require_same_values(Warp& w, const Shape& s, const i32* regs, u8* const* pointers, const SameValue& same) {
  for (u32 m = same.lanes; m; m &= m - 1) {
    const u32 lane = u32(std::countr_zero(m));
    for (u32 k = 0; k < s.count; ++k) {
      const u8* value = s.register_bits == 16   ? reinterpret_cast<const u8*>(w.lanes<u16>(regs[k]) + lane)
                        : s.register_bits == 32 ? reinterpret_cast<const u8*>(w.lanes<u32>(regs[k]) + lane)
                                                : reinterpret_cast<const u8*>(w.lanes<u64>(regs[k]) + lane);
      if (std::memcmp(pointers[lane] + (k << s.element_log2), value, size_t(1) << s.element_log2)) {
        w.fault("race", same.conflict, 1u << lane);
      }
    }
  }
}

void store(Warp& w, const Inst& inst, u32 mask) {
  const Shape s = unpack(inst.aux);
  u64 addresses[kLanes];
  u8* pointers[kLanes];
  memory_addresses(w, inst, mask, addresses);
  u32 bytes = s.count << s.element_log2;
  Access access = memory_strong(inst) ? Access::kStrongWrite : Access::kWrite;
  const i32* regs = &w.kernel().pool[inst.ext];
  SameValue same;
  w.same_value = access == Access::kWrite ? &same : nullptr;
  w.resolve(memory_space(inst), addresses, mask, bytes, bytes, access, pointers);
  w.same_value = nullptr;
  if (same.lanes) require_same_values(w, s, regs, pointers, same);
  if (access == Access::kStrongWrite) w.before_strong_write(addresses, mask, inst.aux);
  for (u32 k = 0; k < s.count; ++k) {
    u32 offset = k << s.element_log2;
    if (s.register_bits == 16)
      store_element(w.lanes<u16>(regs[k]), pointers, offset, mask, s.element_log2);
    else if (s.register_bits == 32)
      store_element(w.lanes<u32>(regs[k]), pointers, offset, mask, s.element_log2);
    else
      store_element(w.lanes<u64>(regs[k]), pointers, offset, mask, s.element_log2);
  }
  if (access == Access::kStrongWrite && w.tracks_races()) w.release(w.block->strong);
}

struct TypeInfo {
  const char* name;
  u32 log2;
  bool sign;
  Imm imm;
};
constexpr TypeInfo kTypes[] = {
    {".b8", 0, false, Imm::kInteger},  {".u8", 0, false, Imm::kInteger},  {".s8", 0, true, Imm::kInteger},
    {".b16", 1, false, Imm::kInteger}, {".u16", 1, false, Imm::kInteger}, {".s16", 1, true, Imm::kInteger},
    {".b32", 2, false, Imm::kInteger}, {".u32", 2, false, Imm::kInteger}, {".s32", 2, true, Imm::kInteger},
    {".f32", 2, false, Imm::kFloat32}, {".b64", 3, false, Imm::kInteger}, {".u64", 3, false, Imm::kInteger},
    {".s64", 3, true, Imm::kInteger},  {".f64", 3, false, Imm::kFloat64}};

// Form::tag: index in kTypes | count << 8 | space << 16.
void decode_load_store(DecodeContext& ctx, const Form& form, bool is_load) {
  const TypeInfo& type = kTypes[form.tag & 255];
  Shape shape{type.log2, 0, u32(form.tag >> 8 & 255), type.sign};
  bool hint = ctx.inst().modifiers.find(".L2::cache_hint") != std::string::npos;
  ctx.require(ctx.count() == (hint ? 3u : 2u), "wrong number of operands");
  if (hint) ctx.src(ctx.operand(2), 64);
  const Operand& value = ctx.operand(is_load ? 0 : 1);
  bool vector = value.kind == Operand::Kind::kVector;
  size_t given = vector ? value.elements.size() : 1;  // Triton writes { %r1 } for one
  ctx.require(given == shape.count, "wrong number of registers");
  int least = std::max(16, 8 << type.log2);
  int bits = 0;
  for (u32 k = 0; k < shape.count; ++k) {
    int b = ctx.register_bits(vector ? value.elements[k] : value);
    if (b == 0) continue;
    ctx.require(bits == 0 || bits == b, "registers of different widths in one vector");
    bits = b;
  }
  if (bits == 0) bits = least;
  ctx.require(bits >= least, "the register is narrower than the type");
  shape.register_bits = u32(bits);
  std::vector<i32> regs;
  for (u32 k = 0; k < shape.count; ++k) {
    const Operand& o = vector ? value.elements[k] : value;
    regs.push_back(is_load ? ctx.dst(o, bits) : ctx.src(o, bits, type.imm));
  }
  ctx.out().ext = ctx.pool(regs);
  ctx.out().aux = pack(shape) | ordering_of(ctx.inst().modifiers);
  Space space = Space(form.tag >> 16 & 255);
  Address a = decode_memory_operand(ctx, ctx.operand(is_load ? 1 : 0), space);
  if (!is_load) ctx.require(a.symbol != Space::kParam, "kernel parameters are read-only");
  if (is_load && a.symbol == Space::kParam && a.base == kNoOperand) {
    u64 bytes = u64(shape.count) << shape.element_log2, offset = u64(a.offset) & kWindowMask;
    ctx.require(offset % bytes == 0, "misaligned parameter access");
    ctx.require(offset + bytes <= ctx.param_bytes(), "the access lies outside the kernel parameters");
    ctx.out().imm = offset;
    ctx.out().fn = load_param;
  }
}

void decode_load(DecodeContext& ctx, const Form& form) {
  decode_load_store(ctx, form, true);
}
void decode_store(DecodeContext& ctx, const Form& form) {
  decode_load_store(ctx, form, false);
}

InstClass class_of(Space space, bool is_load) {
  if (space == Space::kGlobal || space == Space::kGeneric)
    return is_load ? InstClass::kLoadGlobal : InstClass::kStoreGlobal;
  if (space == Space::kShared || space == Space::kSharedCluster)
    return is_load ? InstClass::kLoadShared : InstClass::kStoreShared;
  return is_load ? InstClass::kLoadOther : InstClass::kStoreOther;
}

void add_space(Registry& r, const std::string& name, Space space, bool loads, bool stores) {
  for (u64 t = 0; t < std::size(kTypes); ++t) {
    for (u64 count : {1, 2, 4}) {
      if (count << kTypes[t].log2 > 16) continue;
      std::string tail = name + (count == 1 ? "" : ".v" + std::to_string(count)) + kTypes[t].name;
      u64 tag = t | count << 8 | u64(space) << 16;
      if (loads) r.add("ld" + tail, class_of(space, true), decode_load, load, tag);
      if (stores) r.add("st" + tail, class_of(space, false), decode_store, store, tag);
    }
  }
}

}  // namespace

void register_memory(Registry& r) {
  for (const char* root : {"ld", "st"}) {
    r.any_order(root);
    r.ignore(root, {"cg", "cs", "weak", "volatile", "relaxed", "cta", "cluster", "gpu", "sys", "L1::evict_normal",
                    "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate", "L2::cache_hint"});
  }
  r.ignore("ld", {"nc", "ca", "lu", "cv", "acquire", "L2::64B", "L2::128B", "L2::256B"});
  r.ignore("st", {"wb", "wt", "release"});
  add_space(r, "", Space::kGeneric, true, true);
  add_space(r, ".global", Space::kGlobal, true, true);
  add_space(r, ".shared", Space::kShared, true, true);
  add_space(r, ".shared::cta", Space::kShared, true, true);
  add_space(r, ".shared::cluster", Space::kSharedCluster, true, true);
  add_space(r, ".local", Space::kLocal, true, true);
  add_space(r, ".const", Space::kConst, true, false);
  add_space(r, ".param", Space::kParam, true, true);
  add_space(r, ".param::entry", Space::kParam, true, false);
  add_space(r, ".param::func", Space::kParam, true, true);
}

}  // namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL
