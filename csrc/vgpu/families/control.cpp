// Branches, calls, returns, traps, and the hints that are no-ops here.
#include <cstring>

#include "vgpu/block.h"
#include "vgpu/lanes.h"

namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL {
namespace {

constexpr InstClass kClass = InstClass::kControl;

void bra(Warp& w, const Inst& inst, u32 mask) {
  w.branch(inst.ext, mask);
}

void decode_bra(DecodeContext& ctx, const Form&) {
  ctx.require(ctx.count() == 1 && ctx.operand(0).kind == Operand::Kind::kName, "a label is needed");
  ctx.branches_to(ctx.label(ctx.operand(0).name));
  ctx.falls_through(!ctx.inst().guard.empty());
}

void brx(Warp& w, const Inst& inst, u32 mask) {  // op[0] index, aux pool index, imm number of targets
  const u32* index = w.lanes<u32>(inst.op[0]);
  u32 targets[kLanes] = {};
  for (u32 m = mask; m; m &= m - 1) {
    int i = std::countr_zero(m);
    if (index[i] >= inst.imm)
      w.fault("invalid", "brx.idx index " + std::to_string(index[i]) + " of " + std::to_string(inst.imm) + " targets",
              1u << i);
    targets[i] = u32(w.kernel().pool[inst.aux + index[i]]);
  }
  w.scatter(targets, mask);
}

void decode_brx(DecodeContext& ctx, const Form&) {
  ctx.require(ctx.count() == 2, "wrong number of operands");
  const auto* list = ctx.branch_targets(ctx.operand(1).name);
  if (!list) ctx.reject("unknown .branchtargets '" + ctx.operand(1).name + "'");
  ctx.out().op[0] = ctx.src(ctx.operand(0), 32);
  std::vector<u32> labels;
  for (const auto& name : *list) labels.push_back(ctx.label(name));
  u32 pool = ctx.pool(std::vector<i32>(labels.size()));
  ctx.out().aux = pool;
  ctx.out().imm = labels.size();
  ctx.pool_branches(pool, labels);
  ctx.falls_through(!ctx.inst().guard.empty());
}

void leave(Warp& w, const Inst&, u32 mask) {
  w.exit(mask);
}

void return_to_caller(Warp& w, const Inst& inst, u32 mask) {
  w.scatter(w.lanes<u32>(inst.op[0]), mask);
}

void decode_ret(DecodeContext& ctx, const Form&) {
  ctx.require(ctx.count() == 0, "wrong number of operands");
  ctx.falls_through(!ctx.inst().guard.empty());
  ctx.out().op[0] = ctx.return_pc();
  ctx.out().fn = ctx.return_pc() == kNoOperand ? leave : return_to_caller;
}

void decode_exit(DecodeContext& ctx, const Form&) {
  ctx.require(ctx.count() == 0, "wrong number of operands");
  ctx.falls_through(!ctx.inst().guard.empty());
}

// Copies (from, to, bytes) triples of each thread's local memory, then calls. aux: pool index of the triples, imm their
// number.
void copy_locals(Warp& w, u32 pool, u64 count, u32 mask) {
  for (u64 k = 0; k < count; ++k) {
    const i32* triple = &w.kernel().pool[pool + 3 * k];
    u64 from[kLanes], to[kLanes];
    u8 *source[kLanes], *target[kLanes];
    for (int i = 0; i < kLanes; ++i) from[i] = u64(triple[0]), to[i] = u64(triple[1]);
    w.resolve(Space::kLocal, from, mask, u32(triple[2]), 1, Access::kRead, source);
    w.resolve(Space::kLocal, to, mask, u32(triple[2]), 1, Access::kWrite, target);
    for (u32 m = mask; m; m &= m - 1) {
      int i = std::countr_zero(m);
      std::memcpy(target[i], source[i], size_t(triple[2]));
    }
  }
}

void call(Warp& w, const Inst& inst, u32 mask) {
  copy_locals(w, inst.aux, inst.imm, mask);
  u32* back = w.lanes<u32>(inst.op[0]);
  for (u32 m = mask; m; m &= m - 1) back[std::countr_zero(m)] = w.pc;
  w.branch(inst.ext, mask);
}

void after_call(Warp& w, const Inst& inst, u32 mask) {
  copy_locals(w, inst.aux, inst.imm, mask);
}

void decode_call(DecodeContext& ctx, const Form&) {
  size_t k = 0;
  std::vector<std::pair<u32, u32>> results, arguments;
  auto locals = [&](const Operand& list, std::vector<std::pair<u32, u32>>& into) {
    for (const auto& o : list.elements) into.push_back(ctx.local_param(o));
  };
  if (k < ctx.count() && ctx.operand(k).kind == Operand::Kind::kList) locals(ctx.operand(k++), results);
  ctx.require(k < ctx.count() && ctx.operand(k).kind == Operand::Kind::kName, "the called function is missing");
  std::string name = ctx.operand(k++).name;
  if (k < ctx.count() && ctx.operand(k).kind == Operand::Kind::kList) locals(ctx.operand(k++), arguments);
  ctx.require(k == ctx.count(), "indirect calls are not supported");
  CallTarget target = ctx.call_target(name);
  ctx.require(target.params.size() == arguments.size() && target.results.size() == results.size(),
              "wrong number of arguments");
  std::vector<i32> in, out;
  auto triple = [&](std::vector<i32>& list, const std::pair<u32, u32>& from, const std::pair<u32, u32>& to) {
    ctx.require(from.second == to.second, "an argument has the wrong size");
    list.insert(list.end(), {i32(from.first), i32(to.first), i32(to.second)});
  };
  for (size_t j = 0; j < arguments.size(); ++j) triple(in, arguments[j], target.params[j]);
  for (size_t j = 0; j < results.size(); ++j) triple(out, target.results[j], results[j]);
  u32 pool = ctx.pool(in);
  ctx.out().fn = call;
  ctx.out().op[0] = target.return_pc;
  ctx.out().aux = pool;
  ctx.out().imm = arguments.size();
  ctx.branches_to(target.label);
  if (results.empty()) return;
  pool = ctx.pool(out);
  Inst& after = ctx.append(after_call);
  after.aux = pool;
  after.imm = results.size();
}

void trap(Warp& w, const Inst&, u32 mask) {
  w.fault("trap", "the kernel executed trap", mask);
}
void nothing(Warp&, const Inst&, u32) {}
void nap(Warp& w, const Inst&, u32) {
  w.poll("nanosleep");
  w.state = WarpState::kReady;  // the turn ends, but time passes: this is no sign of a standstill
}

void decode_optional_source(DecodeContext& ctx, const Form&) {
  for (size_t k = 0; k < ctx.count(); ++k) ctx.src(ctx.operand(k), 32);
}

}  // namespace

void register_control(Registry& r) {
  r.add("bra", kClass, decode_bra, bra);
  r.add("bra.uni", kClass, decode_bra, bra);
  r.add("brx.idx", kClass, decode_brx, brx);
  r.add("brx.idx.uni", kClass, decode_brx, brx);
  r.add("call", kClass, decode_call, call);
  r.add("call.uni", kClass, decode_call, call);
  r.add("ret", kClass, decode_ret, leave);
  r.add("ret.uni", kClass, decode_ret, leave);
  r.add("exit", kClass, decode_exit, leave);
  r.add("trap", kClass, "", trap);
  r.add("brkpt", kClass, "", trap);
  r.add("nanosleep.u32", kClass, "w", nap);
  r.add("griddepcontrol.wait", kClass, "", nothing);
  r.add("griddepcontrol.launch_dependents", kClass, "", nothing);
  r.add("setmaxnreg.inc.sync.aligned.u32", kClass, decode_optional_source, nothing);
  r.add("setmaxnreg.dec.sync.aligned.u32", kClass, decode_optional_source, nothing);
  r.add("pmevent", kClass, "w", nothing);
}

}  // namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL
