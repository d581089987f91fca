// mma.sync: fragment layouts and arithmetic, on registers held lane by lane.
#pragma once

#include <array>
#include <cstdint>

#include "vgpu/tensor_types.h"

namespace pagedkern::vgpu {

// One 32-bit register of the 32 lanes of a warp.
using LaneWords = std::array<uint32_t, 32>;

struct MmaForm {
  int m = 16, n = 8, k = 16;
  TensorType a = TensorType::kF16, b = TensorType::kF16;
  TensorType accumulator = TensorType::kF32;  // kF16, kF32 or kS32: of C and D alike
  bool saturate = false;                      // .satfinite of the integer forms
};

// True for the warp-level forms that are executed: m16n8k{8,16} of f16 and bf16, m16n8k{4,8} of tf32,
// m16n8k{16,32} of e4m3 and e5m2 in any mix and of s8 and u8 in any mix.
bool mma_supported(const MmaForm& form);

int mma_a_registers(const MmaForm& form);
int mma_b_registers(const MmaForm& form);
int mma_accumulator_registers(const MmaForm& form);

// d may be c. a, b, c and d point at as many registers as the functions above say.
void mma_sync(const MmaForm& form, LaneWords* d, const LaneWords* a, const LaneWords* b, const LaneWords* c);

// The pieces, shared with wgmma, whose fragments are those of a 16-row mma repeated over n.
// A: 16 x k, row major; `negate` is the imm-scale of -1.
void unpack_a_fragment(TensorType type, int k, const LaneWords* a, bool negate, float* out);
void unpack_a_fragment(TensorType type, int k, const LaneWords* a, int32_t* out);
// 16 x n accumulators in panels of eight columns (tensor_gemm.h), float16 pairs widened.
void unpack_accumulator(TensorType type, int n, const LaneWords* c, float* out);
void unpack_accumulator(int n, const LaneWords* c, int32_t* out);
// NaN results become the canonical NaN of the type, as the hardware's do.
void pack_accumulator(TensorType type, int n, const float* in, LaneWords* d);
void pack_accumulator(int n, const int32_t* in, LaneWords* d);

}  // namespace pagedkern::vgpu
