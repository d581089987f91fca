// What the parser hands to the decoder: names still unresolved, everything else in place.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "vgpu/types.h"

namespace pagedkern::vgpu {

struct Operand {
  enum class Kind : u8 { kName, kInt, kFloat, kAddress, kVector, kSink, kList };
  Kind kind = Kind::kName;
  bool negated = false;           // !%p
  std::string name;               // kName; kAddress: its base ("" where the base is a number)
  u64 ivalue = 0;                 // kInt, kAddress: the offset; kFloat: the bits of 0f.. and 0d..
  double fvalue = 0;              // kFloat
  u8 float_bits = 0;              // kFloat: 32 for 0f, 64 for 0d, 0 for a decimal
  std::vector<Operand> elements;  // kVector { }, kList ( )
  std::vector<Operand> pair;      // d|p: the part after the bar
};

struct SourceLine {
  u32 file = 0, line = 0;
};

struct Instruction {
  std::string root;       // "ld"
  std::string modifiers;  // ".global.v4.f32"
  std::vector<Operand> operands;
  std::string guard;  // predicate name, empty without
  bool guard_negated = false;
  u32 line = 0;
  SourceLine source;
  int scope = 0;
  std::string form() const { return root + modifiers; }
};

enum class RegType : u8 { kPred, k16, k32, k64, k128 };

struct Variable {
  enum class Where : u8 { kGlobal, kConst, kShared, kLocal, kParam };
  Where where = Where::kGlobal;
  std::string name;
  u32 align = 1;
  u32 element_bytes = 1;
  u64 bytes = 0;
  bool is_extern = false;  // extern .shared: dynamic shared memory
  bool is_array = false;
  bool is_pointer_param = false;
  std::vector<u8> data;                                  // initial bytes, empty: zero
  std::vector<std::pair<u64, std::string>> relocations;  // offset in data -> symbol whose generic address goes there
  u32 line = 0;
};

struct Scope {
  int parent = -1;
  std::map<std::string, RegType> registers;
  std::map<std::string, u32> ranges;  // "%r" -> 99 of .reg .b32 %r<99>, type in registers under the same prefix
  std::map<std::string, Variable> variables;
  std::map<std::string, u32> labels;  // -> index of the instruction after it
  std::map<std::string, std::vector<std::string>> branch_targets;
};

struct FunctionText {
  std::string name;
  bool is_entry = false;
  bool is_extern = false;
  u32 line = 0;
  std::vector<Variable> params;
  std::vector<Variable> results;
  std::vector<Instruction> body;
  std::vector<Scope> scopes;  // [0] is the body
  Dim3 reqntid{0, 0, 0}, maxntid{0, 0, 0}, reqnctapercluster{0, 0, 0};
  u32 max_cluster_rank = 0;
  bool explicit_cluster = false;
  u32 maxnreg = 0;
};

struct ModuleText {
  std::string version, target;
  std::map<u32, std::string> files;
  std::map<std::string, Variable> variables;  // module scope .global .const .shared
  std::vector<FunctionText> functions;
  std::vector<std::string> lines;
};

ModuleText parse_ptx(const std::string& text);

}  // namespace pagedkern::vgpu
