// What a name means at a place in the text: registers, special registers, variables and their addresses.
#include <cctype>
#include <cstring>

#include "vgpu/builder.h"
#include "vgpu/fault.h"

namespace pagedkern::vgpu {
namespace {

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

}  // namespace pagedkern::vgpu
