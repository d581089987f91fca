// Decodes one kernel with the functions it calls: names to register slots, addresses and program counters.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "vgpu/ast.h"
#include "vgpu/decode.h"
#include "vgpu/program.h"

namespace pagedkern::vgpu {

struct RegisterInfo {
  std::string name;
  int bits = 0;
  u32 offset = 0;
  u32 function = 0;
  bool tracked = false;
  bool async = false;
  u32 track = 0;
};

// What the flow analysis needs to know of an instruction.
struct InstFlow {
  std::vector<u32> reads, writes;   // register ids
  std::vector<u32> partial_writes;  // written, but not by every executing lane
  std::vector<u32> targets;         // pcs, once resolved
  bool falls_through = true;
  bool ignore_pending = false;
  u32 function = 0;
};

class DecodeReject : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline u32 align_up(u32 v, u32 a) {
  return (v + a - 1) / a * a;
}

class KernelBuilder {
 public:
  KernelBuilder(const ModuleText& text, Program& program, const FunctionText& entry)
      : text_(text), program_(program), entry_(entry) {}
  std::unique_ptr<Kernel> build(std::vector<std::string>& errors);

 private:
  friend class DecodeContext;
  struct Frame {  // one function
    const FunctionText* text = nullptr;
    std::map<std::pair<int, std::string>, u32> registers;  // scope, name -> id
    std::map<std::pair<int, std::string>, u32> locals;     // scope, name -> local address; scope -1: parameters
    std::map<u32, u32> pc_of_body;                         // body index -> pc
    u32 entry_label = 0;
    OperandRef return_pc = kNoOperand;
  };
  struct Label {
    u32 frame, body_index;
  };

  bool order_functions(const FunctionText& f, std::set<std::string>& open, std::vector<std::string>& errors);
  const FunctionText* find_function(const std::string& name) const;
  [[noreturn]] void refuse(const std::string& why) const;
  void lay_out_params();
  void lay_out_shared();
  void lay_out_locals(Frame& frame);
  void place_shared(const Variable& v, const std::string& key);
  void decode_function(u32 frame_index, std::vector<std::string>& errors);
  void decode_instruction(const Instruction& inst, std::vector<std::string>& errors);
  void decode_guard(DecodeContext& ctx, const Instruction& inst);
  u32 emit(const Instruction& inst, const Form& form);
  void resolve_branches();
  void analyse_registers();  // flow.cpp
  void finish();

  // Lookup in the current frame from the current scope outward.
  bool find_register(const std::string& name, u32* id);
  u32 register_slot(int bits);
  const Variable* find_variable(const std::string& name, int* scope) const;
  bool symbol_address(const std::string& name, u64* address, Space* space);
  OperandRef special_register(const std::string& name);
  OperandRef constant(u64 bits, int width);
  u32 new_label(u32 frame, u32 body_index);

  const ModuleText& text_;
  Program& program_;
  const FunctionText& entry_;
  std::unique_ptr<Kernel> kernel_;
  std::vector<Frame> frames_;  // callees first
  std::map<std::string, u32> frame_of_;
  std::map<std::string, u32> shared_address_;  // variable name (module scope or "frame/scope/name")
  std::map<std::string, u32> param_offset_;
  std::map<SpecialRegister, u32> special_slots_;
  std::map<std::pair<u64, int>, OperandRef> constants_;
  std::vector<u8> const_bytes_;
  std::vector<RegisterInfo> registers_;
  std::vector<InstFlow> flow_;  // by pc
  std::vector<Label> labels_;
  std::vector<std::pair<u32, u32>> branch_fixups_;      // pc, label id
  std::vector<std::pair<u32, u32>> pool_fixups_;        // pool index, label id
  std::map<std::string, std::pair<u32, u32>> unknown_;  // opcode -> first line, count
  u32 register_bytes_ = 0, predicate_left_ = 0, predicate_next_ = 0;
  u32 local_bytes_ = 0;
  u32 current_frame_ = 0;
  int current_scope_ = 0;
  u32 scratch_[4] = {0, 0, 0, 0};  // slot + 1
  u32 carry_ = 0;                  // slot + 1
};

}  // namespace pagedkern::vgpu
