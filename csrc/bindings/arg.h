// A tensor argument as the checks see it, read once from the dispatcher's handle.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "common/dtypes.h"
#ifdef PAGEDKERN_VGPU
#include "vgpu/device.h"
#endif

namespace pagedkern::bindings {

using torch::stable::Tensor;

enum class Kind : uint8_t { kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2, kInt32, kInt64, kUInt8, kOther };

// A set of kinds, one bit each.
using Kinds = uint32_t;
constexpr Kinds kinds(Kind kind) {
  return Kinds{1} << static_cast<uint32_t>(kind);
}
constexpr Kinds kHalfKinds = kinds(Kind::kFloat16) | kinds(Kind::kBFloat16);
constexpr Kinds kFp8Kinds = kinds(Kind::kFloat8E4M3) | kinds(Kind::kFloat8E5M2);
constexpr Kinds kIndexKinds = kinds(Kind::kInt32) | kinds(Kind::kInt64);

struct Arg {
  const char* name;         // the argument's name in the schema
  int32_t list_index = -1;  // its place in a list of tensors, -1: not in a list
  bool is_none = false;     // None where a tensor belongs: fits no shape, dtype or device
  char* data = nullptr;
  const int64_t* sizes = nullptr;    // [dim], owned by the tensor
  const int64_t* strides = nullptr;  // [dim], elements, owned by the tensor
  int64_t dim = 0;
  int64_t numel = 0;
  int64_t itemsize = 0;      // bytes
  int64_t extent = 0;        // bytes from data to behind the last element, 0 when empty
  int32_t scalar_type = -1;  // torch's code
  Kind kind = Kind::kOther;
  int32_t device_type = -1;  // torch's code
  int32_t device_index = 0;
#ifdef PAGEDKERN_VGPU
  vgpu::MemoryGrant grant;  // the kernels of a call may use its arguments' memory, and nothing else
#endif

  Arg(const char* name, const Tensor& tensor, int32_t list_index = -1);

  int64_t size(int64_t d) const { return sizes[d]; }
  int64_t stride(int64_t d) const { return strides[d]; }
  bool is(Kinds allowed) const { return (kinds(kind) & allowed) != 0; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }

  DType dtype() const;             // of a floating kind
  std::string label() const;       // "key" or "key_caches[3]"
  std::string dtype_name() const;  // "bfloat16"
  std::string device_name() const;
  std::string shape() const;        // "[3, 4]"
  std::string stride_text() const;  // "(4, 1)"
};

// Tensor? as an argument: nothing where None was given.
inline std::optional<Arg> optional_arg(const char* name, const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? std::optional<Arg>(std::in_place, name, *tensor) : std::nullopt;
}

std::string kind_names(Kinds allowed);  // "bfloat16 or float16"

}  // namespace pagedkern::bindings
