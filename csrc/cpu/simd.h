// Which SIMD level runs. Every csrc/cpu/simd/*.cpp is compiled once per level, all of it in
// namespace pagedkern::cpu::PAGEDKERN_SIMD; the files beside this one choose among the copies at run time.
#pragma once

#if defined(__x86_64__)
#define PAGEDKERN_X86_64 1
#else
#define PAGEDKERN_X86_64 0
#endif

namespace pagedkern::cpu {

// Each level has all the instructions of those before it.
enum class SimdLevel {
  kGeneric,     // the compiler's baseline
  kAvx2,        // AVX2, FMA, F16C
  kAvx512,      // AVX-512 F, BW, DQ, VL
  kAvx512Bf16,  // AVX-512 BF16, VBMI and VNNI
};

// The best level of this machine, or the lower one that PAGEDKERN_CPU_SIMD names. Read once.
SimdLevel current_simd_level();

}  // namespace pagedkern::cpu

// Declares a function that csrc/cpu/simd defines once per level:
//   PAGEDKERN_DECLARE_SIMD(void, copy_rows, (const Params& params, int64_t begin, int64_t end))
// and calls the one that this machine runs:
//   PAGEDKERN_CALL_SIMD(copy_rows, (params, begin, end));
#if PAGEDKERN_X86_64
#define PAGEDKERN_DECLARE_SIMD(result, name, parameters) \
  namespace pagedkern::cpu::generic {                    \
  result name parameters;                                \
  }                                                      \
  namespace pagedkern::cpu::avx2 {                       \
  result name parameters;                                \
  }                                                      \
  namespace pagedkern::cpu::avx512 {                     \
  result name parameters;                                \
  }                                                      \
  namespace pagedkern::cpu::avx512_bf16 {                \
  result name parameters;                                \
  }
#define PAGEDKERN_CALL_SIMD(name, arguments)                                          \
  (::pagedkern::cpu::current_simd_level() == ::pagedkern::cpu::SimdLevel::kAvx512Bf16 \
       ? ::pagedkern::cpu::avx512_bf16::name arguments                                \
   : ::pagedkern::cpu::current_simd_level() == ::pagedkern::cpu::SimdLevel::kAvx512   \
       ? ::pagedkern::cpu::avx512::name arguments                                     \
   : ::pagedkern::cpu::current_simd_level() == ::pagedkern::cpu::SimdLevel::kAvx2     \
       ? ::pagedkern::cpu::avx2::name arguments                                       \
       : ::pagedkern::cpu::generic::name arguments)
#else
#define PAGEDKERN_DECLARE_SIMD(result, name, parameters) \
  namespace pagedkern::cpu::generic {                    \
  result name parameters;                                \
  }
#define PAGEDKERN_CALL_SIMD(name, arguments) (::pagedkern::cpu::generic::name arguments)
#endif
