#include "vgpu/tensor_gemm.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define PAGEDKERN_VGPU_X86 1
#include <immintrin.h>
#endif

namespace pagedkern::vgpu {
namespace {

void accumulate_generic(float* c, const float* a, const float* b, int panels, int depth) {
  for (int p = 0; p < panels; ++p, b += depth * kPanel) {
    for (int i = 0; i < kTensorRows; ++i, c += kPanel) {
      for (int k = 0; k < depth; ++k) {
        for (int j = 0; j < kPanel; ++j) c[j] = std::fma(a[i * depth + k], b[k * kPanel + j], c[j]);
      }
    }
  }
}

#ifdef PAGEDKERN_VGPU_X86

// Eight rows at a time: enough independent sums to hide the latency of the fused multiply-add.
__attribute__((target("avx2,fma"))) void accumulate_avx2(float* c, const float* a, const float* b, int panels,
                                                         int depth) {
  for (int p = 0; p < panels; ++p, b += depth * kPanel) {
    for (int i = 0; i < kTensorRows; i += 8, c += 8 * kPanel) {
      const float* row = a + i * depth;
      __m256 s[8];
      for (int q = 0; q < 8; ++q) s[q] = _mm256_loadu_ps(c + q * kPanel);
      for (int k = 0; k < depth; ++k) {
        const __m256 in = _mm256_loadu_ps(b + k * kPanel);
        for (int q = 0; q < 8; ++q) s[q] = _mm256_fmadd_ps(_mm256_broadcast_ss(row + q * depth + k), in, s[q]);
      }
      for (int q = 0; q < 8; ++q) _mm256_storeu_ps(c + q * kPanel, s[q]);
    }
  }
}

#endif  // PAGEDKERN_VGPU_X86

using Accumulate = void (*)(float*, const float*, const float*, int, int);

Accumulate choose() {
#ifdef PAGEDKERN_VGPU_X86
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return accumulate_avx2;
#endif
  return accumulate_generic;
}

}  // namespace

void tensor_accumulate(float* c, const float* a, const float* b, int panels, int depth) {
  static const Accumulate best = choose();
  best(c, a, b, panels, depth);
}

void tensor_accumulate(int32_t* c, const int32_t* a, const int32_t* b, int panels, int depth, bool saturate) {
  for (int p = 0; p < panels; ++p, b += depth * kPanel) {
    for (int i = 0; i < kTensorRows; ++i, c += kPanel) {
      int32_t sum[kPanel] = {};
      for (int k = 0; k < depth; ++k) {
        for (int j = 0; j < kPanel; ++j) sum[j] += a[i * depth + k] * b[k * kPanel + j];
      }
      for (int j = 0; j < kPanel; ++j) {
        const int64_t exact = static_cast<int64_t>(c[j]) + sum[j];
        const int64_t kept = saturate ? std::clamp<int64_t>(exact, std::numeric_limits<int32_t>::min(),
                                                            std::numeric_limits<int32_t>::max())
                                      : exact;
        c[j] = static_cast<int32_t>(static_cast<uint32_t>(kept));
      }
    }
  }
}

}  // namespace pagedkern::vgpu
