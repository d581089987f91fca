// copy_blocks: plain memory traffic, the same code at every SIMD level.
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/share_work.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace pagedkern::cpu {
namespace {

// Beyond this the destination would only push other data out of the cache: it is written past it.
constexpr int64_t kStreamBytes = 16 << 20;

#if defined(__SSE2__)
void stream_run(char* destination, const char* source, int64_t bytes) {
  const int64_t head = -reinterpret_cast<intptr_t>(destination) & 63;
  if (bytes < head + 64) {
    std::memcpy(destination, source, static_cast<size_t>(bytes));
    return;
  }
  std::memcpy(destination, source, static_cast<size_t>(head));
  int64_t done = head;
  for (; done + 64 <= bytes; done += 64) {
    const __m128i* from = reinterpret_cast<const __m128i*>(source + done);
    __m128i* to = reinterpret_cast<__m128i*>(destination + done);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(destination + done, source + done, static_cast<size_t>(bytes - done));
}
void finish_stream() {
  _mm_sfence();
}
#else
void stream_run(char* destination, const char* source, int64_t bytes) {
  std::memcpy(destination, source, static_cast<size_t>(bytes));
}
void finish_stream() {}
#endif

// A block as runs of contiguous bytes in the order of memory: outer_count x inner_count runs of run_bytes.
struct BlockRuns {
  int64_t run_bytes;
  int64_t inner_count, inner_stride;  // bytes
  int64_t outer_count, outer_stride;  // bytes
};

BlockRuns runs_of(const PagedCache& cache, const CopyBlocksParams& params) {
  BlockRuns runs{static_cast<int64_t>(params.head_dim) * params.itemsize, params.num_kv_heads,
                 cache.stride_head * params.itemsize, params.block_size, cache.stride_token * params.itemsize};
  const auto swap_dims = [&] {
    runs = {runs.run_bytes, runs.outer_count, runs.outer_stride, runs.inner_count, runs.inner_stride};
  };
  if (runs.inner_count == 1 || (runs.outer_count > 1 && runs.outer_stride < runs.inner_stride)) swap_dims();
  for (int dim = 0; dim < 2 && (runs.inner_count == 1 || runs.inner_stride == runs.run_bytes); ++dim) {
    runs.run_bytes *= runs.inner_count;
    runs.inner_count = 1;
    swap_dims();
  }
  return runs;
}

void copy_block(const PagedCache& cache, const CopyBlocksParams& params, int64_t source_block,
                int64_t destination_block, bool stream) {
  const BlockRuns runs = runs_of(cache, params);
  char* data = static_cast<char*>(cache.data);
  const char* source = data + source_block * cache.stride_block * params.itemsize;
  char* destination = data + destination_block * cache.stride_block * params.itemsize;
  for (int64_t outer = 0; outer < runs.outer_count; ++outer) {
    for (int64_t inner = 0; inner < runs.inner_count; ++inner) {
      const int64_t offset = outer * runs.outer_stride + inner * runs.inner_stride;
      if (stream) {
        stream_run(destination + offset, source + offset, runs.run_bytes);
      } else {
        std::memcpy(destination + offset, source + offset, static_cast<size_t>(runs.run_bytes));
      }
    }
  }
}

}  // namespace

void copy_blocks(const CopyBlocksParams& params, const ThreadPool& pool) {
  const int64_t block_bytes = params.block_size * params.num_kv_heads * params.head_dim * params.itemsize;
  const int64_t items = params.num_layers * params.num_pairs * 2;
  const bool stream = items * block_bytes >= kStreamBytes;
  // Items in the order layer, side, pair: a thread stays in one tensor as long as it can.
  share_work(pool, items, 2 * items * block_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t pair = item % params.num_pairs, tensor = item / params.num_pairs;
      const CopyBlocksLayer& layer = params.layers[tensor / 2];
      const int64_t* ids = params.block_mapping + pair * params.mapping_stride_pair;
      const int64_t source = ids[0], destination = ids[params.mapping_stride_side];
      const bool in_range =
          source >= 0 && source < params.num_blocks && destination >= 0 && destination < params.num_blocks;
      if (in_range && source != destination) {
        copy_block(tensor % 2 == 0 ? layer.key_cache : layer.value_cache, params, source, destination, stream);
      }
    }
    if (stream) finish_stream();
  });
}

}  // namespace pagedkern::cpu
