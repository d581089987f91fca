// copy_blocks, swap_blocks.
#pragma once

#include <cstdint>

#include "common/paged_cache.h"

namespace pagedkern {

// One cache tensor of one layer. Elements are moved as bytes; strides are given in elements of itemsize.
struct CopyBlocksLayer {
  PagedCache key_cache;
  PagedCache value_cache;
};

struct CopyBlocksParams {
  const CopyBlocksLayer* layers;  // [num_layers], host memory
  int32_t num_layers;
  int64_t num_blocks;  // the smallest over the layers: ids beyond it are out of range
  int64_t block_size;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t itemsize;              // bytes of one element
  const int64_t* block_mapping;  // [num_pairs, 2] (source, destination)
  int64_t mapping_stride_pair;   // elements
  int64_t mapping_stride_side;   // elements
  int64_t num_pairs;
  bool mapping_on_host;  // host memory, read before the call returns; else memory of the device
};

// `rows` rows of `bytes` bytes each, their starts a pitch apart on either side.
struct RowCopy {
  char* destination;
  const char* source;
  int64_t destination_pitch;  // bytes
  int64_t source_pitch;       // bytes
  int64_t bytes;
  int64_t rows;
};

}  // namespace pagedkern
