// Scratch memory for calls that bring no workspace.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#ifdef PAGEDKERN_VGPU
#include <cstring>

#include "vgpu/device.h"
#endif

namespace pagedkern::bindings {

// One buffer per device and stream. It grows, at least to twice its size, and what it outgrew is never given back:
// kernels in flight and captured graphs may still use it. So graphs captured from one stream share its buffer, and must
// not run at the same time; calls with a workspace of their own may.
class DeviceWorkspaces {
 public:
  struct Memory {
    void* data = nullptr;
    int64_t bytes = 0;
  };

  // At least `bytes` on the current device, with any content. Allocates on first use and growth only, also under
  // capture; no memory: data is null.
  Memory at_least(int64_t bytes, int32_t device, void* stream) {
    const std::lock_guard lock(mutex_);
    Memory& memory = memories_[{device, stream}];
    if (memory.bytes < bytes) {
      const int64_t size = bytes > 2 * memory.bytes ? bytes : 2 * memory.bytes;
      void* data = allocate(size);
      if (data == nullptr) return {};
      memory = {data, size};
    }
    return memory;
  }

 private:
  static void* allocate(int64_t bytes) {
    void* data = nullptr;
    // A plain allocation is no part of a capture; only the relaxed mode allows it meanwhile.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    if (cudaMalloc(&data, static_cast<size_t>(bytes)) != cudaSuccess) {
      data = nullptr;
      (void)cudaGetLastError();  // told by the caller
    }
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
#ifdef PAGEDKERN_VGPU
    // Anything may be in it; the virtual GPU would call reading it a fault all the same.
    if (data != nullptr) {
      std::memset(data, 0xFF, static_cast<size_t>(bytes));
      vgpu::device_written(data, static_cast<uint64_t>(bytes));
    }
#endif
    return data;
  }

  std::mutex mutex_;
  std::map<std::pair<int32_t, void*>, Memory> memories_;
};

}  // namespace pagedkern::bindings
