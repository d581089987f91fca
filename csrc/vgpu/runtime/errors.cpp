// The error of the calling thread and the texts of those this runtime gives.
#include <string>
#include <unordered_set>
#include <utility>

#include "vgpu/runtime/modules.h"

namespace pagedkern::vgpu::runtime {
namespace {

struct LastError {
  cudaError_t error = cudaSuccess;      // until cudaGetLastError
  cudaError_t explained = cudaSuccess;  // the error `text` belongs to
  const char* text = "";
};

LastError& last_error() {
  thread_local LastError last;
  return last;
}

// Callers keep what cudaGetErrorString gives, as with the real one; there are few different texts.
const char* keep(const std::string& text) {
  static std::mutex mutex;
  static auto* kept = new std::unordered_set<std::string>;
  const std::lock_guard lock(mutex);
  return kept->insert(text).first->c_str();
}

struct Text {
  cudaError_t error;
  const char* name;
  const char* text;
};

#define PAGEDKERN_ERROR(name, text) {name, #name, text}
constexpr Text kTexts[] = {
    PAGEDKERN_ERROR(cudaSuccess, "no error"),
    PAGEDKERN_ERROR(cudaErrorInvalidValue, "invalid argument"),
    PAGEDKERN_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    PAGEDKERN_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    PAGEDKERN_ERROR(cudaErrorInvalidSymbol, "invalid device symbol"),
    PAGEDKERN_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    PAGEDKERN_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    PAGEDKERN_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    PAGEDKERN_ERROR(cudaErrorInvalidClusterSize, "invalid cluster size"),
    PAGEDKERN_ERROR(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"),
    PAGEDKERN_ERROR(cudaErrorCooperativeLaunchTooLarge, "too many blocks in cooperative launch"),
    PAGEDKERN_ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    PAGEDKERN_ERROR(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    PAGEDKERN_ERROR(cudaErrorStreamCaptureUnmatched, "capture was not initiated in this stream"),
    PAGEDKERN_ERROR(cudaErrorStreamCaptureImplicit,
                    "operation would make the legacy stream depend on a capturing stream"),
    PAGEDKERN_ERROR(cudaErrorNotSupported, "operation not supported"),
};
#undef PAGEDKERN_ERROR

const Text* find_text(cudaError_t error) {
  for (const Text& t : kTexts) {
    if (t.error == error) return &t;
  }
  return nullptr;
}

}  // namespace

cudaError_t fail(cudaError_t error, const std::string& why) {
  const Text* text = find_text(error);
  const std::string plain = text == nullptr ? "error " + std::to_string(error) : text->text;
  last_error() = {error, error, keep(why.empty() ? plain : plain + ": " + why)};
  return error;
}

}  // namespace pagedkern::vgpu::runtime

using namespace pagedkern::vgpu::runtime;

extern "C" {

cudaError_t cudaGetLastError() {
  return std::exchange(last_error().error, cudaSuccess);
}

cudaError_t cudaPeekAtLastError() {
  return last_error().error;
}

const char* cudaGetErrorString(cudaError_t error) {
  if (error != cudaSuccess && error == last_error().explained) return last_error().text;
  const Text* text = find_text(error);
  return text == nullptr ? "unrecognized error code" : text->text;
}

const char* cudaGetErrorName(cudaError_t error) {
  const Text* text = find_text(error);
  return text == nullptr ? "unrecognized error code" : text->name;
}

}  // extern "C"
