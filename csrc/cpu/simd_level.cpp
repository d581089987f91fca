#include <cstdlib>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace pagedkern::cpu {
namespace {

constexpr const char* kNames[] = {"generic", "avx2", "avx512", "avx512_bf16"};

// __builtin_cpu_supports also asks the operating system whether it saves the wide registers.
SimdLevel detect_level() {
#if PAGEDKERN_X86_64
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))) {
    return SimdLevel::kGeneric;
  }
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))) {
    return SimdLevel::kAvx2;
  }
  if (!(__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
        __builtin_cpu_supports("avx512vnni"))) {
    return SimdLevel::kAvx512;
  }
  return SimdLevel::kAvx512Bf16;
#else
  return SimdLevel::kGeneric;
#endif
}

// A level that the machine lacks, or a name that is none, leaves the best one: tests read simd_level() back.
SimdLevel choose_level() {
  const SimdLevel best = detect_level();
  const char* wanted = std::getenv("PAGEDKERN_CPU_SIMD");
  if (wanted == nullptr) return best;
  for (int i = 0; i <= static_cast<int>(best); ++i) {
    if (std::strcmp(wanted, kNames[i]) == 0) return static_cast<SimdLevel>(i);
  }
  return best;
}

}  // namespace

SimdLevel current_simd_level() {
  static const SimdLevel level = choose_level();
  return level;
}

const char* simd_level() {
  return kNames[static_cast<int>(current_simd_level())];
}

}  // namespace pagedkern::cpu
