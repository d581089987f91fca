// The driver's functions that launchers ask for by name.
#include <cuda.h>

#include <algorithm>
#include <cstring>

#include "vgpu/device.h"
#include "vgpu/runtime/graphs.h"
#include "vgpu/runtime/modules.h"

using namespace pagedkern::vgpu;
using namespace pagedkern::vgpu::runtime;

namespace {

constexpr int kCudaSuccess = 0, kCudaInvalidValue = 1;  // CUresult

// cuTensorMapEncodeTiled, its enumerations as the integers they are.
int encode_tiled(void* map, int type, uint32_t rank, void* address, const uint64_t* dims, const uint64_t* strides,
                 const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int l2_promotion,
                 int fill) {
  if (map == nullptr || rank == 0 || rank > kMaxTensorRank) return kCudaInvalidValue;
  TensorMap m;
  m.type = TmaType(std::clamp(type, 0, 255));
  m.rank = rank;
  m.address = reinterpret_cast<u64>(address);
  std::copy_n(dims, rank, m.dims.begin());
  if (rank > 1) std::copy_n(strides, rank - 1, m.strides.begin());
  std::copy_n(box, rank, m.box.begin());
  std::copy_n(element_strides, rank, m.element_strides.begin());
  m.interleave = u32(interleave);
  m.swizzle = u32(swizzle);
  m.l2_promotion = u32(l2_promotion);
  m.nan_fill = u32(fill);
  return make_tensor_map(m, static_cast<u8*>(map)).empty() ? kCudaSuccess : kCudaInvalidValue;
}

// cuMemcpyBatchAsync as of CUDA 12.8: as the driver does, it refuses the legacy default stream and captures. Attributes
// change nothing where every copy is done when its call returns, but they must be there and make sense.
int copy_batch(void** to, void** from, size_t* bytes, size_t count, const CUmemcpyAttributes* attributes,
               const size_t* first_of_attributes, size_t num_attributes, size_t* failed, void* stream) {
  const cudaError_t refused = refuse_in_capture("cuMemcpyBatchAsync");
  if (refused != cudaSuccess) return refused;
  if (stream == nullptr || count == 0 || num_attributes == 0 || first_of_attributes[0] != 0) return kCudaInvalidValue;
  for (size_t i = 0; i < num_attributes; ++i) {
    if (attributes[i].srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_INVALID) return kCudaInvalidValue;
  }
  for (size_t i = 0; i < count; ++i) {
    if (to[i] == nullptr || from[i] == nullptr || bytes[i] == 0) {
      if (failed != nullptr) *failed = i;
      return kCudaInvalidValue;
    }
    std::memmove(to[i], from[i], bytes[i]);
    device_written(to[i], bytes[i]);
  }
  return kCudaSuccess;
}

struct EntryPoint {
  const char* name;
  void* function;
};

const EntryPoint kEntryPoints[] = {
    {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(&encode_tiled)},
    {"cuMemcpyBatchAsync", reinterpret_cast<void*>(&copy_batch)},
};

cudaError_t entry_point(const char* symbol, void** function, enum cudaDriverEntryPointQueryResult* status) {
  *function = nullptr;
  for (const EntryPoint& entry : kEntryPoints) {
    if (std::strcmp(symbol, entry.name) == 0) *function = entry.function;
  }
  if (status != nullptr) {
    *status = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long,
                                    enum cudaDriverEntryPointQueryResult* status) {
  return entry_point(symbol, function, status);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             enum cudaDriverEntryPointQueryResult* status) {
  return entry_point(symbol, function, status);
}

}  // extern "C"
