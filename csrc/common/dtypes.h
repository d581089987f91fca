// Element types of the op contract, free of torch and CUDA.
#pragma once

#include <cstdint>

namespace pagedkern {

enum class DType : int32_t { kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2: return 1;
  }
  return 0;
}

constexpr bool is_fp8(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

}  // namespace pagedkern
