#include "vgpu/decode.h"

#include <bit>
#include <cctype>
#include <cstring>

#include "vgpu/builder.h"
#include "vgpu/half.h"

namespace pagedkern::vgpu {

Inst& DecodeContext::out() {
  return builder_.kernel_->code.back();
}

void DecodeContext::reject(const std::string& reason) const {
  throw DecodeReject(reason);
}

int DecodeContext::register_bits(const Operand& o) const {
  if (o.kind == Operand::Kind::kSink) return 0;
  if (o.kind != Operand::Kind::kName || o.ivalue) return 0;
  u32 id;
  if (builder_.find_register(o.name, &id)) return builder_.registers_[id].bits;
  return builder_.special_register(o.name) == kNoOperand ? 0 : 32;
}

OperandRef DecodeContext::scratch(int bits) {
  u32& slot = builder_.scratch_[bits == 1 ? 0 : bits == 16 ? 1 : bits == 32 ? 2 : 3];
  if (slot == 0) slot = builder_.register_slot(bits) + 1;
  return i32(slot - 1);
}

OperandRef DecodeContext::carry() {
  if (builder_.carry_ == 0) builder_.carry_ = builder_.register_slot(1) + 1;
  return i32(builder_.carry_ - 1);
}

OperandRef DecodeContext::constant(u64 bits, int width) {
  return builder_.constant(bits, width);
}

OperandRef DecodeContext::dst(const Operand& o, int bits, bool partial) {
  if (o.kind == Operand::Kind::kSink) return scratch(bits);
  u32 id;
  if (o.kind != Operand::Kind::kName || o.ivalue || o.negated || !builder_.find_register(o.name, &id)) {
    reject("'" + o.name + "' is no register to write to");
  }
  const RegisterInfo& r = builder_.registers_[id];
  if (r.bits != bits)
    reject("register '" + o.name + "' has " + std::to_string(r.bits) + " bits, the instruction writes " +
           std::to_string(bits));
  InstFlow& flow = builder_.flow_.back();
  (partial ? flow.partial_writes : flow.writes).push_back(id);
  return i32(r.offset);
}

OperandRef DecodeContext::src(const Operand& o, int bits, Imm imm) {
  if (o.negated) reject("'!' is only for predicates");
  if (o.kind == Operand::Kind::kName) {
    u32 id;
    if (o.ivalue == 0 && builder_.find_register(o.name, &id)) {
      const RegisterInfo& r = builder_.registers_[id];
      if (r.bits != bits)
        reject("register '" + o.name + "' has " + std::to_string(r.bits) + " bits, the instruction reads " +
               std::to_string(bits));
      builder_.flow_.back().reads.push_back(id);
      return i32(r.offset);
    }
    if (OperandRef special = builder_.special_register(o.name); special != kNoOperand) {
      if (bits != 32)
        reject("special register " + o.name + " has 32 bits, the instruction reads " + std::to_string(bits));
      return special;
    }
    if (o.name == "WARP_SZ") return constant(32, bits);
    u64 address;
    Space space;
    if (!builder_.symbol_address(o.name, &address, &space)) reject("unknown name '" + o.name + "'");
    if (space == Space::kParam) address |= kParamWindow;
    address += o.ivalue;
    if (bits < 32 || (bits == 32 && address >> 32)) reject("the address of '" + o.name + "' needs a 64-bit register");
    return constant(address, bits);
  }
  u64 keep = bits == 64 ? ~0ull : (1ull << bits) - 1;
  if (o.kind == Operand::Kind::kInt) {
    if (imm == Imm::kNone) reject("an immediate is not allowed here");
    if (imm == Imm::kFloat32) return constant(o.ivalue == 0 ? 0 : std::bit_cast<u32>(float(i64(o.ivalue))), bits);
    if (imm == Imm::kFloat64) return constant(o.ivalue == 0 ? 0 : std::bit_cast<u64>(double(i64(o.ivalue))), bits);
    return constant(o.ivalue & keep, bits);
  }
  if (o.kind != Operand::Kind::kFloat || imm == Imm::kNone)
    reject("operand '" + o.name + "' is neither register nor immediate");
  if (o.float_bits && o.float_bits == u32(bits)) return constant(o.ivalue, bits);
  if (bits == 16) return constant(float_to_half(float(o.fvalue)), 16);
  if (bits == 32) return constant(std::bit_cast<u32>(float(o.fvalue)), 32);
  return constant(std::bit_cast<u64>(o.fvalue), 64);
}

OperandRef DecodeContext::src_pred(const Operand& o, bool* negated) {
  *negated = o.negated;
  u64 value;
  if (constant_value(o, &value)) return constant(value ? kFullMask : 0, 1);
  u32 id;
  if (o.kind != Operand::Kind::kName || !builder_.find_register(o.name, &id) || builder_.registers_[id].bits != 1) {
    reject("'" + o.name + "' is no predicate register");
  }
  builder_.flow_.back().reads.push_back(id);
  return i32(builder_.registers_[id].offset);
}

bool DecodeContext::constant_value(const Operand& o, u64* value) const {
  if (o.kind != Operand::Kind::kInt) return false;
  *value = o.ivalue;
  return true;
}

Address DecodeContext::address(const Operand& o) {
  if (o.kind != Operand::Kind::kAddress) reject("expected an address in brackets");
  Address a;
  a.offset = i64(o.ivalue);
  if (o.name.empty()) return a;
  u32 id;
  if (builder_.find_register(o.name, &id)) {
    const RegisterInfo& r = builder_.registers_[id];
    if (r.bits != 32 && r.bits != 64)
      reject("address register '" + o.name + "' has " + std::to_string(r.bits) + " bits");
    builder_.flow_.back().reads.push_back(id);
    a.base = i32(r.offset);
    a.wide = r.bits == 64;
    return a;
  }
  u64 address;
  if (!builder_.symbol_address(o.name, &address, &a.symbol)) reject("unknown name '" + o.name + "'");
  a.offset += i64(address);
  return a;
}

u32 DecodeContext::label(const std::string& name) const {
  const auto& frame = builder_.frames_[builder_.current_frame_];
  const auto& scopes = frame.text->scopes;
  for (int s = builder_.current_scope_; s >= 0; s = scopes[size_t(s)].parent) {
    auto it = scopes[size_t(s)].labels.find(name);
    if (it != scopes[size_t(s)].labels.end()) return builder_.new_label(builder_.current_frame_, it->second);
  }
  reject("unknown label '" + name + "'");
}

void DecodeContext::branches_to(u32 label_id) {
  builder_.branch_fixups_.emplace_back(u32(builder_.kernel_->code.size() - 1), label_id);
}

const std::vector<std::string>* DecodeContext::branch_targets(const std::string& name) const {
  const auto& scopes = builder_.frames_[builder_.current_frame_].text->scopes;
  for (int s = builder_.current_scope_; s >= 0; s = scopes[size_t(s)].parent) {
    auto it = scopes[size_t(s)].branch_targets.find(name);
    if (it != scopes[size_t(s)].branch_targets.end()) return &it->second;
  }
  return nullptr;
}

void DecodeContext::falls_through(bool yes) {
  builder_.flow_.back().falls_through = yes;
}

u32 DecodeContext::pool(const std::vector<i32>& values) {
  auto& pool = builder_.kernel_->pool;
  u32 at = u32(pool.size());
  pool.insert(pool.end(), values.begin(), values.end());
  return at;
}

void DecodeContext::pool_branches(u32 index, const std::vector<u32>& label_ids) {
  u32 pc = u32(builder_.kernel_->code.size() - 1);
  for (u32 id : label_ids) {
    builder_.pool_fixups_.emplace_back(index++, id);
    builder_.branch_fixups_.emplace_back(pc, id);  // for the flow analysis; the family stores its own ext afterwards
  }
}

CallTarget DecodeContext::call_target(const std::string& function) {
  auto it = builder_.frame_of_.find(function);
  if (it == builder_.frame_of_.end()) reject("function '" + function + "' has no body");
  const auto& frame = builder_.frames_[it->second];
  CallTarget t;
  t.label = frame.entry_label;
  t.return_pc = frame.return_pc;
  for (const auto& p : frame.text->params) t.params.emplace_back(frame.locals.at({-1, p.name}), u32(p.bytes));
  for (const auto& p : frame.text->results) t.results.emplace_back(frame.locals.at({-1, p.name}), u32(p.bytes));
  return t;
}

std::pair<u32, u32> DecodeContext::local_param(const Operand& o) {
  int scope = 0;
  const Variable* v = o.kind == Operand::Kind::kName ? builder_.find_variable(o.name, &scope) : nullptr;
  if (!v || v->where != Variable::Where::kParam || scope < 0) reject("call arguments must be .param variables");
  return {builder_.frames_[builder_.current_frame_].locals.at({scope, o.name}), u32(v->bytes)};
}

u32 DecodeContext::param_bytes() const {
  return builder_.kernel_->param_bytes;
}

OperandRef DecodeContext::return_pc() const {
  return builder_.frames_[builder_.current_frame_].return_pc;
}

Inst& DecodeContext::append(Handler handler) {
  Inst copy = out();
  builder_.emit(inst_, Registry::instance().forms()[copy.form]);
  Inst& fresh = out();
  fresh.fn = handler;
  fresh.guard = copy.guard;
  fresh.guard_negated = copy.guard_negated;
  fresh.special = copy.special;
  return fresh;
}

void DecodeContext::mark_async(const Operand& o) {
  u32 id;
  if (o.kind == Operand::Kind::kName && builder_.find_register(o.name, &id)) builder_.registers_[id].async = true;
}

void DecodeContext::ignore_pending() {
  builder_.flow_.back().ignore_pending = true;
}
void DecodeContext::has_async() {
  builder_.kernel_->has_async = true;
}

namespace {

struct Slot {
  int bits;
  Imm imm;
};

Slot slot_of(char c) {
  switch (std::tolower(c)) {
    case 'p': return {1, Imm::kInteger};
    case 'h': return {16, Imm::kInteger};
    case 'w': return {32, Imm::kInteger};
    case 'x': return {64, Imm::kInteger};
    case 'e': return {16, Imm::kFloat16};
    case 'f': return {32, Imm::kFloat32};
    default: return {64, Imm::kFloat64};
  }
}

}  // namespace

void decode_signature(DecodeContext& ctx, const Form& form) {
  size_t operand = 0;
  int slot = 0;
  // Sources first in the flow analysis' eyes: reads and writes are kept apart, so the order here does not matter.
  for (const char* c = form.signature; *c; ++c) {
    bool optional = *c == '?';
    if (optional) ++c;
    if (optional && operand >= ctx.count()) {
      ++slot;
      continue;
    }
    if (operand >= ctx.count()) ctx.reject("too few operands");
    const Operand& o = ctx.operand(operand++);
    Slot want = slot_of(*c);
    bool write = std::isupper(u8(*c));
    bool bar = c[1] == '|';
    if (!bar && !o.pair.empty()) ctx.reject("unexpected '|'");
    if (write) {
      ctx.out().op[slot] = ctx.dst(o, want.bits);
    } else if (want.bits == 1) {
      bool negated = false;
      ctx.out().op[slot] = ctx.src_pred(o, &negated);
      if (negated) ctx.out().negate |= u8(1u << slot);
    } else {
      ctx.out().op[slot] = ctx.src(o, want.bits, want.imm);
    }
    ++slot;
    if (bar) {
      c += 2;
      int bits = slot_of(*c).bits;
      ctx.out().op[slot++] = o.pair.empty() ? ctx.scratch(bits) : ctx.dst(o.pair[0], bits);
    }
  }
  if (operand != ctx.count()) ctx.reject("too many operands");
}

}  // namespace pagedkern::vgpu
