// Reading a token list: what every part of the parser is made of.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "vgpu/fault.h"
#include "vgpu/lexer.h"

namespace pagedkern::vgpu {

class TokenReader {
 protected:
  explicit TokenReader(const std::string& text) : tokens_(tokenize(text)) {}

  const Token& peek(size_t k = 0) const { return tokens_[std::min(pos_ + k, tokens_.size() - 1)]; }
  Token take() {
    Token t = peek();
    if (pos_ < tokens_.size() - 1) ++pos_;
    return t;
  }
  bool accept(char c) {
    if (!peek().is(c)) return false;
    take();
    return true;
  }
  bool accept(const char* s) {
    if (!peek().is(s)) return false;
    take();
    return true;
  }
  [[noreturn]] void fail(const std::string& what, const Token& t) const {
    throw ParseError("PTX line " + std::to_string(t.line) + ": " + what);
  }
  void expect(char c) {
    if (!accept(c)) fail(std::string("expected '") + c + "', got '" + shown(peek()) + "'", peek());
  }
  static std::string shown(const Token& t) { return t.kind == Token::Kind::kEnd ? "end of text" : t.text; }
  std::string word() {
    if (peek().kind != Token::Kind::kWord) fail("expected a name, got '" + shown(peek()) + "'", peek());
    return take().text;
  }
  u64 integer() {
    bool negative = accept('-');
    if (peek().kind != Token::Kind::kInt) fail("expected an integer, got '" + shown(peek()) + "'", peek());
    u64 v = take().ivalue;
    return negative ? 0 - v : v;
  }
  u64 small_integer(u64 most) {
    Token t = peek();
    u64 v = integer();
    if (v > most) fail("number out of range", t);
    return v;
  }

 private:
  std::vector<Token> tokens_;
  size_t pos_ = 0;
};

}  // namespace pagedkern::vgpu
