// createpolicy: cache policies are hints, so any value will do as long as it is one.
#include <bit>
#include <string>

#include "vgpu/async_forms.h"
#include "vgpu/decode.h"
#include "vgpu/registry.h"
#include "vgpu/warp.h"

namespace pagedkern::vgpu {
namespace {

constexpr u64 kPolicy = 0x14f0000000000000ull;

void run_policy(Warp& warp, const Inst& inst, u32 mask) {
  for (u32 m = mask; m; m &= m - 1) warp.lanes<u64>(inst.op[0])[std::countr_zero(m)] = kPolicy;
}

// createpolicy.fractional d {, fraction}
void decode_fractional(DecodeContext& ctx, const Form&) {
  ctx.require(ctx.count() == 1 || ctx.count() == 2, "one or two operands are needed");
  ctx.out().op[0] = ctx.dst(ctx.operand(0), 64);
  if (ctx.count() == 2) ctx.src(ctx.operand(1), 32, Imm::kFloat32);
}

// createpolicy.cvt d, property
void decode_cvt(DecodeContext& ctx, const Form&) {
  ctx.require(ctx.count() == 2, "two operands are needed");
  ctx.out().op[0] = ctx.dst(ctx.operand(0), 64);
  ctx.src(ctx.operand(1), 64);
}

}  // namespace

void register_policy_forms(Registry& registry) {
  for (const char* first : {"evict_last", "evict_normal", "evict_first", "evict_unchanged"}) {
    for (const char* second : {"", ".L2::evict_first", ".L2::evict_unchanged"}) {
      registry.add(std::string("createpolicy.fractional.L2::") + first + second + ".b64", InstClass::kOther,
                   decode_fractional, run_policy);
    }
  }
  registry.add("createpolicy.cvt.L2.b64", InstClass::kOther, decode_cvt, run_policy);
}

}  // namespace pagedkern::vgpu
