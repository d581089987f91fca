// The one table of instruction forms. A form is the whole opcode with its modifiers ("add.rn.ftz.f32"); what is not in
// the table is refused at parse. Each family file adds its forms in register_<family>() (listed in families.inc).
#pragma once

#include <deque>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "vgpu/export.h"
#include "vgpu/program.h"

namespace pagedkern::vgpu {

class DecodeContext;

enum class InstClass : u8 {
  kInteger,
  kLogic,
  kFloat,
  kHalf,
  kDouble,
  kSpecialFunction,
  kConvert,
  kCompare,
  kMove,
  kControl,
  kWarp,
  kBarrier,
  kFence,
  kAtomic,
  kLoadGlobal,
  kStoreGlobal,
  kLoadShared,
  kStoreShared,
  kLoadOther,
  kStoreOther,
  kAsyncCopy,
  kMbarrier,
  kMatrixMove,
  kTensorCore,
  kOther,
  kCount
};
PAGEDKERN_VGPU_API const char* class_name(InstClass c);

// Fills ctx.out() from ctx.inst(); calls ctx.reject(reason) for operands it cannot take.
using DecodeFn = void (*)(DecodeContext& ctx, const Form& form);

struct Form {
  std::string name;
  InstClass cls = InstClass::kOther;
  Handler handler = nullptr;
  const char* signature = "";  // see decode.h: decode_signature
  DecodeFn decode = nullptr;   // nullptr: by signature
  u64 tag = 0;                 // for the family's own decode function
  u32 index = 0;
};

class PAGEDKERN_VGPU_API Registry {
 public:
  static const Registry& instance();
  static const char* level();  // which build of the family files is in use

  void add(const std::string& name, InstClass cls, const char* signature, Handler handler, u64 tag = 0);
  void add(const std::string& name, InstClass cls, DecodeFn decode, Handler handler = nullptr, u64 tag = 0);
  // A decode function that itself starts with decode_signature().
  void add(const std::string& name, InstClass cls, const char* signature, DecodeFn decode, Handler handler,
           u64 tag = 0);
  // Modifiers of this root may come in any order ("atom.global.gpu.acq_rel.add.u32").
  void any_order(const std::string& root) { unordered_.insert(root); }

  // Modifiers that do not change what an instruction of this root does here (cache hints, scopes): removed before
  // look-up, so that the table stays a table of meanings. A '*' at the end matches any rest.
  void ignore(const std::string& root, const std::vector<std::string>& modifiers);

  const Form* find(const std::string& opcode) const;  // nullptr: unknown
  const std::deque<Form>& forms() const { return forms_; }

 private:
  static std::string sorted_key(const std::string& opcode);
  std::string without_ignored(const std::string& root, const std::string& opcode) const;
  std::deque<Form> forms_;
  std::unordered_map<std::string, u32> by_name_, by_sorted_;
  std::unordered_set<std::string> unordered_;
  std::unordered_map<std::string, std::vector<std::string>> ignored_;
};

}  // namespace pagedkern::vgpu
