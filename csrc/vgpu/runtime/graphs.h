// What a call on a stream comes to while a stream is captured.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

namespace pagedkern::vgpu::runtime {

// Does the work now, or keeps it where the stream is captured. A launch that is refused is an error code; a fault of a
// kernel leaves as a KernelFault.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);

// For calls that no capture outlives: the error, or cudaSuccess where nothing is captured.
cudaError_t refuse_in_capture(const char* call, cudaError_t error = cudaErrorStreamCaptureUnsupported);
// For calls that only a relaxed one does.
cudaError_t refuse_unless_relaxed(const char* call);

}  // namespace pagedkern::vgpu::runtime
