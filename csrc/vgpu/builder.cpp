#include "vgpu/builder.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <utility>

#include "vgpu/fault.h"

namespace pagedkern::vgpu {
namespace {

u32 align_up(u32 v, u32 a) {
  return (v + a - 1) / a * a;
}

const std::map<std::string, SpecialRegister>& special_names() {
  using S = SpecialRegister;
  static const std::map<std::string, SpecialRegister> names = {{"%tid.x", S::kTidX},
                                                               {"%tid.y", S::kTidY},
                                                               {"%tid.z", S::kTidZ},
                                                               {"%ntid.x", S::kNtidX},
                                                               {"%ntid.y", S::kNtidY},
                                                               {"%ntid.z", S::kNtidZ},
                                                               {"%ctaid.x", S::kCtaidX},
                                                               {"%ctaid.y", S::kCtaidY},
                                                               {"%ctaid.z", S::kCtaidZ},
                                                               {"%nctaid.x", S::kNctaidX},
                                                               {"%nctaid.y", S::kNctaidY},
                                                               {"%nctaid.z", S::kNctaidZ},
                                                               {"%laneid", S::kLaneid},
                                                               {"%warpid", S::kWarpid},
                                                               {"%nwarpid", S::kNwarpid},
                                                               {"%smid", S::kSmid},
                                                               {"%nsmid", S::kNsmid},
                                                               {"%gridid", S::kGridid},
                                                               {"%clusterid.x", S::kClusteridX},
                                                               {"%clusterid.y", S::kClusteridY},
                                                               {"%clusterid.z", S::kClusteridZ},
                                                               {"%nclusterid.x", S::kNclusteridX},
                                                               {"%nclusterid.y", S::kNclusteridY},
                                                               {"%nclusterid.z", S::kNclusteridZ},
                                                               {"%cluster_ctaid.x", S::kClusterCtaidX},
                                                               {"%cluster_ctaid.y", S::kClusterCtaidY},
                                                               {"%cluster_ctaid.z", S::kClusterCtaidZ},
                                                               {"%cluster_nctaid.x", S::kClusterNctaidX},
                                                               {"%cluster_nctaid.y", S::kClusterNctaidY},
                                                               {"%cluster_nctaid.z", S::kClusterNctaidZ},
                                                               {"%cluster_ctarank", S::kClusterCtarank},
                                                               {"%cluster_nctarank", S::kClusterNctarank},
                                                               {"%is_explicit_cluster", S::kIsExplicitCluster},
                                                               {"%lanemask_eq", S::kLanemaskEq},
                                                               {"%lanemask_le", S::kLanemaskLe},
                                                               {"%lanemask_lt", S::kLanemaskLt},
                                                               {"%lanemask_ge", S::kLanemaskGe},
                                                               {"%lanemask_gt", S::kLanemaskGt},
                                                               {"%dynamic_smem_size", S::kDynamicSmemSize},
                                                               {"%total_smem_size", S::kTotalSmemSize}};
  return names;
}

}  // namespace

const FunctionText* KernelBuilder::find_function(const std::string& name) const {
  for (const auto& f : text_.functions) {
    if (f.name == name) return &f;
  }
  return nullptr;
}

// Post-order over the call graph: callees come first in the code, which the executor's scheduling of diverged lanes
// relies on.
bool KernelBuilder::order_functions(const FunctionText& f, std::set<std::string>& open,
                                    std::vector<std::string>& errors) {
  if (frame_of_.count(f.name)) return true;
  if (!open.insert(f.name).second) {
    errors.push_back("PTX line " + std::to_string(f.line) + ": recursion through '" + f.name + "' is not supported");
    return false;
  }
  for (const auto& inst : f.body) {
    if (inst.root != "call") continue;
    for (const auto& o : inst.operands) {
      if (o.kind != Operand::Kind::kName) continue;
      const FunctionText* callee = find_function(o.name);
      if (callee && !callee->is_extern && !order_functions(*callee, open, errors)) return false;
    }
  }
  open.erase(f.name);
  frame_of_[f.name] = u32(frames_.size());
  frames_.emplace_back();
  frames_.back().text = &f;
  return true;
}

std::unique_ptr<Kernel> KernelBuilder::build(std::vector<std::string>& errors) {
  kernel_ = std::make_unique<Kernel>();
  kernel_->name = entry_.name;
  kernel_->program = &program_;
  kernel_->reqntid = entry_.reqntid;
  kernel_->maxntid = entry_.maxntid;
  kernel_->reqnctapercluster = entry_.reqnctapercluster;
  kernel_->max_cluster_rank = entry_.max_cluster_rank;
  kernel_->maxnreg = entry_.maxnreg;
  std::set<std::string> open;
  if (!order_functions(entry_, open, errors)) return nullptr;
  lay_out_params();
  lay_out_shared();
  for (u32 k = 0; k < frames_.size(); ++k) {
    lay_out_locals(frames_[k]);
    frames_[k].entry_label = new_label(k, 0);
    if (!frames_[k].text->is_entry) frames_[k].return_pc = i32(register_slot(32));
  }
  size_t before = errors.size();
  for (u32 k = 0; k < frames_.size(); ++k) decode_function(k, errors);
  for (auto& [opcode, where] : unknown_) {
    errors.push_back("PTX line " + std::to_string(where.first) + ": unsupported instruction " + opcode +
                     (where.second > 1 ? " (" + std::to_string(where.second) + " times)" : ""));
  }
  if (errors.size() != before) return nullptr;
  resolve_branches();
  analyse_registers();
  finish();
  return std::move(kernel_);
}

void KernelBuilder::lay_out_params() {
  u32 at = 0;
  for (const Variable& p : entry_.params) {
    at = align_up(at, p.align);
    kernel_->params.push_back({p.name, at, u32(p.bytes), p.align});
    param_offset_[p.name] = at;
    at += u32(p.bytes);
  }
  kernel_->param_bytes = at;
}

void KernelBuilder::place_shared(const Variable& v) {
  u32 at = align_up(kernel_->shared_static_bytes, std::max(v.align, 1u));
  shared_address_[v.name] = kSharedBase + at;
  kernel_->shared_static_bytes = at + u32(v.bytes);
}

// Shared variables of the functions, and those of the module that they mention; then dynamic shared memory.
void KernelBuilder::lay_out_shared() {
  std::set<std::string> mentioned;
  for (const Frame& f : frames_) {
    for (const auto& inst : f.text->body) {
      std::vector<const Operand*> stack;
      for (const auto& o : inst.operands) stack.push_back(&o);
      while (!stack.empty()) {
        const Operand* o = stack.back();
        stack.pop_back();
        if (!o->name.empty()) mentioned.insert(o->name);
        for (const auto& e : o->elements) stack.push_back(&e);
        for (const auto& e : o->pair) stack.push_back(&e);
      }
    }
  }
  u32 dynamic_align = 16;
  std::vector<std::string> dynamic;
  auto place = [&](const Variable& v, const std::string& key) {
    if (v.where != Variable::Where::kShared) return;
    if (v.is_extern || v.bytes == 0) {
      dynamic.push_back(key);
      dynamic_align = std::max(dynamic_align, v.align);
      return;
    }
    place_shared(v);
    if (key != v.name) {
      shared_address_[key] = shared_address_[v.name];
    }
  };
  for (const auto& [name, v] : text_.variables) {
    if (mentioned.count(name)) place(v, name);
  }
  for (u32 k = 0; k < frames_.size(); ++k) {
    const auto& scopes = frames_[k].text->scopes;
    for (size_t s = 0; s < scopes.size(); ++s) {
      for (const auto& [name, v] : scopes[s].variables) {
        place(v, std::to_string(k) + "/" + std::to_string(s) + "/" + name);
      }
    }
  }
  kernel_->shared_dynamic_offset = kSharedBase + align_up(kernel_->shared_static_bytes, dynamic_align);
  if (dynamic.empty()) kernel_->shared_dynamic_offset = kSharedBase + kernel_->shared_static_bytes;
  for (const auto& key : dynamic) shared_address_[key] = kernel_->shared_dynamic_offset;
}

void KernelBuilder::lay_out_locals(Frame& frame) {
  auto place = [&](int scope, const Variable& v) {
    local_bytes_ = align_up(local_bytes_, std::max(v.align, 1u));
    frame.locals[{scope, v.name}] = kLocalBase + local_bytes_;
    local_bytes_ += u32(v.bytes);
  };
  if (!frame.text->is_entry) {
    for (const auto& p : frame.text->params) place(-1, p);
    for (const auto& p : frame.text->results) place(-1, p);
  }
  for (size_t s = 0; s < frame.text->scopes.size(); ++s) {
    for (const auto& [name, v] : frame.text->scopes[s].variables) {
      if (v.where == Variable::Where::kLocal || v.where == Variable::Where::kParam) place(int(s), v);
    }
  }
}

u32 KernelBuilder::new_label(u32 frame, u32 body_index) {
  labels_.push_back({frame, body_index});
  return u32(labels_.size() - 1);
}

u32 KernelBuilder::emit(const Instruction& inst, const Form& form) {
  kernel_->code.emplace_back();
  kernel_->code.back().form = form.index;
  kernel_->code.back().fn = form.handler;
  kernel_->where.push_back({inst.line, inst.source});
  flow_.emplace_back();
  flow_.back().function = current_frame_;
  return u32(kernel_->code.size() - 1);
}

void KernelBuilder::decode_function(u32 frame_index, std::vector<std::string>& errors) {
  current_frame_ = frame_index;
  Frame& frame = frames_[frame_index];
  if (frame.text->is_entry) kernel_->entry_pc = u32(kernel_->code.size());
  for (u32 k = 0; k < frame.text->body.size(); ++k) {
    frame.pc_of_body[k] = u32(kernel_->code.size());
    decode_instruction(frame.text->body[k], errors);
  }
  frame.pc_of_body[u32(frame.text->body.size())] = u32(kernel_->code.size());
  Instruction end;  // falling off the end returns
  end.root = "ret";
  end.line = frame.text->body.empty() ? frame.text->line : frame.text->body.back().line;
  decode_instruction(end, errors);
}

void KernelBuilder::decode_instruction(const Instruction& inst, std::vector<std::string>& errors) {
  current_scope_ = inst.scope;
  const Form* form = Registry::instance().find(inst.form());
  if (!form) {
    auto& entry = unknown_.emplace(inst.form(), std::pair<u32, u32>{inst.line, 0}).first->second;
    ++entry.second;
    return;
  }
  emit(inst, *form);
  DecodeContext ctx(*this, inst);
  try {
    decode_guard(ctx, inst);
    if (form->decode) {
      form->decode(ctx, *form);
    } else {
      decode_signature(ctx, *form);
    }
  } catch (const DecodeReject& e) {
    errors.push_back("PTX line " + std::to_string(inst.line) + ": " + inst.form() + ": " + e.what());
  }
}

void KernelBuilder::decode_guard(DecodeContext& ctx, const Instruction& inst) {
  if (inst.guard.empty()) return;
  Operand o;
  o.name = inst.guard;
  bool negated = false;
  OperandRef ref = ctx.src_pred(o, &negated);
  if (ref < 0) ctx.reject("the guard is no predicate register");
  Inst& out = ctx.out();
  out.guard = u32(ref);
  out.guard_negated = inst.guard_negated;
  out.special |= kGuarded;
}

void KernelBuilder::resolve_branches() {
  auto pc_of = [&](u32 label) { return frames_[labels_[label].frame].pc_of_body.at(labels_[label].body_index); };
  for (auto [pc, label] : branch_fixups_) {
    kernel_->code[pc].ext = pc_of(label);
    if (labels_[label].frame == flow_[pc].function) flow_[pc].targets.push_back(pc_of(label));
  }
  for (auto [slot, label] : pool_fixups_) kernel_->pool[slot] = i32(pc_of(label));
}

u32 KernelBuilder::register_slot(int bits) {
  if (bits == 1) {
    if (predicate_left_ == 0) {
      predicate_next_ = register_bytes_;
      register_bytes_ += 64;
      predicate_left_ = 16;
    }
    --predicate_left_;
    return std::exchange(predicate_next_, predicate_next_ + 4);
  }
  u32 at = register_bytes_;
  register_bytes_ += u32(bits / 8 * kLanes);
  return at;
}

bool KernelBuilder::find_register(const std::string& name, u32* id) {
  Frame& frame = frames_[current_frame_];
  const auto& scopes = frame.text->scopes;
  static const int kBits[] = {1, 16, 32, 64, 128};
  for (int s = scopes.empty() ? -1 : current_scope_; s >= 0; s = scopes[size_t(s)].parent) {
    const Scope& scope = scopes[size_t(s)];
    if (scope.variables.count(name)) return false;
    auto found = scope.registers.find(name);
    RegType type = RegType::k32;
    bool here = found != scope.registers.end();
    if (here) type = found->second;
    for (size_t digits = 1; !here && digits < name.size() && std::isdigit(u8(name[name.size() - digits])); ++digits) {
      std::string prefix = name.substr(0, name.size() - digits);
      auto range = scope.ranges.find(prefix);
      if (range == scope.ranges.end() || digits > 7) continue;
      if (u32(std::stoul(name.substr(prefix.size()))) >= range->second) continue;
      type = scope.registers.at(prefix + "<");
      here = true;
    }
    if (!here) continue;
    auto key = std::make_pair(s, name);
    auto it = frame.registers.find(key);
    if (it == frame.registers.end()) {
      int bits = kBits[size_t(type)];
      if (bits == 128) throw DecodeReject("128-bit register '" + name + "' is not supported");
      RegisterInfo info;
      info.name = name;
      info.bits = bits;
      info.offset = register_slot(bits);
      info.function = current_frame_;
      it = frame.registers.emplace(key, u32(registers_.size())).first;
      registers_.push_back(info);
    }
    *id = it->second;
    return true;
  }
  return false;
}

const Variable* KernelBuilder::find_variable(const std::string& name, int* scope) const {
  const Frame& frame = frames_[current_frame_];
  const auto& scopes = frame.text->scopes;
  for (int s = scopes.empty() ? -1 : current_scope_; s >= 0; s = scopes[size_t(s)].parent) {
    auto it = scopes[size_t(s)].variables.find(name);
    if (it != scopes[size_t(s)].variables.end()) {
      *scope = s;
      return &it->second;
    }
  }
  *scope = -1;
  for (const auto* list : {&frame.text->params, &frame.text->results}) {
    for (const Variable& v : *list) {
      if (v.name == name) return &v;
    }
  }
  *scope = -2;
  auto it = text_.variables.find(name);
  return it == text_.variables.end() ? nullptr : &it->second;
}

bool KernelBuilder::symbol_address(const std::string& name, u64* address, Space* space) {
  int scope = 0;
  const Variable* v = find_variable(name, &scope);
  if (!v) return false;
  const Frame& frame = frames_[current_frame_];
  switch (v->where) {
    case Variable::Where::kShared: {
      std::string key = scope >= 0 ? std::to_string(current_frame_) + "/" + std::to_string(scope) + "/" + name : name;
      *address = shared_address_.at(key);
      *space = Space::kShared;
      return true;
    }
    case Variable::Where::kParam:
      if (scope == -1 && frame.text->is_entry) {
        *address = param_offset_.at(name);
        *space = Space::kParam;
        return true;
      }
      [[fallthrough]];
    case Variable::Where::kLocal:
      *address = frame.locals.at({scope, name});
      *space = Space::kLocal;
      return true;
    case Variable::Where::kGlobal:
    case Variable::Where::kConst:
      for (const auto& m : program_.variables) {
        if (m->name != name || scope != -2) continue;
        *address = reinterpret_cast<u64>(m->data);
        *space = v->where == Variable::Where::kConst ? Space::kConst : Space::kGlobal;
        return true;
      }
      throw DecodeReject("variable '" + name + "' has no memory (extern, or declared inside a function)");
  }
  return false;
}

OperandRef KernelBuilder::special_register(const std::string& name) {
  auto it = special_names().find(name);
  if (it == special_names().end()) return kNoOperand;
  auto slot = special_slots_.find(it->second);
  if (slot == special_slots_.end()) {
    slot = special_slots_.emplace(it->second, register_slot(32)).first;
    kernel_->special_registers.emplace_back(it->second, slot->second);
  }
  return i32(slot->second);
}

OperandRef KernelBuilder::constant(u64 bits, int width) {
  auto key = std::make_pair(bits, width);
  auto it = constants_.find(key);
  if (it != constants_.end()) return it->second;
  u32 at = u32(const_bytes_.size());
  u32 bytes = width == 1 ? 4 : u32(width) / 8;
  const_bytes_.resize(at + align_up(bytes * kLanes, 64));
  for (int lane = 0; lane < kLanes; ++lane) std::memcpy(&const_bytes_[at + u32(lane) * bytes], &bits, bytes);
  OperandRef ref = ~i32(at);
  constants_.emplace(key, ref);
  return ref;
}

void KernelBuilder::finish() {
  Kernel& k = *kernel_;
  k.track_begin = register_bytes_;
  u32 at = register_bytes_;
  for (auto& r : registers_) {
    if (!r.tracked && !r.async) continue;
    r.track = at;
    at += sizeof(TrackState);
  }
  k.register_bytes = align_up(at, 64);
  for (auto& list : k.checks) {
    for (auto* part : {&list.reads, &list.writes}) {
      for (auto& c : *part) {  // holds the register id until here
        u32 id = c.track;
        c.track = registers_[id].track;
        c.slot = registers_[id].offset;
        c.name = u32(k.register_names.size());
        k.register_names.push_back(registers_[id].name);
      }
    }
  }
  k.local_bytes = align_up(local_bytes_, 16);
  k.const_words.assign(const_bytes_.size() / 8 + 8, 0);
  if (!const_bytes_.empty()) std::memcpy(const_cast<u8*>(k.const_base()), const_bytes_.data(), const_bytes_.size());
}

}  // namespace pagedkern::vgpu
