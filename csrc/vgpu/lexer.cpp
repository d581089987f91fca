#include "vgpu/lexer.h"

#include <bit>
#include <cctype>
#include <cstdlib>

#include "vgpu/fault.h"

namespace pagedkern::vgpu {
namespace {

bool word_start(char c) {
  return std::isalpha(u8(c)) || c == '_' || c == '$' || c == '%';
}
bool word_char(char c) {
  return std::isalnum(u8(c)) || c == '_' || c == '$';
}

class Lexer {
 public:
  explicit Lexer(const std::string& text) : text_(text) {}

  std::vector<Token> run() {
    std::vector<Token> out;
    while (skip_blank()) out.push_back(next());
    Token end;
    end.line = line_;
    out.push_back(end);
    return out;
  }

 private:
  char at(size_t k) const { return pos_ + k < text_.size() ? text_[pos_ + k] : '\0'; }

  [[noreturn]] void fail(const std::string& what) const {
    throw ParseError("PTX line " + std::to_string(line_) + ": " + what);
  }

  bool skip_blank() {
    while (pos_ < text_.size()) {
      char c = text_[pos_];
      if (c == '\n') {
        ++line_;
        ++pos_;
      } else if (std::isspace(u8(c)) || c == '\0') {
        ++pos_;
      } else if (c == '/' && at(1) == '/') {
        while (pos_ < text_.size() && text_[pos_] != '\n') ++pos_;
      } else if (c == '/' && at(1) == '*') {
        size_t end = text_.find("*/", pos_ + 2);
        if (end == std::string::npos) fail("comment without end");
        for (; pos_ < end + 2; ++pos_) line_ += text_[pos_] == '\n';
      } else if (c == '#') {  // preprocessor line markers
        while (pos_ < text_.size() && text_[pos_] != '\n') ++pos_;
      } else {
        return true;
      }
    }
    return false;
  }

  // Letters, digits and _ $, with inner dots and double colons: "ld.shared::cta.v4.b32", "%tid.x".
  std::string word() {
    size_t begin = pos_++;
    while (pos_ < text_.size()) {
      if (word_char(text_[pos_])) {
        ++pos_;
      } else if (text_[pos_] == '.' && word_char(at(1))) {
        ++pos_;
      } else if (text_[pos_] == ':' && at(1) == ':' && word_char(at(2))) {
        pos_ += 2;
      } else {
        break;
      }
    }
    return text_.substr(begin, pos_ - begin);
  }

  Token next() {
    Token t;
    t.line = line_;
    char c = text_[pos_];
    if (word_start(c)) {
      t.kind = Token::Kind::kWord;
      t.text = word();
    } else if (c == '.' && word_start(at(1))) {
      t.kind = Token::Kind::kDirective;
      size_t begin = pos_++;
      while (word_char(at(0)) || (at(0) == ':' && at(1) == ':')) pos_ += at(0) == ':' ? 2 : 1;
      t.text = text_.substr(begin, pos_ - begin);
    } else if (std::isdigit(u8(c)) || (c == '.' && std::isdigit(u8(at(1))))) {
      number(t);
    } else if (c == '"') {
      string(t);
    } else if (u8(c) < ' ' || u8(c) > '~') {
      fail("unexpected byte " + std::to_string(u8(c)));
    } else {
      t.kind = Token::Kind::kPunct;
      t.text = std::string(1, c);
      ++pos_;
    }
    return t;
  }

  void string(Token& t) {
    t.kind = Token::Kind::kString;
    size_t end = pos_ + 1;
    while (end < text_.size() && text_[end] != '"') {
      if (text_[end] == '\n') fail("string without end");
      end += text_[end] == '\\' ? 2 : 1;
    }
    if (end >= text_.size()) fail("string without end");
    t.text = text_.substr(pos_ + 1, end - pos_ - 1);
    pos_ = end + 1;
  }

  u64 hex_digits(int most) {
    u64 value = 0;
    int count = 0;
    for (; std::isxdigit(u8(at(0))); ++pos_, ++count) {
      char c = char(std::tolower(at(0)));
      value = value << 4 | u64(c <= '9' ? c - '0' : c - 'a' + 10);
    }
    if (count == 0 || count > most) fail("bad hexadecimal literal");
    return value;
  }

  void number(Token& t) {
    size_t begin = pos_;
    char second = char(std::tolower(at(1)));
    if (text_[pos_] == '0' && (second == 'f' || second == 'd') && std::isxdigit(u8(at(2)))) {
      t.kind = Token::Kind::kFloat;
      pos_ += 2;
      t.float_bits = second == 'f' ? 32 : 64;
      t.ivalue = hex_digits(second == 'f' ? 8 : 16);
      if (t.float_bits == 32) {
        t.fvalue = std::bit_cast<float>(u32(t.ivalue));
      } else {
        t.fvalue = std::bit_cast<double>(t.ivalue);
      }
    } else if (text_[pos_] == '0' && second == 'x') {
      t.kind = Token::Kind::kInt;
      pos_ += 2;
      t.ivalue = hex_digits(16);
      if (at(0) == 'U') ++pos_;
    } else if (text_[pos_] == '0' && second == 'b' && (at(2) == '0' || at(2) == '1')) {
      t.kind = Token::Kind::kInt;
      for (pos_ += 2; at(0) == '0' || at(0) == '1'; ++pos_) t.ivalue = t.ivalue << 1 | u64(at(0) - '0');
    } else {
      decimal(t);
    }
    t.text = text_.substr(begin, pos_ - begin);
  }

  void decimal(Token& t) {
    size_t end = pos_;
    bool real = false;
    while (end < text_.size() && std::isdigit(u8(text_[end]))) ++end;
    if (end < text_.size() && text_[end] == '.') {
      real = true;
      for (++end; end < text_.size() && std::isdigit(u8(text_[end]));) ++end;
    }
    if (end < text_.size() && (text_[end] == 'e' || text_[end] == 'E')) {
      size_t e = end + 1;
      if (e < text_.size() && (text_[e] == '+' || text_[e] == '-')) ++e;
      if (e < text_.size() && std::isdigit(u8(text_[e]))) {
        real = true;
        while (e < text_.size() && std::isdigit(u8(text_[e]))) ++e;
        end = e;
      }
    }
    std::string digits = text_.substr(pos_, end - pos_);
    pos_ = end;
    if (real) {
      t.kind = Token::Kind::kFloat;
      t.fvalue = std::strtod(digits.c_str(), nullptr);
      t.ivalue = std::bit_cast<u64>(t.fvalue);
    } else {
      t.kind = Token::Kind::kInt;
      bool octal = digits.size() > 1 && digits[0] == '0';
      t.ivalue = std::strtoull(digits.c_str(), nullptr, octal ? 8 : 10);
      if (at(0) == 'U') ++pos_;
    }
  }

  const std::string& text_;
  size_t pos_ = 0;
  u32 line_ = 1;
};

}  // namespace

std::vector<Token> tokenize(const std::string& text) {
  return Lexer(text).run();
}

}  // namespace pagedkern::vgpu
