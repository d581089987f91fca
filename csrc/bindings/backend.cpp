#include "bindings/backend.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "bindings/checks_only.h"

namespace pagedkern::bindings {

const Backend& backend_for(const char* op, const Arg& tensor) {
  if (tensor.is_none) throw std::runtime_error(std::string(op) + ": " + tensor.label() + " must be a tensor, got None");
  if (checks_only_level() > 0) return kChecksOnly;
  static const int32_t cpu = aoti_torch_device_type_cpu();
  static const int32_t cuda = aoti_torch_device_type_cuda();
  const Backend* backend = tensor.device_type == cpu    ? kCpuTensors
                           : tensor.device_type == cuda ? kCudaTensors
                                                        : nullptr;
  if (backend != nullptr) return *backend;
  throw std::runtime_error(std::string(op) + ": " + tensor.label() + " is on " + tensor.device_name() +
                           ", but this build of pagedkern has no kernels for it" +
                           (tensor.device_type == cuda ? "; pagedkern.build_info() says what is in" : ""));
}

}  // namespace pagedkern::bindings
