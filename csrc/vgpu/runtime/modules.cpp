#include "vgpu/runtime/modules.h"

#include <unordered_map>
#include <vector>

#include "vgpu/runtime/fatbin.h"

namespace pagedkern::vgpu::runtime {
namespace {

struct Variable {
  Module* module;
  std::string name;
};

// Never destroyed: nvcc's objects unregister from atexit, in an order nobody knows.
struct Tables {
  std::mutex mutex;
  std::unordered_map<const void*, std::unique_ptr<Function>> functions;  // by host stub
  std::unordered_map<const void*, Variable> variables;                   // by host shadow
};

Tables& tables() {
  static Tables* tables = new Tables;
  return *tables;
}

}  // namespace

std::shared_ptr<const Program> Module::program() {
  const std::lock_guard lock(mutex_);
  if (program_ == nullptr) program_ = Program::compile(ptx_of_fatbin(wrapper_));
  return program_;
}

Function* find_function(const void* symbol) {
  Tables& t = tables();
  const std::lock_guard lock(t.mutex);
  const auto found = t.functions.find(symbol);
  if (found != t.functions.end()) return found->second.get();
  for (const auto& [stub, function] : t.functions) {
    if (function.get() == symbol) return function.get();
  }
  return nullptr;
}

const ModuleVariable* find_variable(const void* symbol) {
  Variable variable{};
  {
    Tables& t = tables();
    const std::lock_guard lock(t.mutex);
    const auto found = t.variables.find(symbol);
    if (found == t.variables.end()) return nullptr;
    variable = found->second;
  }
  for (const auto& v : variable.module->program()->variables) {
    if (v->name == variable.name) return v.get();
  }
  return nullptr;
}

}  // namespace pagedkern::vgpu::runtime

namespace {
using pagedkern::vgpu::runtime::Function;
using pagedkern::vgpu::runtime::Module;
using pagedkern::vgpu::runtime::tables;

Module* module_of(void** handle) {
  return reinterpret_cast<Module*>(handle);
}
}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  return reinterpret_cast<void**>(new Module(wrapper));
}

void __cudaRegisterFatBinaryEnd(void**) {}

// The module stays: launches of static destructors still find it, and the process is about to end.
void __cudaUnregisterFatBinary(void**) {}

char __cudaInitModule(void**) {
  return 1;
}

void __cudaRegisterFunction(void** handle, const char* stub, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  auto& t = tables();
  const std::lock_guard lock(t.mutex);
  t.functions[stub] = std::make_unique<Function>(Function{module_of(handle), name, -1, false});
}

void __cudaRegisterVar(void** handle, char* shadow, char*, const char* name, int, size_t, int, int) {
  auto& t = tables();
  const std::lock_guard lock(t.mutex);
  t.variables[shadow] = {module_of(handle), name};
}

}  // extern "C"
