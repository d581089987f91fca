// The current CUDA stream, without a link to the CUDA half of torch: one op library loads under CPU builds of torch
// too, where the symbol is missing and no CUDA tensor ever reaches a binding.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <stdexcept>

extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace pagedkern {

inline void* current_cuda_stream(int32_t device_index) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr ||
      aoti_torch_get_current_cuda_stream(device_index, &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("pagedkern: this torch gives no current CUDA stream");
  }
  return stream;
}

}  // namespace pagedkern
