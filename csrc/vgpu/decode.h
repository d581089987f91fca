// What a family's decode function works with: one instruction's text on one side, its compact form on the other.
#pragma once

#include <string>

#include "vgpu/program.h"
#include "vgpu/registry.h"

namespace pagedkern::vgpu {

class KernelBuilder;

// How an immediate operand becomes bits.
enum class Imm : u8 { kNone, kInteger, kFloat16, kFloat32, kFloat64 };

// What an address operand [ ... ] resolved to: base register + offset, or the offset alone.
struct Address {
  OperandRef base = kNoOperand;  // kNoOperand: `offset` is the whole address
  bool wide = true;              // base is a 64-bit register
  i64 offset = 0;
  Space symbol = Space::kGeneric;  // the space of the symbol it names; kParam: kernel parameters, kLocal also for
                                   // .param variables of calls; kGeneric: no symbol
};

// A device function to call: where its frame lies in local memory (absolute local addresses).
struct CallTarget {
  u32 label = 0;                                     // for branches_to()
  OperandRef return_pc = kNoOperand;                 // u32 lanes
  std::vector<std::pair<u32, u32>> params, results;  // local address, bytes
};

class DecodeContext {
 public:
  DecodeContext(KernelBuilder& builder, const Instruction& inst) : builder_(builder), inst_(inst) {}

  const Instruction& inst() const { return inst_; }
  Inst& out();
  KernelBuilder& builder() { return builder_; }
  size_t count() const { return inst_.operands.size(); }
  const Operand& operand(size_t k) const { return inst_.operands[k]; }

  // Throws; the module's other instructions are still looked at, and all reasons are reported together.
  [[noreturn]] void reject(const std::string& reason) const;
  void require(bool ok, const char* reason) const {
    if (!ok) reject(reason);
  }

  // Registers. `bits` 1 (predicate), 16, 32, 64. dst() and src() record the access for the definite-assignment
  // analysis.
  int register_bits(const Operand& o) const;                         // 0: not a register
  OperandRef dst(const Operand& o, int bits, bool partial = false);  // a sink "_" gives a scratch array
  OperandRef src(const Operand& o, int bits,
                 Imm imm = Imm::kInteger);               // register, immediate, or symbol address (32 or 64 bits)
  OperandRef src_pred(const Operand& o, bool* negated);  // predicate register or 0/1
  OperandRef scratch(int bits);
  OperandRef carry();  // the carry flag of add.cc and friends: a mask
  OperandRef constant(u64 bits, int width);
  Address address(const Operand& o);                        // [reg+imm], [sym+imm], [imm]
  bool constant_value(const Operand& o, u64* value) const;  // an integer literal

  u32 label(const std::string& name) const;  // label id
  void branches_to(u32 label_id);            // out().ext becomes the label's pc
  const std::vector<std::string>* branch_targets(const std::string& name) const;
  void falls_through(bool yes);                                      // default true
  void pool_branches(u32 index, const std::vector<u32>& label_ids);  // fills pool entries with their pcs later
  CallTarget call_target(const std::string& function);
  std::pair<u32, u32> local_param(const Operand& o);  // a .param variable of the body: local address, bytes
  u32 param_bytes() const;                            // of the kernel
  OperandRef return_pc() const;                       // of the function being decoded; kNoOperand in a kernel
  Inst& append(Handler handler);                      // one more instruction after this one; invalidates out()
  u32 pool(const std::vector<i32>& values);           // -> index for out().ext
  // The operand's register belongs to an asynchronous operation at times (wgmma): accesses to it are checked.
  void mark_async(const Operand& o);
  void ignore_pending();  // this instruction may touch registers its own chain owns
  void has_async();

 private:
  KernelBuilder& builder_;
  const Instruction& inst_;
};

// Generic decoding by Form::signature, one character per operand: upper case destination, lower case source.
//   P/p predicate, H/h 16 bit, W/w 32 bit, X/x 64 bit (integer immediates), e/f/g float immediates of 16, 32, 64 bit.
//   "D|P": operand with a bar, e.g. shfl "W|P" -> op[0], op[1]; the bar part may be missing (scratch is used).
//   '?' before a character: operand may be missing (kNoOperand stays).
// Operands land in out.op[] in order; negated source predicates set out.negate.
void decode_signature(DecodeContext& ctx, const Form& form);

}  // namespace pagedkern::vgpu
