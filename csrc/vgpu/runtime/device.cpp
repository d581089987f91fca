// The one device: an H200's numbers.
#include <cstring>

#include "vgpu/runtime/graphs.h"
#include "vgpu/runtime/limits.h"
#include "vgpu/runtime/modules.h"

using namespace pagedkern::vgpu;
using namespace pagedkern::vgpu::runtime;

namespace {

constexpr size_t kGlobalBytes = size_t{141} * 1000 * 1000 * 1000;
constexpr int kL2Bytes = 60 * 1024 * 1024;
constexpr int kPersistingL2Bytes = kL2Bytes * 5 / 8;
constexpr int kAccessWindowBytes = 128 * 1024 * 1024;
constexpr int kConstantBytes = 64 * 1024;
constexpr int kRuntimeVersion = 13000;

cudaError_t check_device(int device) {
  return device == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice, "device " + std::to_string(device) + " of 1");
}

struct Attribute {
  cudaDeviceAttr id;
  int value;
};

constexpr Attribute kAttributes[] = {
    {cudaDevAttrMaxThreadsPerBlock, DeviceLimits::kMaxThreads},
    {cudaDevAttrMaxBlockDimX, 1024},
    {cudaDevAttrMaxBlockDimY, 1024},
    {cudaDevAttrMaxBlockDimZ, 64},
    {cudaDevAttrMaxGridDimX, DeviceLimits::kMaxGridX},
    {cudaDevAttrMaxGridDimY, DeviceLimits::kMaxGridYZ},
    {cudaDevAttrMaxGridDimZ, DeviceLimits::kMaxGridYZ},
    {cudaDevAttrMaxSharedMemoryPerBlock, kDefaultSharedBytes},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, DeviceLimits::kMaxSharedBytes},
    {cudaDevAttrMaxSharedMemoryPerMultiprocessor, kSharedBytesOfMultiprocessor},
    {cudaDevAttrReservedSharedMemoryPerBlock, kReservedSharedBytes},
    {cudaDevAttrTotalConstantMemory, kConstantBytes},
    {cudaDevAttrWarpSize, kLanes},
    {cudaDevAttrMaxRegistersPerBlock, kRegisters},
    {cudaDevAttrMaxRegistersPerMultiprocessor, kRegisters},
    {cudaDevAttrMultiProcessorCount, DeviceLimits::kMultiprocessors},
    {cudaDevAttrL2CacheSize, kL2Bytes},
    {cudaDevAttrMaxPersistingL2CacheSize, kPersistingL2Bytes},
    {cudaDevAttrMaxAccessPolicyWindowSize, kAccessWindowBytes},
    {cudaDevAttrMaxThreadsPerMultiProcessor, kThreadsOfMultiprocessor},
    {cudaDevAttrMaxBlocksPerMultiprocessor, kBlocksOfMultiprocessor},
    {cudaDevAttrComputeCapabilityMajor, 9},
    {cudaDevAttrComputeCapabilityMinor, 0},
    {cudaDevAttrClockRate, 1980000},
    {cudaDevAttrMemoryClockRate, 3201000},
    {cudaDevAttrGlobalMemoryBusWidth, 6144},
    {cudaDevAttrAsyncEngineCount, 3},
    {cudaDevAttrConcurrentKernels, 1},
    {cudaDevAttrUnifiedAddressing, 1},
    {cudaDevAttrStreamPrioritiesSupported, 1},
    {cudaDevAttrGlobalL1CacheSupported, 1},
    {cudaDevAttrLocalL1CacheSupported, 1},
    {cudaDevAttrComputePreemptionSupported, 1},
    {cudaDevAttrCooperativeLaunch, 1},
    {cudaDevAttrClusterLaunch, 1},
    {cudaDevAttrIntegrated, 0},
    {cudaDevAttrEccEnabled, 1},
    {cudaDevAttrComputeMode, cudaComputeModeDefault},
    {cudaDevAttrManagedMemory, 0},
    {cudaDevAttrMemoryPoolsSupported, 0},
    {cudaDevAttrPageableMemoryAccess, 0},
    {cudaDevAttrCanMapHostMemory, 0},
};

}  // namespace

extern "C" {

cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
  if (const cudaError_t error = check_device(device); error != cudaSuccess) return error;
  for (const Attribute& a : kAttributes) {
    if (a.id != attribute) continue;
    *value = a.value;
    return cudaSuccess;
  }
  return fail(cudaErrorNotSupported, "device attribute " + std::to_string(attribute));
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* p, int device) {
  if (const cudaError_t error = check_device(device); error != cudaSuccess) return error;
  *p = {};
  std::strcpy(p->name, "NVIDIA H200 (virtual)");
  p->totalGlobalMem = kGlobalBytes;
  p->sharedMemPerBlock = kDefaultSharedBytes;
  p->sharedMemPerBlockOptin = DeviceLimits::kMaxSharedBytes;
  p->sharedMemPerMultiprocessor = kSharedBytesOfMultiprocessor;
  p->reservedSharedMemPerBlock = kReservedSharedBytes;
  p->regsPerBlock = p->regsPerMultiprocessor = kRegisters;
  p->warpSize = kLanes;
  p->maxThreadsPerBlock = DeviceLimits::kMaxThreads;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = DeviceLimits::kMaxGridX;
  p->maxGridSize[1] = p->maxGridSize[2] = DeviceLimits::kMaxGridYZ;
  p->totalConstMem = kConstantBytes;
  p->major = 9;
  p->multiProcessorCount = DeviceLimits::kMultiprocessors;
  p->maxThreadsPerMultiProcessor = kThreadsOfMultiprocessor;
  p->maxBlocksPerMultiProcessor = kBlocksOfMultiprocessor;
  p->l2CacheSize = kL2Bytes;
  p->persistingL2CacheMaxSize = kPersistingL2Bytes;
  p->accessPolicyMaxWindowSize = kAccessWindowBytes;
  p->memoryBusWidth = 6144;
  p->asyncEngineCount = 3;
  p->concurrentKernels = p->unifiedAddressing = p->streamPrioritiesSupported = 1;
  p->globalL1CacheSupported = p->localL1CacheSupported = p->computePreemptionSupported = 1;
  p->cooperativeLaunch = p->clusterLaunch = p->ECCEnabled = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  return check_device(device);
}

// Launches have run when their call returns.
cudaError_t cudaDeviceSynchronize() {
  return refuse_in_capture("cudaDeviceSynchronize");
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = kGlobalBytes;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kRuntimeVersion;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = kRuntimeVersion;
  return cudaSuccess;
}

}  // extern "C"
