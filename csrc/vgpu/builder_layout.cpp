// Where parameters, shared and local variables lie, and how much of them a kernel may have.
#include <algorithm>

#include "vgpu/builder.h"
#include "vgpu/launch.h"

namespace pagedkern::vgpu {
namespace {

constexpr u32 kMaxParamBytes = 32764, kMaxLocalBytes = 512 * 1024;

}  // namespace

// Layout errors stop the kernel at once: nothing can be addressed.
void KernelBuilder::refuse(const std::string& why) const {
  throw DecodeReject("PTX line " + std::to_string(entry_.line) + ": kernel '" + entry_.name + "': " + why);
}

void KernelBuilder::lay_out_params() {
  u32 at = 0;
  for (const Variable& p : entry_.params) {
    at = align_up(at, p.align);
    kernel_->params.push_back({p.name, at, u32(p.bytes), p.align});
    param_offset_[p.name] = at;
    at += u32(p.bytes);
    if (p.bytes > kMaxParamBytes || at > kMaxParamBytes) {
      refuse("the kernel parameters are larger than " + std::to_string(kMaxParamBytes) + " bytes");
    }
  }
  kernel_->param_bytes = at;
}

void KernelBuilder::place_shared(const Variable& v, const std::string& key) {
  u32 at = align_up(kernel_->shared_static_bytes, std::max(v.align, 1u));
  shared_address_[key] = kSharedBase + at;
  if (v.bytes > DeviceLimits::kMaxSharedBytes || at + v.bytes > DeviceLimits::kMaxSharedBytes) {
    refuse("the shared variables are larger than the " + std::to_string(DeviceLimits::kMaxSharedBytes) +
           " bytes a block can have");
  }
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
    place_shared(v, key);
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
    if (v.bytes > kMaxLocalBytes || local_bytes_ + v.bytes > kMaxLocalBytes) {
      refuse("the local variables are larger than the " + std::to_string(kMaxLocalBytes) + " bytes a thread can have");
    }
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

}  // namespace pagedkern::vgpu
