#include "vgpu/builder.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <utility>

#include "vgpu/fault.h"

namespace pagedkern::vgpu {
namespace {

constexpr size_t kMaxCallDepth = 256;
constexpr u32 kMaxRegisterBytes = 1u << 26;

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
  if (open.size() > kMaxCallDepth) {
    errors.push_back("PTX line " + std::to_string(f.line) + ": calls nest too deep");
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
  try {
    lay_out_params();
    lay_out_shared();
    for (Frame& frame : frames_) lay_out_locals(frame);
  } catch (const DecodeReject& e) {
    errors.push_back(e.what());
    return nullptr;
  }
  for (u32 k = 0; k < frames_.size(); ++k) {
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
  if (register_bytes_ > kMaxRegisterBytes) throw DecodeReject("the kernel has too many registers");
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
