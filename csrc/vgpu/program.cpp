#include "vgpu/program.h"

#include <cstring>

#include "vgpu/builder.h"
#include "vgpu/fault.h"

namespace pagedkern::vgpu {
namespace {

constexpr u64 kRedZone = 256;
constexpr u64 kMaxModuleBytes = 1ull << 30;  // of all .global and .const variables

void place_variables(const ModuleText& text, Program& program) {
  u64 total = 0;
  for (const auto& [name, v] : text.variables) {
    if (v.where == Variable::Where::kShared || v.is_extern) continue;
    total += v.bytes + v.align;
    if (total > kMaxModuleBytes) {
      throw ParseError("PTX line " + std::to_string(v.line) + ": the module's variables are larger than " +
                       std::to_string(kMaxModuleBytes) + " bytes");
    }
    auto m = std::make_unique<ModuleVariable>();
    m->name = name;
    m->is_const = v.where == Variable::Where::kConst;
    m->bytes = v.bytes;
    u64 align = std::max<u64>(v.align, 256);
    m->storage.assign(v.bytes + 2 * kRedZone + align, 0);
    u64 at = (reinterpret_cast<u64>(m->storage.data()) + kRedZone + align - 1) / align * align;
    m->data = reinterpret_cast<u8*>(at);
    if (!v.data.empty()) std::memcpy(m->data, v.data.data(), v.data.size());
    program.variables.push_back(std::move(m));
  }
  for (const auto& [name, v] : text.variables) {
    for (const auto& [offset, symbol] : v.relocations) {
      ModuleVariable *from = nullptr, *to = nullptr;
      for (auto& m : program.variables) {
        if (m->name == name) from = m.get();
        if (m->name == symbol) to = m.get();
      }
      if (!from || !to)
        throw ParseError("PTX line " + std::to_string(v.line) + ": initializer of '" + name + "' names '" + symbol +
                         "', which has no memory");
      u64 addend;
      std::memcpy(&addend, from->data + offset, 8);
      addend += reinterpret_cast<u64>(to->data);
      std::memcpy(from->data + offset, &addend, 8);
    }
  }
}

}  // namespace

std::shared_ptr<Program> Program::compile(const std::string& ptx) {
  ModuleText text = parse_ptx(ptx);
  auto program = std::make_shared<Program>();
  program->lines = text.lines;
  program->files = text.files;
  place_variables(text, *program);
  std::vector<std::string> errors;
  for (const auto& f : text.functions) {
    if (!f.is_entry || f.is_extern) continue;
    auto kernel = KernelBuilder(text, *program, f).build(errors);
    if (kernel) program->kernels.push_back(std::move(kernel));
  }
  if (!errors.empty()) {
    std::string all;
    for (const auto& e : errors) all += e + "\n";
    all.pop_back();
    throw ParseError(all);
  }
  return program;
}

const Kernel& Program::kernel(const std::string& name) const {
  std::string names;
  for (const auto& k : kernels) {
    if (k->name == name) return *k;
    names += (names.empty() ? "" : ", ") + k->name;
  }
  throw LaunchError("no kernel named '" + name + "'; the module has: " + (names.empty() ? "none" : names));
}

std::string Program::source_of(const Location& where) const {
  auto it = files.find(where.source.file);
  return it == files.end() ? "" : it->second + ":" + std::to_string(where.source.line);
}

std::string Program::text_of(u32 line) const {
  if (line == 0 || line > lines.size()) return "";
  const std::string& text = lines[line - 1];
  size_t begin = text.find_first_not_of(" \t");
  size_t end = text.find_last_not_of(" \t\r");
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

}  // namespace pagedkern::vgpu
