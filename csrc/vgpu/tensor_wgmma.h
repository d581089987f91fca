// wgmma.mma_async: forms, shared-memory matrix descriptors and arithmetic.
#pragma once

#include <cstdint>

#include "vgpu/tensor_mma.h"
#include "vgpu/tensor_types.h"

namespace pagedkern::vgpu {

// XOR swizzle of 16-byte chunks: the repeating pattern spans 8 rows of 32, 64 or 128 bytes.
enum class SmemSwizzle : uint8_t { kNone, k128B, k64B, k32B };  // numbered as the wgmma descriptor does

// Byte address of what lies, unswizzled, at `address`. `phase` shifts the pattern by rows of 128 bytes (base offset).
constexpr uint32_t smem_swizzle(uint32_t address, SmemSwizzle mode, uint32_t phase = 0) {
  const uint32_t row = (address >> 7) - phase;
  switch (mode) {
    case SmemSwizzle::k128B: return address ^ ((row & 7u) << 4);
    case SmemSwizzle::k64B: return address ^ ((row & 3u) << 4);
    case SmemSwizzle::k32B: return address ^ ((row & 1u) << 4);
    default: return address;
  }
}

// How many bytes a row of the swizzle's pattern has; 16 without swizzle.
constexpr uint32_t smem_swizzle_span(SmemSwizzle mode) {
  switch (mode) {
    case SmemSwizzle::k128B: return 128;
    case SmemSwizzle::k64B: return 64;
    case SmemSwizzle::k32B: return 32;
    default: return 16;
  }
}

struct WgmmaDescriptor {
  uint32_t start = 0;           // bytes
  uint32_t leading_offset = 0;  // bytes
  uint32_t stride_offset = 0;   // bytes
  uint32_t base_offset = 0;     // rows of 128 bytes
  SmemSwizzle swizzle = SmemSwizzle::kNone;
  bool reserved_bits = false;  // a bit that must be zero is set

  static WgmmaDescriptor decode(uint64_t bits);
};

struct WgmmaForm {
  int n = 8, k = 16;  // m is 64
  TensorType a = TensorType::kF16, b = TensorType::kF16;
  TensorType accumulator = TensorType::kF32;
  bool a_in_registers = false;
  bool a_transposed = false, b_transposed = false;  // M-major A, N-major B; of 16-bit types only
  bool negate_a = false, negate_b = false;
  bool saturate = false;
};

// Dense forms of sm_90a; k is 256 bits of the input type.
bool wgmma_supported(const WgmmaForm& form);

int wgmma_accumulator_registers(const WgmmaForm& form);  // per thread

// Addresses of the 16-byte chunks of rows (of A) or columns (of B) first .. first + count - 1, each of k elements.
// Chunk order: K-major, chunk c of row r is at r * chunks_per_row + c; MN-major, chunk c of k step s is at
// s * chunks_per_step + c. `first` and `count` are multiples of 8. Returns how many there are.
constexpr int kMaxWgmmaChunks = 512;
int wgmma_chunk_addresses(const WgmmaDescriptor& descriptor, TensorType type, bool transposed, int first, int count,
                          int k, uint32_t* out);

// The matrix those chunks hold: A as count x k, row major, B in panels of eight columns (tensor_gemm.h).
void wgmma_unpack_a(TensorType type, bool transposed, int count, int k, const uint8_t* chunks, bool negate, float* out);
void wgmma_unpack_b(TensorType type, bool transposed, int count, int k, const uint8_t* chunks, bool negate, float* out);

// One warp's 16 rows of D from A (16 x k) and B, both already negated where the form says; with `accumulate` false
// the old D is not read.
void wgmma_rows(const WgmmaForm& form, const float* a, const float* b, bool accumulate, LaneWords* d);

}  // namespace pagedkern::vgpu
