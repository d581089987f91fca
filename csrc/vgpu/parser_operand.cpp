// Operands: registers, literals, vectors, addresses.
#include "vgpu/parser.h"

namespace pagedkern::vgpu {

Operand OperandParser::operand(int depth) {
  if (depth > 4) fail("operand nested too deep", peek());
  Operand o;
  Token t = peek();
  if (accept('!')) {
    o = operand(depth + 1);
    o.negated = true;
  } else if (accept('{')) {
    o.kind = Operand::Kind::kVector;
    list(o, '}', depth);
  } else if (accept('(')) {
    o.kind = Operand::Kind::kList;
    list(o, ')', depth);
  } else if (accept('[')) {
    address(o, depth);
  } else if (t.kind == Token::Kind::kWord) {
    o.name = word();
    if (o.name == "_") o.kind = Operand::Kind::kSink;
    if (peek().is('+') || (peek().is('-') && o.kind == Operand::Kind::kName)) {  // symbol + offset
      bool minus = take().is('-');
      u64 v = integer();
      o.ivalue = minus ? 0 - v : v;
    }
  } else {
    number(o, t);
  }
  if (accept('|')) o.pair.push_back(operand(depth + 1));
  return o;
}

void OperandParser::number(Operand& o, const Token& first) {
  bool negative = accept('-');
  Token t = take();
  if (t.kind == Token::Kind::kInt) {
    o.kind = Operand::Kind::kInt;
    o.ivalue = negative ? 0 - t.ivalue : t.ivalue;
  } else if (t.kind == Token::Kind::kFloat) {
    o.kind = Operand::Kind::kFloat;
    o.fvalue = negative ? -t.fvalue : t.fvalue;
    o.float_bits = t.float_bits;
    o.ivalue = t.ivalue;
    if (negative) o.ivalue ^= t.float_bits == 32 ? 1ull << 31 : 1ull << 63;
  } else {
    fail("unexpected '" + shown(t) + "' in an operand", first);
  }
}

void OperandParser::list(Operand& o, char close, int depth) {
  while (!peek().is(close)) {
    o.elements.push_back(operand(depth + 1));
    if (!accept(',')) break;
  }
  expect(close);
}

// [base], [base+imm], [imm], [tensorMap, {coordinates}], [base], ...
void OperandParser::address(Operand& o, int depth) {
  o.kind = Operand::Kind::kAddress;
  if (peek().kind == Token::Kind::kWord) {
    o.name = word();
    while (peek().is('+') || peek().is('-')) {
      bool minus = take().is('-');
      u64 v = integer();
      o.ivalue += minus ? 0 - v : v;
    }
  } else {
    o.ivalue = integer();
  }
  while (accept(',')) o.elements.push_back(operand(depth + 1));
  expect(']');
}

}  // namespace pagedkern::vgpu
