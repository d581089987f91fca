// Instruction forms of mma.sync, ldmatrix, stmatrix and movmatrix.
#include "vgpu/tensor_forms.h"

#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "vgpu/async_support.h"
#include "vgpu/registry.h"
#include "vgpu/tensor_matrix.h"
#include "vgpu/tensor_mma.h"
#include "vgpu/warp.h"

namespace pagedkern::vgpu {
namespace {

// ---- mma.sync ----

u64 pack_form(const MmaForm& f) {
  return u64(f.k) | u64(f.a) << 8 | u64(f.b) << 16 | u64(f.accumulator) << 24 | u64(f.saturate) << 32;
}

MmaForm unpack_form(u64 tag) {
  MmaForm f;
  f.k = int(tag & 0xff);
  f.a = TensorType(tag >> 8 & 0xff);
  f.b = TensorType(tag >> 16 & 0xff);
  f.accumulator = TensorType(tag >> 24 & 0xff);
  f.saturate = tag >> 32 & 1;
  return f;
}

const std::vector<Operand>& fragment(DecodeContext& ctx, size_t k, int registers) {
  const Operand& o = ctx.operand(k);
  ctx.require(o.kind == Operand::Kind::kVector && int(o.elements.size()) == registers,
              "a fragment has the wrong number of registers");
  return o.elements;
}

void run_mma(Warp& warp, const Inst& inst, u32 mask) {
  if (!require_whole_warp(warp, mask)) return;
  const MmaForm form = unpack_form(inst.imm);
  const int a_count = mma_a_registers(form), b_count = mma_b_registers(form), c_count = mma_accumulator_registers(form);
  LaneWords a[4], b[2], c[4];
  const i32* refs = pool_of(warp, inst) + c_count;
  for (int r = 0; r < a_count; ++r) std::memcpy(a[r].data(), warp.lanes<u32>(*refs++), sizeof a[r]);
  for (int r = 0; r < b_count; ++r) std::memcpy(b[r].data(), warp.lanes<u32>(*refs++), sizeof b[r]);
  for (int r = 0; r < c_count; ++r) std::memcpy(c[r].data(), warp.lanes<u32>(*refs++), sizeof c[r]);
  mma_sync(form, c, a, b, c);
  refs = pool_of(warp, inst);
  for (int r = 0; r < c_count; ++r) std::memcpy(warp.lanes<u32>(refs[r]), c[r].data(), sizeof c[r]);
  warp.worker->counters.tensor_flops += 2ull * u64(form.m) * u64(form.n) * u64(form.k);
}

void decode_mma(DecodeContext& ctx, const Form& entry) {
  const MmaForm form = unpack_form(entry.tag);
  ctx.require(ctx.count() == 4, "mma has four operands");
  const Imm imm = form.accumulator == TensorType::kF32 ? Imm::kFloat32 : Imm::kInteger;
  std::vector<i32> pool, sources;
  for (const Operand& o : fragment(ctx, 1, mma_a_registers(form))) sources.push_back(ctx.src(o, 32));
  for (const Operand& o : fragment(ctx, 2, mma_b_registers(form))) sources.push_back(ctx.src(o, 32));
  for (const Operand& o : fragment(ctx, 3, mma_accumulator_registers(form))) sources.push_back(ctx.src(o, 32, imm));
  for (const Operand& o : fragment(ctx, 0, mma_accumulator_registers(form))) pool.push_back(ctx.dst(o, 32));
  pool.insert(pool.end(), sources.begin(), sources.end());
  ctx.out().imm = entry.tag;
  ctx.out().ext = ctx.pool(pool);
}

void register_mma(Registry& registry) {
  const TensorType inputs[] = {TensorType::kF16,  TensorType::kBF16, TensorType::kTF32, TensorType::kE4M3,
                               TensorType::kE5M2, TensorType::kS8,   TensorType::kU8};
  for (int k : {4, 8, 16, 32}) {
    for (TensorType a : inputs) {
      for (TensorType b : inputs) {
        for (TensorType sum : {TensorType::kF16, TensorType::kF32, TensorType::kS32}) {
          for (bool saturate : {false, true}) {
            MmaForm f;
            f.k = k;
            f.a = a;
            f.b = b;
            f.accumulator = sum;
            f.saturate = saturate;
            if (!mma_supported(f)) continue;
            const std::string d = tensor_type_name(sum);
            registry.add("mma.sync.aligned.m16n8k" + std::to_string(k) + ".row.col" + (saturate ? ".satfinite." : ".") +
                             d + "." + tensor_type_name(a) + "." + tensor_type_name(b) + "." + d,
                         InstClass::kTensorCore, decode_mma, run_mma, pack_form(f));
          }
        }
      }
    }
  }
}

// ---- ldmatrix, stmatrix ----

constexpr u64 kTrans = 8, kStore = 16, kGenericAddress = 32;  // Form::tag; the low bits count the matrices

// The rows of `count` matrices, one a lane.
void matrix_rows(Warp& warp, const Inst& inst, int count, Access access, u8** pointers) {
  const u32 used = count == 4 ? kFullMask : (1u << (8 * count)) - 1;
  u64 addresses[kLanes];
  lane_addresses(warp, pool_of(warp, inst), used, addresses);
  const Space space = inst.imm & kGenericAddress ? Space::kGeneric : Space::kShared;
  warp.resolve(space, addresses, used, 16, 16, access, pointers);
}

void run_ldmatrix(Warp& warp, const Inst& inst, u32 mask) {
  if (!require_whole_warp(warp, mask)) return;
  const int count = int(inst.imm & 7);
  const bool trans = inst.imm & kTrans;
  const i32* refs = pool_of(warp, inst);
  u8* pointers[kLanes];
  matrix_rows(warp, inst, count, Access::kRead, pointers);
  LaneWords out[4];
  for (int k = 0; k < count; ++k) {
    MatrixRows rows;
    for (int r = 0; r < 8; ++r) std::memcpy(rows[size_t(r)].data(), pointers[8 * k + r], 16);
    matrix_to_lanes(rows, trans, out[k]);
  }
  for (int k = 0; k < count; ++k) std::memcpy(warp.lanes<u32>(refs[kAddressWords + k]), out[k].data(), sizeof out[k]);
}

void run_stmatrix(Warp& warp, const Inst& inst, u32 mask) {
  if (!require_whole_warp(warp, mask)) return;
  const int count = int(inst.imm & 7);
  const bool trans = inst.imm & kTrans;
  const i32* refs = pool_of(warp, inst);
  u8* pointers[kLanes];
  SameValue same;
  warp.same_value = &same;
  matrix_rows(warp, inst, count, Access::kWrite, pointers);
  warp.same_value = nullptr;
  MatrixRows rows[4];
  for (int k = 0; k < count; ++k) {
    LaneWords in;
    std::memcpy(in.data(), warp.lanes<u32>(refs[kAddressWords + k]), sizeof in);
    lanes_to_matrix(in, trans, rows[k]);
  }
  for (u32 m = same.lanes; m; m &= m - 1) {
    const auto lane = size_t(std::countr_zero(m));
    if (std::memcmp(pointers[lane], rows[lane / 8][lane % 8].data(), 16)) warp.fault("race", same.conflict, 1u << lane);
  }
  for (size_t row = 0; row < size_t(8 * count); ++row) std::memcpy(pointers[row], rows[row / 8][row % 8].data(), 16);
}

void decode_matrix(DecodeContext& ctx, const Form& entry) {
  const bool store = entry.tag & kStore;
  const size_t count = size_t(entry.tag & 7);
  ctx.require(ctx.count() == 2, "two operands are needed");
  const Operand& data = ctx.operand(store ? 1 : 0);
  std::vector<Operand> single{data};
  const std::vector<Operand>& registers = data.kind == Operand::Kind::kVector ? data.elements : single;
  ctx.require(registers.size() == count, "the number of registers does not fit the number of matrices");
  std::vector<i32> pool;
  push_address(pool, address_operand(ctx, ctx.operand(store ? 0 : 1), entry.tag & kGenericAddress));
  for (const Operand& o : registers) pool.push_back(store ? ctx.src(o, 32) : ctx.dst(o, 32));
  ctx.out().imm = entry.tag;
  ctx.out().ext = ctx.pool(pool);
}

void register_matrix_moves(Registry& registry) {
  for (const char* root : {"ldmatrix", "stmatrix"}) {
    const bool store = root[0] == 's';
    registry.any_order(root);
    for (u64 count : {1, 2, 4}) {
      for (bool trans : {false, true}) {
        for (const char* space : {".shared", ".shared::cta", ""}) {
          const u64 tag = count | (trans ? kTrans : 0) | (store ? kStore : 0) | (*space ? 0 : kGenericAddress);
          registry.add(std::string(root) + ".sync.aligned.m8n8.x" + std::to_string(count) + (trans ? ".trans" : "") +
                           space + ".b16",
                       InstClass::kMatrixMove, decode_matrix, store ? run_stmatrix : run_ldmatrix, tag);
        }
      }
    }
  }
}

// ---- movmatrix ----

void run_movmatrix(Warp& warp, const Inst& inst, u32 mask) {
  if (!require_whole_warp(warp, mask)) return;
  LaneWords in;
  std::memcpy(in.data(), warp.lanes<u32>(inst.op[1]), sizeof in);
  const LaneWords out = transpose_lanes(in);
  std::memcpy(warp.lanes<u32>(inst.op[0]), out.data(), sizeof out);
}

}  // namespace

const char* tensor_type_name(TensorType t) {
  static constexpr const char* kNames[] = {"f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8", "f32", "s32"};
  return kNames[size_t(t)];
}

bool require_whole_warp(Warp& warp, u32 mask) {
  if (!warp.converge(mask, kFullMask)) return false;
  if (mask != kFullMask)
    warp.fault("invalid", "the instruction needs all 32 lanes of the warp, some have exited", mask);
  return true;
}

void register_tensor_forms(Registry& registry) {
  register_mma(registry);
  register_matrix_moves(registry);
  registry.add("movmatrix.sync.aligned.m8n8.trans.b16", InstClass::kMatrixMove, "Ww", run_movmatrix);
  register_wgmma_forms(registry);
}

// These families do not depend on the SIMD level their callers were compiled for.
namespace generic {
void register_tensor(Registry& registry) {
  register_tensor_forms(registry);
}
}  // namespace generic
namespace avx2 {
void register_tensor(Registry& registry) {
  register_tensor_forms(registry);
}
}  // namespace avx2

}  // namespace pagedkern::vgpu
