// Streams and events: everything runs in order, and has run when its call returns, except on a stream that is captured
// (graphs.cpp). Events keep the host's time.
#include <chrono>

#include "vgpu/runtime/graphs.h"
#include "vgpu/runtime/modules.h"

using namespace pagedkern::vgpu::runtime;

namespace {

using Clock = std::chrono::steady_clock;

struct Event {
  Clock::time_point time;
  bool recorded = false;
};

Event* to_event(cudaEvent_t event) {
  return reinterpret_cast<Event*>(event);
}

}  // namespace

extern "C" {

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = reinterpret_cast<cudaStream_t>(new char);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return cudaStreamCreate(stream);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return cudaStreamCreate(stream);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete reinterpret_cast<char*>(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return refuse_in_capture("cudaStreamSynchronize");
}

cudaError_t cudaStreamQuery(cudaStream_t) {
  return refuse_in_capture("cudaStreamQuery");
}

cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return refuse_in_capture("cudaStreamWaitEvent", cudaErrorNotSupported);  // it could make another stream part of it
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return cudaEventCreate(event);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete to_event(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *to_event(event) = {Clock::now(), true};
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t) {
  return refuse_in_capture("cudaEventSynchronize");
}

cudaError_t cudaEventQuery(cudaEvent_t) {
  return refuse_in_capture("cudaEventQuery");
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!to_event(start)->recorded || !to_event(end)->recorded) {
    return fail(cudaErrorInvalidResourceHandle, "an event that was not recorded");
  }
  *milliseconds = std::chrono::duration<float, std::milli>(to_event(end)->time - to_event(start)->time).count();
  return cudaSuccess;
}

}  // extern "C"
