// Directed rounding and float helpers for the families.
#pragma once

#include <bit>
#include <cfenv>
#include <cmath>

#include "vgpu/level.h"
#include "vgpu/types.h"

namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL {

enum class Round : u8 { kNearest, kZero, kDown, kUp };

static inline int fe_mode(Round r) {
  return r == Round::kZero   ? FE_TOWARDZERO
         : r == Round::kDown ? FE_DOWNWARD
         : r == Round::kUp   ? FE_UPWARD
                             : FE_TONEAREST;
}

// The rounding mode for a scope. Operands must pass through volatile, so that nothing is computed outside of it.
class RoundingScope {
 public:
  explicit RoundingScope(Round r) { std::fesetround(fe_mode(r)); }
  ~RoundingScope() { std::fesetround(FE_TONEAREST); }
};

// NaN results are canonical in f32, f16 and bf16.
static inline float canonical(float v) {
  return v != v ? std::bit_cast<float>(0x7fffffffu) : v;
}

static inline float flush(float v) {  // .ftz: subnormals become zero of the same sign
  u32 b = std::bit_cast<u32>(v);
  return std::bit_cast<float>((b & 0x7f800000u) == 0 ? b & 0x80000000u : b);
}

template <class T>
static inline T saturate01(T v) {
  return v != v ? T(0) : v < T(0) ? T(0) : v > T(1) ? T(1) : v == T(0) ? T(0) : v;
}

}  // namespace pagedkern::vgpu::PAGEDKERN_VGPU_LEVEL
