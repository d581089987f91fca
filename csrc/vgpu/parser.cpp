// PTX text to ModuleText. Syntax errors stop at the first; unknown directives are collected and reported together.
#include "vgpu/parser.h"

#include <set>
#include <utility>

namespace pagedkern::vgpu {
namespace {

class Parser : VariableParser {
 public:
  explicit Parser(const std::string& text) : VariableParser(text) {
    size_t begin = 0;
    while (begin <= text.size()) {
      size_t end = text.find('\n', begin);
      if (end == std::string::npos) end = text.size();
      module_.lines.push_back(text.substr(begin, end - begin));
      begin = end + 1;
    }
  }

  ModuleText run() {
    while (peek().kind != Token::Kind::kEnd) module_item();
    if (module_.version.empty()) errors_ += "no .version directive\n";
    if (!errors_.empty()) throw ParseError(errors_);
    return std::move(module_);
  }

 private:
  void unknown(const Token& t) {
    errors_ += "PTX line " + std::to_string(t.line) + ": unsupported directive " + t.text + "\n";
  }

  void skip_statement() {  // to the end of an unknown directive
    int depth = 0;
    while (peek().kind != Token::Kind::kEnd) {
      if (depth == 0 && peek().is('}')) return;
      Token t = take();
      if (t.is('{')) ++depth;
      if (t.is('}') && --depth == 0) return;
      if (t.is(';') && depth == 0) return;
    }
  }

  void module_item() {
    Token t = take();
    if (t.kind != Token::Kind::kDirective) fail("unexpected '" + shown(t) + "' at module scope", t);
    if (t.is(".version")) {
      module_.version = take().text;
    } else if (t.is(".target")) {
      module_.target = take().text;
      while (accept(',')) word();
    } else if (t.is(".address_size")) {
      if (integer() != 64) fail("only 64-bit addresses are supported", t);
    } else if (t.is(".file")) {
      file_directive();
    } else if (t.is(".section")) {
      section();
    } else if (t.is(".pragma")) {
      take();
      expect(';');
    } else if (t.is(".loc")) {
      loc(t.line);
    } else {
      linked_item(t);
    }
  }

  void linked_item(Token t) {
    bool is_extern = false;
    static const std::set<std::string> linkage = {".visible", ".extern", ".weak", ".common"};
    while (linkage.count(t.text)) {
      is_extern |= t.is(".extern");
      t = take();
    }
    if (t.is(".entry") || t.is(".func")) {
      function(t.is(".entry"), is_extern, t.line);
    } else if (t.is(".global") || t.is(".const") || t.is(".shared")) {
      auto where = t.is(".global")  ? Variable::Where::kGlobal
                   : t.is(".const") ? Variable::Where::kConst
                                    : Variable::Where::kShared;
      variables(where, is_extern, module_.variables);
    } else {
      unknown(t);
      skip_statement();
    }
  }

  void file_directive() {
    u32 index = u32(integer());
    module_.files[index] = take().text;
    while (accept(',')) integer();
  }

  void section() {
    if (peek().kind == Token::Kind::kDirective || peek().kind == Token::Kind::kWord) take();
    expect('{');
    for (int depth = 1; depth > 0;) {
      Token t = take();
      if (t.kind == Token::Kind::kEnd) fail("section without end", t);
      depth += t.is('{') - t.is('}');
    }
  }

  void loc(u32 line) {
    current_loc_.file = u32(integer());
    current_loc_.line = u32(integer());
    integer();
    while (accept(',')) {
      Token t = take();
      if (t.is("function_name")) {
        word();
        if (accept('+')) integer();
      } else if (t.is("inlined_at")) {
        integer(), integer(), integer();
      } else {
        fail("unknown .loc attribute " + shown(t), t);
      }
    }
    (void)line;
  }

  std::vector<Variable> parameters() {
    std::vector<Variable> out;
    expect('(');
    while (!peek().is(')')) {
      Token t = take();
      Variable v;
      v.line = t.line;
      v.where = Variable::Where::kParam;
      if (!t.is(".param")) fail("only .param parameters are supported, got " + shown(t), t);
      variable_head(v);
      v.name = word();
      dimensions(v);
      out.push_back(v);
      if (!accept(',')) break;
    }
    expect(')');
    return out;
  }

  void function(bool is_entry, bool is_extern, u32 line) {
    FunctionText f;
    f.is_entry = is_entry;
    f.is_extern = is_extern;
    f.line = line;
    if (!is_entry && peek().is('(')) f.results = parameters();
    f.name = word();
    if (peek().is('(')) f.params = parameters();
    bool has_body = function_directives(f);
    if (has_body) {
      current_loc_ = {};
      f.scopes.emplace_back();
      expect('{');
      body(f, 0, 0);
    }
    f.is_extern = !has_body;
    auto [known, fresh] = function_index_.emplace(f.name, module_.functions.size());
    if (fresh) {
      module_.functions.push_back(std::move(f));
    } else if (has_body) {
      FunctionText& earlier = module_.functions[known->second];
      if (!earlier.is_extern) fail("'" + f.name + "' is defined twice", peek());
      earlier = std::move(f);
    }
  }

  Dim3 dims() {
    Dim3 d;
    d.x = u32(small_integer(1 << 20));
    if (accept(',')) d.y = u32(small_integer(1 << 20));
    if (accept(',')) d.z = u32(small_integer(1 << 20));
    return d;
  }

  // Performance directives between the header and the body; false for a declaration without body.
  bool function_directives(FunctionText& f) {
    for (;;) {
      Token t = peek();
      if (t.is('{')) return true;
      take();
      if (t.is(';')) return false;
      if (t.is(".maxntid")) {
        f.maxntid = dims();
      } else if (t.is(".reqntid")) {
        f.reqntid = dims();
      } else if (t.is(".reqnctapercluster")) {
        f.reqnctapercluster = dims();
      } else if (t.is(".minnctapersm") || t.is(".maxnctapersm")) {
        integer();
      } else if (t.is(".maxnreg")) {
        f.maxnreg = u32(integer());
      } else if (t.is(".maxclusterrank")) {
        f.max_cluster_rank = u32(integer());
      } else if (t.is(".explicitcluster")) {
        f.explicit_cluster = true;
      } else if (t.is(".noreturn") || t.is(".abi_preserve") || t.is(".blocksareclusters")) {
        if (t.is(".blocksareclusters")) unknown(t);
      } else if (t.is(".pragma")) {
        take();
        expect(';');
      } else {
        unknown(t);
        if (t.kind == Token::Kind::kEnd) fail("function without body", t);
      }
    }
  }

  void body(FunctionText& f, int scope, int depth) {
    if (depth > kMaxNesting) fail("blocks nested too deep", peek());
    while (!accept('}')) {
      Token t = peek();
      if (t.kind == Token::Kind::kEnd) fail("function without end", t);
      if (accept('{')) {
        f.scopes.emplace_back();
        f.scopes.back().parent = scope;
        body(f, int(f.scopes.size()) - 1, depth + 1);
      } else if (t.kind == Token::Kind::kDirective) {
        body_directive(f, scope);
      } else if (t.kind == Token::Kind::kWord && peek(1).is(':')) {
        label(f, scope);
      } else if (accept(';')) {
        continue;
      } else {
        instruction(f, scope);
      }
    }
  }

  void label(FunctionText& f, int scope) {
    Token t = peek();
    std::string name = word();
    expect(':');
    if (peek().is(".branchtargets")) {
      take();
      auto& list = f.scopes[scope].branch_targets[name];
      do list.push_back(word());
      while (accept(','));
      expect(';');
    } else if (peek().is(".callprototype") || peek().is(".calltargets")) {
      unknown(peek());
      skip_statement();
    } else if (!f.scopes[scope].labels.emplace(name, u32(f.body.size())).second) {
      fail("label '" + name + "' is defined twice", t);
    }
  }

  void body_directive(FunctionText& f, int scope) {
    Token t = take();
    if (t.is(".loc")) {
      loc(t.line);
    } else if (t.is(".reg")) {
      registers(f.scopes[scope]);
    } else if (t.is(".pragma")) {
      take();
      while (accept(',')) take();
      expect(';');
    } else if (t.is(".shared") || t.is(".local") || t.is(".param") || t.is(".const") || t.is(".global")) {
      auto where = t.is(".shared")  ? Variable::Where::kShared
                   : t.is(".local") ? Variable::Where::kLocal
                   : t.is(".const") ? Variable::Where::kConst
                   : t.is(".param") ? Variable::Where::kParam
                                    : Variable::Where::kGlobal;
      variables(where, false, f.scopes[scope].variables);
    } else {
      unknown(t);
      skip_statement();
    }
  }

  void registers(Scope& s) {
    Token t = take();
    RegType type = RegType::k32;
    if (t.is(".pred")) {
      type = RegType::kPred;
    } else {
      u32 bytes = type_bytes(t.text);
      if (bytes == 0) fail("unsupported register type " + shown(t), t);
      if (bytes == 1) fail("registers of type " + t.text + " are not supported", t);
      type = bytes == 2 ? RegType::k16 : bytes == 4 ? RegType::k32 : bytes == 8 ? RegType::k64 : RegType::k128;
    }
    do {
      std::string name = word();
      if (accept('<')) {
        s.ranges[name] = std::max(s.ranges[name], u32(small_integer(1 << 20)));
        expect('>');
        if (auto [it, fresh] = s.registers.emplace(name + "<", type); !fresh && it->second != type) {
          fail("register range '" + name + "' is declared twice", t);
        }
      } else if (!s.registers.emplace(name, type).second) {
        fail("register '" + name + "' is declared twice", t);
      }
    } while (accept(','));
    expect(';');
  }

  void instruction(FunctionText& f, int scope) {
    Instruction inst;
    inst.scope = scope;
    inst.source = current_loc_;
    if (accept('@')) {
      inst.guard_negated = accept('!');
      inst.guard = word();
    }
    Token t = peek();
    inst.line = t.line;
    std::string opcode = word();
    size_t dot = opcode.find('.');
    inst.root = opcode.substr(0, dot);
    inst.modifiers = dot == std::string::npos ? "" : opcode.substr(dot);
    if (inst.root[0] == '%') fail("unexpected '" + opcode + "'", t);
    if (!peek().is(';')) {
      do inst.operands.push_back(operand(0));
      while (accept(','));
    }
    expect(';');
    f.body.push_back(std::move(inst));
  }

  ModuleText module_;
  std::map<std::string, size_t> function_index_;  // in module_.functions
  std::string errors_;
  SourceLine current_loc_;
};

}  // namespace

ModuleText parse_ptx(const std::string& text) {
  return Parser(text).run();
}

}  // namespace pagedkern::vgpu
