// Stream capture and graphs, of one stream at a time: work on the captured stream is kept, in order, with the arguments
// it has then. Forks to other streams, nodes made by hand and updates are not there.
#include "vgpu/runtime/graphs.h"

#include <memory>
#include <string>
#include <utility>

#include "vgpu/capture.h"
#include "vgpu/runtime/modules.h"

namespace pagedkern::vgpu::runtime {
namespace {

cudaStreamCaptureMode& thread_mode() {
  thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  return mode;
}

cudaError_t perform(const std::function<void()>& work) {
  try {
    work();
  } catch (const LaunchError& error) {
    return fail(cudaErrorInvalidConfiguration, error.what());
  }
  return cudaSuccess;
}

// Handles of graphs, and of what is made of them to be launched, which here is the same.
using Handle = std::shared_ptr<Graph>;

Handle* to_handle(void* handle) {
  return static_cast<Handle*>(handle);
}

}  // namespace

cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
  Capture* capture = current_capture();
  if (capture == nullptr) return perform(work);
  if (capture->every_stream || stream == capture->stream) {
    capture->graph->add(std::move(work));
    return cudaSuccess;
  }
  if (stream != nullptr) return perform(work);
  return refuse_in_capture("work on the legacy default stream, which would wait for all others,",
                           cudaErrorStreamCaptureImplicit);
}

cudaError_t refuse_in_capture(const char* call, cudaError_t error) {
  Capture* capture = current_capture();
  if (capture == nullptr) return cudaSuccess;
  capture->invalid = true;
  return fail(error, std::string(call) + " while a stream is captured");
}

cudaError_t refuse_unless_relaxed(const char* call) {
  const Capture* capture = current_capture();
  const bool allowed = capture == nullptr || capture->relaxed || thread_mode() == cudaStreamCaptureModeRelaxed;
  return allowed ? cudaSuccess : refuse_in_capture(call);
}

}  // namespace pagedkern::vgpu::runtime

using namespace pagedkern::vgpu;
using namespace pagedkern::vgpu::runtime;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  if (stream == nullptr) {
    return fail(cudaErrorStreamCaptureUnsupported, "the legacy default stream cannot be captured");
  }
  if (!begin_capture(stream, false, mode == cudaStreamCaptureModeRelaxed)) {
    return fail(cudaErrorNotSupported, "a second capture in one thread");
  }
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  const Capture* capture = current_capture();
  if (capture == nullptr || capture->every_stream || capture->stream != stream) {
    return fail(cudaErrorStreamCaptureUnmatched, "this stream is not captured");
  }
  Handle ended = end_capture();
  if (ended == nullptr) return fail(cudaErrorStreamCaptureInvalidated, "by an earlier error");
  *graph = reinterpret_cast<cudaGraph_t>(new Handle(std::move(ended)));
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  const Capture* capture = current_capture();
  const bool is_captured = capture != nullptr && (capture->every_stream || capture->stream == stream);
  *status = !is_captured       ? cudaStreamCaptureStatusNone
            : capture->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
  std::swap(thread_mode(), *mode);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new Handle(*to_handle(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  const Handle graph = *to_handle(executable);
  return enqueue(stream, [graph] { graph->launch(); });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete to_handle(executable);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete to_handle(graph);
  return cudaSuccess;
}

}  // extern "C"
