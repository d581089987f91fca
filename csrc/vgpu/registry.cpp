#include "vgpu/registry.h"

#include <algorithm>

#include "vgpu/fault.h"

namespace pagedkern::vgpu {

// The build compiles the families at both levels on x86-64 (setup.py); PAGEDKERN_VGPU_NO_GENERIC is for hand builds of
// one.
#if defined(__x86_64__)
#define PAGEDKERN_VGPU_HAVE_AVX2
#endif

#define VGPU_FAMILY(name) void register_##name(Registry& registry);
namespace generic {
#ifndef PAGEDKERN_VGPU_NO_GENERIC
#include "vgpu/families.inc"
#endif
}  // namespace generic
namespace avx2 {
#ifdef PAGEDKERN_VGPU_HAVE_AVX2
#include "vgpu/families.inc"
#endif
}  // namespace avx2
#undef VGPU_FAMILY

namespace {

bool use_avx2() {
#ifdef PAGEDKERN_VGPU_HAVE_AVX2
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("popcnt");
#else
  return false;
#endif
}

void register_all(Registry& registry) {
#define VGPU_FAMILY(name) register_##name(registry);
#ifdef PAGEDKERN_VGPU_HAVE_AVX2
  if (use_avx2()) {
    using namespace avx2;
#include "vgpu/families.inc"
    return;
  }
#endif
#ifndef PAGEDKERN_VGPU_NO_GENERIC
  using namespace generic;
#include "vgpu/families.inc"
#endif
#undef VGPU_FAMILY
}

}  // namespace

const char* class_name(InstClass c) {
  static const char* const names[] = {
      "integer",    "logic",       "float",       "half",         "double",      "special_function",
      "convert",    "compare",     "move",        "control",      "warp",        "barrier",
      "fence",      "atomic",      "load_global", "store_global", "load_shared", "store_shared",
      "load_other", "store_other", "async_copy",  "mbarrier",     "matrix_move", "tensor_core",
      "other"};
  static_assert(sizeof(names) / sizeof(names[0]) == size_t(InstClass::kCount));
  return names[size_t(c)];
}

const Registry& Registry::instance() {
  static const Registry registry = [] {
    Registry r;
    register_all(r);
    return r;
  }();
  return registry;
}

const char* Registry::level() {
  return use_avx2() ? "avx2" : "generic";
}

void Registry::add(const std::string& name, InstClass cls, const char* signature, Handler handler, u64 tag) {
  Form f{name, cls, handler, signature, nullptr, tag, u32(forms_.size())};
  if (!by_name_.emplace(name, f.index).second) throw std::logic_error("instruction form registered twice: " + name);
  by_sorted_.emplace(sorted_key(name), f.index);
  forms_.push_back(std::move(f));
}

void Registry::add(const std::string& name, InstClass cls, DecodeFn decode, Handler handler, u64 tag) {
  add(name, cls, "", handler, tag);
  forms_.back().decode = decode;
}

void Registry::add(const std::string& name, InstClass cls, const char* signature, DecodeFn decode, Handler handler,
                   u64 tag) {
  add(name, cls, signature, handler, tag);
  forms_.back().decode = decode;
}

std::string Registry::sorted_key(const std::string& opcode) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (begin <= opcode.size()) {
    size_t end = opcode.find('.', begin);
    if (end == std::string::npos) end = opcode.size();
    parts.push_back(opcode.substr(begin, end - begin));
    begin = end + 1;
  }
  std::sort(parts.begin() + 1, parts.end());
  std::string key;
  for (auto& p : parts) key += p + ".";
  return key;
}

void Registry::ignore(const std::string& root, const std::vector<std::string>& modifiers) {
  auto& list = ignored_[root];
  list.insert(list.end(), modifiers.begin(), modifiers.end());
}

std::string Registry::without_ignored(const std::string& root, const std::string& opcode) const {
  auto rules = ignored_.find(root);
  if (rules == ignored_.end()) return opcode;
  std::string result = root;
  for (size_t begin = root.size(); begin < opcode.size();) {
    size_t end = opcode.find('.', begin + 1);
    if (end == std::string::npos) end = opcode.size();
    std::string modifier = opcode.substr(begin + 1, end - begin - 1);
    bool drop = false;
    for (const std::string& rule : rules->second) {
      drop |=
          rule.back() == '*' ? modifier.compare(0, rule.size() - 1, rule, 0, rule.size() - 1) == 0 : modifier == rule;
    }
    if (!drop) result += "." + modifier;
    begin = end;
  }
  return result;
}

const Form* Registry::find(const std::string& opcode) const {
  auto it = by_name_.find(opcode);
  if (it != by_name_.end()) return &forms_[it->second];
  std::string root = opcode.substr(0, opcode.find('.'));
  std::string plain = without_ignored(root, opcode);
  it = by_name_.find(plain);
  if (it != by_name_.end()) return &forms_[it->second];
  if (!unordered_.count(root)) return nullptr;
  auto sorted = by_sorted_.find(sorted_key(plain));
  return sorted == by_sorted_.end() ? nullptr : &forms_[sorted->second];
}

}  // namespace pagedkern::vgpu
