// What this op library holds, for pagedkern.build_info(): read through ctypes, so that the library tells of itself.
#include <string>

#include "config.h"
#ifndef PAGEDKERN_VGPU
#include "cpu/kernels.h"
#endif

#define PAGEDKERN_STRING_(x) #x
#define PAGEDKERN_STRING(x) PAGEDKERN_STRING_(x)

#ifdef PAGEDKERN_WITH_CUDA
constexpr const char* kCuda = "1";
#else
constexpr const char* kCuda = "0";
#endif

#ifdef PAGEDKERN_VGPU
constexpr const char* kSimdUsed = "";
#else
const char* const kSimdUsed = pagedkern::cpu::simd_level();
#endif

// Lines of `key=value`; the string lives as long as the library.
extern "C" __attribute__((visibility("default"))) const char* pagedkern_ops_info() {
  static const std::string info = std::string("namespace=" PAGEDKERN_STRING(PAGEDKERN_NAMESPACE)) +
                                  "\ntorch_built_with=" PAGEDKERN_CONFIG_TORCH_BUILT_WITH +
                                  "\nsimd_levels=" PAGEDKERN_CONFIG_SIMD_LEVELS + "\nsimd_used=" + kSimdUsed +
                                  "\ncuda=" + kCuda + "\ncuda_missing=" PAGEDKERN_CONFIG_CUDA_MISSING +
                                  "\nnvcc_version=" PAGEDKERN_CONFIG_NVCC_VERSION "\ncompiler=" __VERSION__ "\n";
  return info.c_str();
}
