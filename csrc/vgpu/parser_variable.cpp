// Declarations of variables with their initial values.
#include <bit>
#include <cstring>
#include <utility>

#include "vgpu/parser.h"

namespace pagedkern::vgpu {

u32 type_bytes(const std::string& type) {
  static const std::map<std::string, u32> sizes = {
      {".b8", 1},   {".u8", 1},  {".s8", 1},    {".b16", 2},   {".u16", 2},   {".s16", 2}, {".f16", 2},
      {".bf16", 2}, {".b32", 4}, {".u32", 4},   {".s32", 4},   {".f32", 4},   {".b64", 8}, {".u64", 8},
      {".s64", 8},  {".f64", 8}, {".b128", 16}, {".f16x2", 4}, {".bf16x2", 4}};
  auto it = sizes.find(type);
  return it == sizes.end() ? 0 : it->second;
}

// After the state space: [.align N] .type name[dims] [= init] {, name ...} ;
void VariableParser::variables(Variable::Where where, bool is_extern, std::map<std::string, Variable>& into) {
  Variable base;
  base.where = where;
  base.is_extern = is_extern;
  variable_head(base);
  do {
    Variable v = base;
    v.line = peek().line;
    v.name = word();
    dimensions(v);
    if (accept('=')) initializer(v);
    if (!into.emplace(v.name, v).second && !is_extern) fail("'" + v.name + "' is declared twice", peek());
  } while (accept(','));
  expect(';');
}

void VariableParser::variable_head(Variable& v) {
  bool aligned = false, typed = false;
  while (!typed || peek().is(".ptr") || peek().is(".align")) {
    Token t = take();
    if (t.is(".align")) {
      v.align = u32(small_integer(1 << 20));
      if (v.align == 0 || (v.align & (v.align - 1))) fail("alignment is not a power of two", t);
      aligned = true;
    } else if (t.is(".ptr")) {
      v.is_pointer_param = true;
      if (peek().is(".global") || peek().is(".shared") || peek().is(".const") || peek().is(".local") ||
          peek().is(".param"))
        take();
      if (accept(".align")) integer();
    } else if (t.is(".v2") || t.is(".v4")) {
      vector_ = t.is(".v2") ? 2 : 4;
    } else if (u32 bytes = type_bytes(t.text)) {
      v.element_bytes = bytes * std::exchange(vector_, 1);
      if (!aligned) v.align = v.element_bytes;
      typed = true;
    } else {
      fail("unsupported " + shown(t) + " in a variable declaration", t);
    }
  }
}

void VariableParser::dimensions(Variable& v) {
  u64 count = 1;
  bool unsized = false;
  while (accept('[')) {
    v.is_array = true;
    if (accept(']')) {
      unsized = true;
      continue;
    }
    count *= small_integer(kMaxVariableBytes);
    if (count > kMaxVariableBytes) fail("'" + v.name + "' is too large", peek());
    expect(']');
  }
  v.bytes = unsized ? 0 : count * v.element_bytes;
  if (v.bytes > kMaxVariableBytes) fail("'" + v.name + "' is too large", peek());
}

void VariableParser::initializer(Variable& v) {
  std::vector<u8> data;
  initializer_list(v, data, 0);
  if (v.bytes == 0) v.bytes = data.size();
  if (data.size() > v.bytes) fail("too many initial values for '" + v.name + "'", peek());
  data.resize(v.bytes);
  v.data = std::move(data);
}

void VariableParser::initializer_list(Variable& v, std::vector<u8>& data, int depth) {
  if (depth > kMaxNesting) fail("initializer nested too deep", peek());
  if (accept('{')) {
    while (!peek().is('}')) {
      initializer_list(v, data, depth + 1);
      if (!accept(',')) break;
    }
    expect('}');
    return;
  }
  size_t at = data.size();
  data.resize(at + v.element_bytes);
  Token t = peek();
  u64 bits = 0;
  if (t.kind == Token::Kind::kWord) {
    std::string symbol = word();
    if (symbol == "generic") {
      expect('(');
      symbol = word();
      expect(')');
    }
    if (v.element_bytes != 8) fail("an address needs 64-bit elements", t);
    if (accept('+')) bits = integer();
    v.relocations.emplace_back(at, symbol);
  } else {
    bool negative = accept('-');
    Token n = take();
    if (n.kind == Token::Kind::kInt) {
      bits = negative ? 0 - n.ivalue : n.ivalue;
    } else if (n.kind == Token::Kind::kFloat) {
      double value = negative ? -n.fvalue : n.fvalue;
      bits = v.element_bytes == 4 ? std::bit_cast<u32>(float(value)) : std::bit_cast<u64>(value);
      if (v.element_bytes < 4) fail("a float initializer needs 32 or 64 bits", n);
    } else {
      fail("unsupported initializer '" + shown(n) + "'", n);
    }
  }
  std::memcpy(data.data() + at, &bits, std::min<size_t>(v.element_bytes, 8));
}

}  // namespace pagedkern::vgpu
