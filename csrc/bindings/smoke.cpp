// `_smoke_add(Tensor x, Tensor(a!) y, float alpha)`: y += alpha * x on float32, contiguous, by the CUDA kernel alone.
#if defined(PAGEDKERN_WITH_CUDA) || defined(PAGEDKERN_VGPU)

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <stdexcept>
#include <string>

#include "bindings/arg.h"
#include "bindings/cuda_stream.h"
#include "smoke/launcher.h"

namespace pagedkern {
namespace {

using torch::stable::Tensor;

void check_smoke_tensor(const Tensor& tensor, const char* name) {
  if (tensor.scalar_type() != torch::headeronly::ScalarType::Float || !tensor.is_contiguous()) {
    throw std::runtime_error(std::string("_smoke_add: ") + name + ": expected a contiguous float32 tensor");
  }
}

void smoke_add(const Tensor x, Tensor y, double alpha) {
  check_smoke_tensor(x, "x");
  check_smoke_tensor(y, "y");
  if (x.numel() != y.numel()) throw std::runtime_error("_smoke_add: x and y: expected the same number of elements");
#ifdef PAGEDKERN_VGPU
  const bindings::Arg x_memory("x", x), y_memory("y", y);
  void* const stream = nullptr;
#else
  const torch::stable::accelerator::DeviceGuard guard(y.get_device_index());
  void* const stream = current_cuda_stream(y.get_device_index());
#endif
  const SmokeAddParams params{static_cast<const float*>(x.data_ptr()), static_cast<float*>(y.data_ptr()), y.numel(),
                              static_cast<float>(alpha)};
  const Status status = launch_smoke_add(params, stream);
  if (!status.ok()) throw std::runtime_error(std::string("_smoke_add: ") + status.message);
}

}  // namespace
}  // namespace pagedkern

STABLE_TORCH_LIBRARY_FRAGMENT(PAGEDKERN_NAMESPACE, m) {
  m.def("_smoke_add(Tensor x, Tensor(a!) y, float alpha) -> ()");
}

#ifdef PAGEDKERN_VGPU
STABLE_TORCH_LIBRARY_IMPL(PAGEDKERN_NAMESPACE, CPU, m) {
  m.impl("_smoke_add", TORCH_BOX(&pagedkern::smoke_add));
}
#else
STABLE_TORCH_LIBRARY_IMPL(PAGEDKERN_NAMESPACE, CUDA, m) {
  m.impl("_smoke_add", TORCH_BOX(&pagedkern::smoke_add));
}
#endif

#endif  // PAGEDKERN_WITH_CUDA || PAGEDKERN_VGPU
