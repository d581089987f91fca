// swap_blocks: the transfers, by as few calls as the driver allows.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <array>
#include <mutex>
#include <vector>

#include "block_copy/launcher.h"
#include "common/launch.h"

namespace pagedkern {
namespace {

using BatchCopy = PFN_cuMemcpyBatchAsync_v12080;

constexpr int kBatchVersion = 12080;           // the CUDA version that brought it, with the signature of then
constexpr int64_t kMaxPitch = (1u << 31) - 1;  // of cudaMemcpy2DAsync
constexpr int kMaxDevices = 64;

// Null where the driver lacks it.
BatchCopy batch_copy() {
  static const BatchCopy found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuMemcpyBatchAsync", &function, kBatchVersion, cudaEnableDefault, &result);
    if (error != cudaSuccess) (void)cudaGetLastError();
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<BatchCopy>(function)
                                                                         : nullptr;
  }();
  return found;
}

Status copy_each(const std::vector<RowCopy>& copies, cudaStream_t stream) {
  for (const RowCopy& c : copies) {
    const auto bytes = static_cast<size_t>(c.bytes);
    const Status status = to_status(cudaMemcpyAsync(c.destination, c.source, bytes, cudaMemcpyDefault, stream));
    if (!status.ok()) return status;
  }
  return {};
}

// The batched copy refuses the legacy default stream, torch's default: a stream of our own does the work between two
// events of that one. One for each device, made when first needed.
class SideStream {
 public:
  template <class Work>
  Status run(cudaStream_t legacy, Work&& work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Status status = create();
    if (status.ok()) status = to_status(cudaEventRecord(ready_, legacy));
    if (status.ok()) status = to_status(cudaStreamWaitEvent(stream_, ready_, 0));
    if (status.ok()) status = work(stream_);
    if (status.ok()) status = to_status(cudaEventRecord(done_, stream_));
    if (status.ok()) status = to_status(cudaStreamWaitEvent(legacy, done_, 0));
    return status;
  }

 private:
  Status create() {
    if (stream_ != nullptr) return {};
    Status status = to_status(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming));
    if (status.ok()) status = to_status(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming));
    if (status.ok()) status = to_status(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    return status;
  }

  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t ready_ = nullptr, done_ = nullptr;
};

SideStream& side_stream(int device) {
  // Never destroyed: the runtime may be gone before static destructors run.
  static auto* streams = new std::array<SideStream, kMaxDevices>;
  return (*streams)[static_cast<size_t>(device)];
}

Status copy_at_once(BatchCopy batch, const std::vector<RowCopy>& copies, cudaStream_t stream) {
  std::vector<CUdeviceptr> to, from;
  std::vector<size_t> bytes;
  for (const RowCopy& c : copies) {
    to.push_back(reinterpret_cast<CUdeviceptr>(c.destination));
    from.push_back(reinterpret_cast<CUdeviceptr>(c.source));
    bytes.push_back(static_cast<size_t>(c.bytes));
  }
  CUmemcpyAttributes attributes = {};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  size_t first_of_attributes = 0, failed = 0;
  const CUresult result = batch(to.data(), from.data(), bytes.data(), bytes.size(), &attributes, &first_of_attributes,
                                1, &failed, reinterpret_cast<CUstream>(stream));
  if (result == CUDA_ERROR_NOT_SUPPORTED) return copy_each(copies, stream);
  return to_status(static_cast<cudaError_t>(result));  // the two enumerations share their numbers
}

// Pageable memory is staged by the runtime's own copies.
bool is_pageable(const void* pointer) {
  cudaPointerAttributes attributes = {};
  if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
    (void)cudaGetLastError();
    return true;
  }
  return attributes.type == cudaMemoryTypeUnregistered;
}

Status copy_plain(const std::vector<RowCopy>& copies, cudaStream_t stream, bool batched) {
  if (!batched || copies.size() == 1) return copy_each(copies, stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  Status status = to_status(cudaStreamIsCapturing(stream, &capture));
  if (!status.ok()) return status;
  if (capture != cudaStreamCaptureStatusNone) return copy_each(copies, stream);  // a graph takes plain copies alone
  const BatchCopy batch = batch_copy();
  if (batch == nullptr || is_pageable(copies[0].source) || is_pageable(copies[0].destination)) {
    return copy_each(copies, stream);
  }
  if (stream != nullptr && stream != cudaStreamLegacy) return copy_at_once(batch, copies, stream);
  int device = 0;
  status = to_status(cudaGetDevice(&device));
  if (!status.ok()) return status;
  if (device >= kMaxDevices) return copy_each(copies, stream);
  return side_stream(device).run(stream, [&](cudaStream_t side) { return copy_at_once(batch, copies, side); });
}

// Whether one call moves all of its rows.
bool is_pitched(const RowCopy& c) {
  return c.rows > 1 && c.source_pitch >= c.bytes && c.destination_pitch >= c.bytes && c.source_pitch <= kMaxPitch &&
         c.destination_pitch <= kMaxPitch;
}

}  // namespace

Status launch_copy_rows(const RowCopy* copies, int64_t count, void* stream, bool batched) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  std::vector<RowCopy> plain;
  for (int64_t i = 0; i < count; ++i) {
    const RowCopy& c = copies[i];
    if (!is_pitched(c)) {
      for (int64_t row = 0; row < c.rows; ++row) {
        plain.push_back(
            {c.destination + row * c.destination_pitch, c.source + row * c.source_pitch, c.bytes, c.bytes, c.bytes, 1});
      }
      continue;
    }
    const Status status = to_status(cudaMemcpy2DAsync(c.destination, static_cast<size_t>(c.destination_pitch), c.source,
                                                      static_cast<size_t>(c.source_pitch), static_cast<size_t>(c.bytes),
                                                      static_cast<size_t>(c.rows), cudaMemcpyDefault, cuda_stream));
    if (!status.ok()) return status;
  }
  return plain.empty() ? Status{} : copy_plain(plain, cuda_stream, batched);
}

}  // namespace pagedkern
