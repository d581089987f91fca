#include "bindings/arg.h"

#include <torch/csrc/stable/library.h>

#include <array>

namespace pagedkern::bindings {
namespace {

struct DtypeRow {
  int32_t code;
  Kind kind;
  const char* name;
};

// torch's codes are only known at run time in the stable ABI.
const auto& dtype_rows() {
  static const std::array<DtypeRow, 19> rows = {{
      {aoti_torch_dtype_bfloat16(), Kind::kBFloat16, "bfloat16"},
      {aoti_torch_dtype_float16(), Kind::kFloat16, "float16"},
      {aoti_torch_dtype_float32(), Kind::kFloat32, "float32"},
      {aoti_torch_dtype_float8_e4m3fn(), Kind::kFloat8E4M3, "float8_e4m3fn"},
      {aoti_torch_dtype_float8_e5m2(), Kind::kFloat8E5M2, "float8_e5m2"},
      {aoti_torch_dtype_int32(), Kind::kInt32, "int32"},
      {aoti_torch_dtype_int64(), Kind::kInt64, "int64"},
      {aoti_torch_dtype_uint8(), Kind::kUInt8, "uint8"},
      {aoti_torch_dtype_float64(), Kind::kOther, "float64"},
      {aoti_torch_dtype_int8(), Kind::kOther, "int8"},
      {aoti_torch_dtype_int16(), Kind::kOther, "int16"},
      {aoti_torch_dtype_uint16(), Kind::kOther, "uint16"},
      {aoti_torch_dtype_uint32(), Kind::kOther, "uint32"},
      {aoti_torch_dtype_uint64(), Kind::kOther, "uint64"},
      {aoti_torch_dtype_bool(), Kind::kOther, "bool"},
      {aoti_torch_dtype_complex64(), Kind::kOther, "complex64"},
      {aoti_torch_dtype_complex128(), Kind::kOther, "complex128"},
      {aoti_torch_dtype_float8_e4m3fnuz(), Kind::kOther, "float8_e4m3fnuz"},
      {aoti_torch_dtype_float8_e5m2fnuz(), Kind::kOther, "float8_e5m2fnuz"},
  }};
  return rows;
}

std::string join(const int64_t* values, int64_t count, char open, char close) {
  std::string text(1, open);
  for (int64_t i = 0; i < count; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(values[i]);
  }
  return text + close;
}

}  // namespace

Arg::Arg(const char* name, const Tensor& tensor, int32_t list_index) : name(name), list_index(list_index) {
  const AtenTensorHandle handle = tensor.get();
  bool defined = false;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_is_defined(handle, &defined));
  is_none = !defined;
  if (is_none) return;
  void* pointer = nullptr;
  int64_t* borrowed_sizes = nullptr;
  int64_t* borrowed_strides = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &pointer));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dim));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &borrowed_sizes));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &borrowed_strides));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &scalar_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &device_index));
  data = static_cast<char*>(pointer);
  sizes = borrowed_sizes;
  strides = borrowed_strides;
  itemsize = static_cast<int64_t>(aoti_torch_dtype_element_size(scalar_type));
  for (const DtypeRow& row : dtype_rows()) {
    if (row.code == scalar_type) {
      kind = row.kind;
      break;
    }
  }
  numel = 1;
  int64_t last = 0;
  for (int64_t d = 0; d < dim; ++d) {
    numel *= sizes[d];
    last += (sizes[d] - 1) * strides[d];
  }
  extent = numel == 0 ? 0 : (last + 1) * itemsize;
#ifdef PAGEDKERN_VGPU
  grant = vgpu::grant_memory(data, static_cast<uint64_t>(extent), label());
#endif
}

DType Arg::dtype() const {
  switch (kind) {
    case Kind::kFloat16: return DType::kFloat16;
    case Kind::kBFloat16: return DType::kBFloat16;
    case Kind::kFloat8E4M3: return DType::kFloat8E4M3;
    case Kind::kFloat8E5M2: return DType::kFloat8E5M2;
    default: return DType::kFloat32;
  }
}

std::string Arg::label() const {
  return list_index < 0 ? std::string(name) : std::string(name) + "[" + std::to_string(list_index) + "]";
}

std::string Arg::dtype_name() const {
  if (is_none) return "None";
  for (const DtypeRow& row : dtype_rows()) {
    if (row.code == scalar_type) return row.name;
  }
  return "dtype number " + std::to_string(scalar_type);
}

std::string Arg::device_name() const {
  if (is_none) return "None";
  if (device_type == aoti_torch_device_type_cpu()) return "cpu";
  const std::string index = ":" + std::to_string(device_index);
  if (device_type == aoti_torch_device_type_cuda()) return "cuda" + index;
  return "device type " + std::to_string(device_type) + index;
}

std::string Arg::shape() const {
  return is_none ? "None" : join(sizes, dim, '[', ']');
}

std::string Arg::stride_text() const {
  return join(strides, dim, '(', ')');
}

std::string kind_names(Kinds allowed) {
  std::string text;
  for (const DtypeRow& row : dtype_rows()) {
    if (row.kind == Kind::kOther || (kinds(row.kind) & allowed) == 0) continue;
    if (!text.empty()) text += " or ";
    text += row.name;
  }
  return text;
}

}  // namespace pagedkern::bindings
