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

void accumulate_generic(float* c, const float* a, const float* b, int m, int n, int k) {
  for (int i = 0; i < m; ++i) {
    for (int kk = 0; kk < k; ++kk) {
      const float scale = a[i * k + kk];
      for (int j = 0; j < n; ++j) c[i * n + j] = std::fma(scale, b[kk * n + j], c[i * n + j]);
    }
  }
}

#ifdef PAGEDKERN_VGPU_X86

__attribute__((target("avx2,fma"))) void accumulate_avx2(float* c, const float* a, const float* b, int m, int n,
                                                         int k) {
  for (int i = 0; i < m; ++i) {
    const float* row = a + i * k;
    float* out = c + i * n;
    int j = 0;
    for (; j + 32 <= n; j += 32) {
      __m256 s0 = _mm256_loadu_ps(out + j), s1 = _mm256_loadu_ps(out + j + 8);
      __m256 s2 = _mm256_loadu_ps(out + j + 16), s3 = _mm256_loadu_ps(out + j + 24);
      for (int kk = 0; kk < k; ++kk) {
        const __m256 scale = _mm256_set1_ps(row[kk]);
        const float* in = b + kk * n + j;
        s0 = _mm256_fmadd_ps(scale, _mm256_loadu_ps(in), s0);
        s1 = _mm256_fmadd_ps(scale, _mm256_loadu_ps(in + 8), s1);
        s2 = _mm256_fmadd_ps(scale, _mm256_loadu_ps(in + 16), s2);
        s3 = _mm256_fmadd_ps(scale, _mm256_loadu_ps(in + 24), s3);
      }
      _mm256_storeu_ps(out + j, s0);
      _mm256_storeu_ps(out + j + 8, s1);
      _mm256_storeu_ps(out + j + 16, s2);
      _mm256_storeu_ps(out + j + 24, s3);
    }
    for (; j < n; j += 8) {
      __m256 s = _mm256_loadu_ps(out + j);
      for (int kk = 0; kk < k; ++kk) s = _mm256_fmadd_ps(_mm256_set1_ps(row[kk]), _mm256_loadu_ps(b + kk * n + j), s);
      _mm256_storeu_ps(out + j, s);
    }
  }
}

// Four rows at a time: enough independent sums to hide the latency of the fused multiply-add.
__attribute__((target("avx512f"))) void accumulate_avx512(float* c, const float* a, const float* b, int m, int n,
                                                          int k) {
  for (int i = 0; i < m; i += 4) {
    const float* r = a + i * k;
    float* out = c + i * n;
    for (int j = 0; j < n; j += 32) {
      const int left = std::min(32, n - j);
      const __mmask16 lo = static_cast<__mmask16>(left >= 16 ? 0xffff : 0xff);
      const __mmask16 hi = static_cast<__mmask16>(left >= 32 ? 0xffff : left > 16 ? 0xff : 0);
      __m512 s[4][2];
      for (int q = 0; q < 4; ++q) {
        s[q][0] = _mm512_maskz_loadu_ps(lo, out + q * n + j);
        s[q][1] = _mm512_maskz_loadu_ps(hi, out + q * n + j + 16);
      }
      for (int kk = 0; kk < k; ++kk) {
        const __m512 b0 = _mm512_maskz_loadu_ps(lo, b + kk * n + j);
        const __m512 b1 = _mm512_maskz_loadu_ps(hi, b + kk * n + j + 16);
        for (int q = 0; q < 4; ++q) {
          const __m512 scale = _mm512_set1_ps(r[q * k + kk]);
          s[q][0] = _mm512_fmadd_ps(scale, b0, s[q][0]);
          s[q][1] = _mm512_fmadd_ps(scale, b1, s[q][1]);
        }
      }
      for (int q = 0; q < 4; ++q) {
        _mm512_mask_storeu_ps(out + q * n + j, lo, s[q][0]);
        _mm512_mask_storeu_ps(out + q * n + j + 16, hi, s[q][1]);
      }
    }
  }
}

#endif  // PAGEDKERN_VGPU_X86

using Accumulate = void (*)(float*, const float*, const float*, int, int, int);

Accumulate choose() {
#ifdef PAGEDKERN_VGPU_X86
  if (__builtin_cpu_supports("avx512f")) return accumulate_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return accumulate_avx2;
#endif
  return accumulate_generic;
}

}  // namespace

void tensor_accumulate(float* c, const float* a, const float* b, int m, int n, int k) {
  static const Accumulate best = choose();
  (m % 4 == 0 ? best : accumulate_generic)(c, a, b, m, n, k);
}

void tensor_accumulate(int32_t* c, const int32_t* a, const int32_t* b, int m, int n, int k, bool saturate) {
  constexpr int kMaxColumns = 256;
  int32_t sum[kMaxColumns];
  for (int i = 0; i < m; ++i) {
    std::fill_n(sum, n, 0);
    for (int kk = 0; kk < k; ++kk) {
      const int32_t scale = a[i * k + kk];
      for (int j = 0; j < n; ++j) sum[j] += scale * b[kk * n + j];
    }
    for (int j = 0; j < n; ++j) {
      const int64_t exact = static_cast<int64_t>(c[i * n + j]) + sum[j];
      const int64_t kept = saturate ? std::clamp<int64_t>(exact, std::numeric_limits<int32_t>::min(),
                                                          std::numeric_limits<int32_t>::max())
                                    : exact;
      c[i * n + j] = static_cast<int32_t>(static_cast<uint32_t>(kept));
    }
  }
}

}  // namespace pagedkern::vgpu
