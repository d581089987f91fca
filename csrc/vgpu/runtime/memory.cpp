// Memory: allocations, copies and fills, all done when the call returns, except on a stream that is captured.
#include <cstdlib>
#include <cstring>

#include "vgpu/device.h"
#include "vgpu/runtime/graphs.h"
#include "vgpu/runtime/modules.h"

using namespace pagedkern::vgpu;
using namespace pagedkern::vgpu::runtime;

namespace {

void copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  std::memmove(to, from, bytes);
  device_written(to, bytes);
}

cudaError_t copy_async(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  return enqueue(stream, [=] { copy(to, from, bytes); });
}

cudaError_t copy_rows_async(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                            cudaStream_t stream) {
  if (height > 1 && (width > to_pitch || width > from_pitch)) {
    return fail(cudaErrorInvalidValue, "rows of " + std::to_string(width) + " bytes are wider than their pitch");
  }
  return enqueue(stream, [=] {
    for (size_t row = 0; row < height; ++row) {
      copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    }
  });
}

// Calls that have a result when they return wait for the legacy default stream.
cudaError_t refuse_to_wait(const char* call) {
  return refuse_in_capture(call, cudaErrorStreamCaptureImplicit);
}

// The bytes [offset, offset + count) of a variable, or null with the error set.
u8* part_of_symbol(const void* symbol, size_t offset, size_t count) {
  const ModuleVariable* variable = find_variable(symbol);
  if (variable == nullptr) {
    fail(cudaErrorInvalidSymbol, "no variable is registered for it");
    return nullptr;
  }
  if (offset > variable->bytes || count > variable->bytes - offset) {
    fail(cudaErrorInvalidValue, variable->name + " has " + std::to_string(variable->bytes) + " bytes");
    return nullptr;
  }
  return variable->data + offset;
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  const cudaError_t refused = refuse_unless_relaxed("cudaMalloc");
  if (refused != cudaSuccess) return refused;
  *pointer = bytes == 0 ? nullptr : device_allocate(bytes);
  return bytes == 0 || *pointer != nullptr ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  const cudaError_t refused = refuse_in_capture("cudaMallocAsync", cudaErrorNotSupported);
  return refused != cudaSuccess ? refused : cudaMalloc(pointer, bytes);
}

cudaError_t cudaFree(void* pointer) {
  const cudaError_t refused = refuse_unless_relaxed("cudaFree");
  if (refused != cudaSuccess) return refused;
  if (pointer == nullptr || device_release(pointer)) return cudaSuccess;
  return fail(cudaErrorInvalidValue, "cudaFree of what cudaMalloc did not give, or freed before");
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) {
  const cudaError_t refused = refuse_in_capture("cudaFreeAsync", cudaErrorNotSupported);
  return refused != cudaSuccess ? refused : cudaFree(pointer);
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  *pointer = std::malloc(bytes == 0 ? 1 : bytes);
  return *pointer != nullptr ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return cudaMallocHost(pointer, bytes);
}

cudaError_t cudaFreeHost(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, enum cudaMemcpyKind) {
  const cudaError_t refused = refuse_to_wait("cudaMemcpy");
  return refused != cudaSuccess ? refused : copy_async(to, from, bytes, nullptr);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, enum cudaMemcpyKind, cudaStream_t stream) {
  return copy_async(to, from, bytes, stream);
}

cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                         enum cudaMemcpyKind) {
  const cudaError_t refused = refuse_to_wait("cudaMemcpy2D");
  return refused != cudaSuccess ? refused : copy_rows_async(to, to_pitch, from, from_pitch, width, height, nullptr);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind, cudaStream_t stream) {
  return copy_rows_async(to, to_pitch, from, from_pitch, width, height, stream);
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  return enqueue(stream, [=] {
    if (bytes == 0) return;
    std::memset(pointer, value, bytes);
    device_written(pointer, bytes);
  });
}

cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  const cudaError_t refused = refuse_to_wait("cudaMemset");
  return refused != cudaSuccess ? refused : cudaMemsetAsync(pointer, value, bytes, nullptr);
}

cudaError_t cudaMemcpyToSymbolAsync(const void* symbol, const void* from, size_t bytes, size_t offset,
                                    enum cudaMemcpyKind, cudaStream_t stream) {
  u8* to = part_of_symbol(symbol, offset, bytes);
  return to == nullptr ? cudaPeekAtLastError() : copy_async(to, from, bytes, stream);
}

cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset,
                               enum cudaMemcpyKind kind) {
  const cudaError_t refused = refuse_to_wait("cudaMemcpyToSymbol");
  return refused != cudaSuccess ? refused : cudaMemcpyToSymbolAsync(symbol, from, bytes, offset, kind, nullptr);
}

cudaError_t cudaMemcpyFromSymbolAsync(void* to, const void* symbol, size_t bytes, size_t offset, enum cudaMemcpyKind,
                                      cudaStream_t stream) {
  const u8* from = part_of_symbol(symbol, offset, bytes);
  return from == nullptr ? cudaPeekAtLastError() : copy_async(to, from, bytes, stream);
}

cudaError_t cudaMemcpyFromSymbol(void* to, const void* symbol, size_t bytes, size_t offset, enum cudaMemcpyKind kind) {
  const cudaError_t refused = refuse_to_wait("cudaMemcpyFromSymbol");
  return refused != cudaSuccess ? refused : cudaMemcpyFromSymbolAsync(to, symbol, bytes, offset, kind, nullptr);
}

cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  *address = part_of_symbol(symbol, 0, 0);
  return *address == nullptr ? cudaPeekAtLastError() : cudaSuccess;
}

cudaError_t cudaGetSymbolSize(size_t* bytes, const void* symbol) {
  const ModuleVariable* variable = find_variable(symbol);
  if (variable == nullptr) return fail(cudaErrorInvalidSymbol, "no variable is registered for it");
  *bytes = variable->bytes;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  const bool owned = device_owns(pointer);
  attributes->type = owned ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  attributes->devicePointer = owned ? const_cast<void*>(pointer) : nullptr;
  attributes->hostPointer = owned ? nullptr : const_cast<void*>(pointer);
  return cudaSuccess;
}

}  // extern "C"
