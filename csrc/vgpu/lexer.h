// Tokens of PTX text.
#pragma once

#include <string>
#include <vector>

#include "vgpu/types.h"

namespace pagedkern::vgpu {

struct Token {
  enum class Kind : u8 { kWord, kDirective, kInt, kFloat, kString, kPunct, kEnd };
  Kind kind = Kind::kEnd;
  u32 line = 0;
  std::string text;  // words with their dots ("ld.global.u32", "%tid.x"), directives with the leading dot
  u64 ivalue = 0;
  double fvalue = 0;
  u8 float_bits = 0;
  bool is(char c) const { return kind == Kind::kPunct && text[0] == c; }
  bool is(const char* s) const { return kind != Kind::kString && text == s; }
};

std::vector<Token> tokenize(const std::string& text);

}  // namespace pagedkern::vgpu
