// The driver's functions that launchers ask for by name.
#include <algorithm>
#include <cstring>

#include "vgpu/device.h"
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

cudaError_t entry_point(const char* symbol, void** function, enum cudaDriverEntryPointQueryResult* status) {
  const bool known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&encode_tiled) : nullptr;
  if (status != nullptr) *status = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
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
