// The decoded form of a kernel: what the warp executor runs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "vgpu/ast.h"
#include "vgpu/export.h"
#include "vgpu/types.h"

namespace pagedkern::vgpu {

class Warp;
struct Inst;
struct Form;

// Executes one instruction for the lanes of `mask` (never 0). The program counter is already past it.
using Handler = void (*)(Warp& warp, const Inst& inst, u32 mask);

// Operands are byte offsets of lane arrays in the warp's register file, or ~offset in the kernel's constant pool
// (immediates, one array of 32 equal lanes each). 16-bit registers are u16[32], 32-bit u32[32], 64-bit u64[32],
// predicates one u32 mask.
using OperandRef = i32;
constexpr OperandRef kNoOperand = INT32_MIN;

enum Special : u8 {
  kGuarded = 1,   // guard / guard_negated
  kChecked = 2,   // entry in Kernel::checks: registers that may be unwritten or owned by an async operation
  kTracking = 4,  // entry in Kernel::checks: registers whose tracking state must be updated afterwards
};

struct alignas(64) Inst {
  Handler fn = nullptr;
  OperandRef op[6] = {kNoOperand, kNoOperand, kNoOperand, kNoOperand, kNoOperand, kNoOperand};
  u64 imm = 0;    // for the family's use
  u32 aux = 0;    // for the family's use
  u32 ext = 0;    // index in Kernel::pool (more operands) or a branch target
  u32 guard = 0;  // byte offset of the guard predicate
  u32 form = 0;   // index in Registry::forms()
  u8 special = 0;
  u8 guard_negated = 0;
  u8 negate = 0;  // bit k: source predicate op[k] is negated (families that read predicates)
  u8 reserved = 0;
};
static_assert(sizeof(Inst) == 64);

struct Location {
  u32 line = 0;
  SourceLine source;
};

// Tracked registers carry this behind the register file: which lanes were written, which are the destination of an
// unfinished asynchronous operation (reading or writing them is a fault), which are its source (writing is).
struct TrackState {
  u32 written = 0;
  u32 pending_write = 0;
  u32 pending_read = 0;
  u32 unfenced = 0;  // written by other instructions than wgmma since the last wgmma.fence
};

struct RegisterCheck {
  u32 track = 0;  // byte offset of the TrackState in the register file
  u32 name = 0;   // index in Kernel::register_names
  u32 slot = 0;   // byte offset of the register itself
};

struct CheckList {
  std::vector<RegisterCheck> reads, writes;
  bool ignore_pending = false;  // wgmma chains its own accumulators
};

enum class SpecialRegister : u8 {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kLaneid,
  kWarpid,
  kNwarpid,
  kSmid,
  kNsmid,
  kGridid,
  kClusteridX,
  kClusteridY,
  kClusteridZ,
  kNclusteridX,
  kNclusteridY,
  kNclusteridZ,
  kClusterCtaidX,
  kClusterCtaidY,
  kClusterCtaidZ,
  kClusterNctaidX,
  kClusterNctaidY,
  kClusterNctaidZ,
  kClusterCtarank,
  kClusterNctarank,
  kIsExplicitCluster,
  kLanemaskEq,
  kLanemaskLe,
  kLanemaskLt,
  kLanemaskGe,
  kLanemaskGt,
  kDynamicSmemSize,
  kTotalSmemSize,
  kReservedSmemOffset,
  kCount
};

struct ParamSlot {
  std::string name;
  u32 offset = 0, bytes = 0, align = 1;
};

struct Kernel {
  std::string name;
  std::vector<Inst> code;
  std::vector<Location> where;   // by pc
  std::vector<i32> pool;         // extra operands, owned ranges by Inst::ext
  std::vector<u64> const_words;  // the constant pool; 64-byte aligned through const_base()
  u32 register_bytes = 0;        // register file with tracking states
  u32 track_begin = 0;           // TrackStates start here
  std::vector<std::pair<SpecialRegister, u32>> special_registers;  // those the kernel reads, and their slots
  std::vector<CheckList> checks;                                   // [0] unused
  std::vector<u32> check_of;                                       // pc -> index in checks
  std::vector<std::string> register_names;
  std::vector<ParamSlot> params;
  u32 param_bytes = 0;
  u32 shared_static_bytes = 0;    // from kSharedBase
  u32 shared_dynamic_offset = 0;  // where extern shared memory starts (absolute shared address)
  u32 local_bytes = 0;            // per thread, from kLocalBase
  u32 entry_pc = 0;
  u32 maxnreg = 0;
  Dim3 reqntid{0, 0, 0}, maxntid{0, 0, 0}, reqnctapercluster{0, 0, 0};
  u32 max_cluster_rank = 0;
  bool has_async = false;  // any instruction that issues asynchronous operations
  const class Program* program = nullptr;

  const u8* const_base() const {
    return reinterpret_cast<const u8*>((reinterpret_cast<uintptr_t>(const_words.data()) + 63) & ~uintptr_t(63));
  }
};

// Memory of a module-level .global or .const variable.
struct ModuleVariable {
  std::string name;
  bool is_const = false;
  std::vector<u8> storage;  // with red zones around
  u8* data = nullptr;
  u64 bytes = 0;
};

class PAGEDKERN_VGPU_API Program {
 public:
  static std::shared_ptr<Program> compile(const std::string& ptx);
  const Kernel& kernel(const std::string& name) const;  // throws LaunchError naming what there is
  std::vector<std::unique_ptr<Kernel>> kernels;
  std::vector<std::unique_ptr<ModuleVariable>> variables;
  std::vector<std::string> lines;
  std::map<u32, std::string> files;
  std::string source_of(const Location& where) const;
  std::string text_of(u32 line) const;
};

}  // namespace pagedkern::vgpu
