// The parser's layers: operands of instructions, declarations of variables, and (in parser.cpp) everything around them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "vgpu/ast.h"
#include "vgpu/token_reader.h"

namespace pagedkern::vgpu {

constexpr u64 kMaxVariableBytes = 1ull << 30;
constexpr int kMaxNesting = 64;

u32 type_bytes(const std::string& type);  // 0: no type of PTX

class OperandParser : protected TokenReader {
 protected:
  using TokenReader::TokenReader;
  Operand operand(int depth);

 private:
  void number(Operand& o, const Token& first);
  void list(Operand& o, char close, int depth);
  void address(Operand& o, int depth);
};

class VariableParser : protected OperandParser {
 protected:
  using OperandParser::OperandParser;
  void variables(Variable::Where where, bool is_extern, std::map<std::string, Variable>& into);
  void variable_head(Variable& v);
  void dimensions(Variable& v);

 private:
  void initializer(Variable& v);
  void initializer_list(Variable& v, std::vector<u8>& data, int depth);
  u32 vector_ = 1;
};

}  // namespace pagedkern::vgpu
