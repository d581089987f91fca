// Launchers called as no tensor of the virtual GPU makes the bindings call them.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "block_copy/launcher.h"

// copy_blocks over `data` [2 * layers, blocks, block_bytes], with the mapping on either side.
extern "C" const char* copy_many(char* data, int layers, int blocks, int block_bytes, const int64_t* pairs,
                                 int num_pairs, int on_host) {
  const size_t cache_bytes = size_t(blocks) * block_bytes, bytes = 2 * layers * cache_bytes;
  char* device = nullptr;
  int64_t* device_pairs = nullptr;
  cudaMalloc(&device, bytes);
  cudaMalloc(&device_pairs, num_pairs * 2 * sizeof(int64_t));
  cudaMemcpy(device, data, bytes, cudaMemcpyHostToDevice);
  cudaMemcpy(device_pairs, pairs, num_pairs * 2 * sizeof(int64_t), cudaMemcpyHostToDevice);
  std::vector<pagedkern::CopyBlocksLayer> list(layers);
  for (int i = 0; i < layers; ++i) {
    list[i].key_cache = {device + 2 * i * cache_bytes, block_bytes, block_bytes, block_bytes};
    list[i].value_cache = {device + (2 * i + 1) * cache_bytes, block_bytes, block_bytes, block_bytes};
  }
  pagedkern::CopyBlocksParams params = {};
  params.layers = list.data();
  params.num_layers = layers;
  params.num_blocks = blocks;
  params.block_size = params.num_kv_heads = params.itemsize = 1;
  params.head_dim = block_bytes;
  params.block_mapping = on_host ? pairs : device_pairs;
  params.mapping_stride_pair = 2;
  params.mapping_stride_side = 1;
  params.num_pairs = num_pairs;
  params.mapping_on_host = on_host != 0;
  const pagedkern::Status status = pagedkern::launch_copy_blocks(params, nullptr);
  cudaMemcpy(data, device, bytes, cudaMemcpyDeviceToHost);
  cudaFree(device);
  cudaFree(device_pairs);
  return status.message;
}

// launch_copy_rows between device memory that holds `from` and device memory that comes back as `to`. copies: [count,
// 6] of destination and source offset, their pitches, bytes, rows.
extern "C" const char* copy_rows(const char* from, int from_bytes, char* to, int to_bytes, const int64_t* copies,
                                 int count, int own_stream, int batched) {
  char *source = nullptr, *destination = nullptr;
  cudaMalloc(&source, from_bytes);
  cudaMalloc(&destination, to_bytes);
  cudaMemcpy(source, from, from_bytes, cudaMemcpyHostToDevice);
  cudaMemcpy(destination, to, to_bytes, cudaMemcpyHostToDevice);
  std::vector<pagedkern::RowCopy> list;
  for (const int64_t* c = copies; c < copies + 6 * count; c += 6) {
    list.push_back({destination + c[0], source + c[1], c[2], c[3], c[4], c[5]});
  }
  cudaStream_t stream = nullptr;
  if (own_stream != 0) cudaStreamCreate(&stream);
  const pagedkern::Status status = pagedkern::launch_copy_rows(list.data(), count, stream, batched != 0);
  cudaMemcpy(to, destination, to_bytes, cudaMemcpyDeviceToHost);
  if (own_stream != 0) cudaStreamDestroy(stream);
  cudaFree(source);
  cudaFree(destination);
  return status.message;
}

// The batched copy itself, as drivers have it: bytes of one copy, on the legacy default stream or another.
extern "C" int copy_batch(char* to, const char* from, int bytes, int own_stream) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion("cuMemcpyBatchAsync", &function, 12080, cudaEnableDefault, &found);
  if (found != cudaDriverEntryPointSuccess) return -1;
  auto destination = reinterpret_cast<CUdeviceptr>(to), source = reinterpret_cast<CUdeviceptr>(from);
  size_t size = bytes, first = 0, failed = 7;
  CUmemcpyAttributes attributes = {};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  cudaStream_t stream = nullptr;
  if (own_stream != 0) cudaStreamCreate(&stream);
  const auto batch = reinterpret_cast<PFN_cuMemcpyBatchAsync_v12080>(function);
  const CUresult result = batch(&destination, &source, &size, 1, &attributes, &first, 1, &failed, stream);
  if (own_stream != 0) cudaStreamDestroy(stream);
  return result == CUDA_SUCCESS ? 0 : failed == 0 ? 100 + result : result;
}
