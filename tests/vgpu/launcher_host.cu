// Launchers called as no tensor of the virtual GPU makes the bindings call them.
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
