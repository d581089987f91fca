// The memory of an argument as the host can read it, for checks of what tensors hold: itself, or a copy.
#pragma once

#include <vector>

#include "bindings/arg.h"
#include "bindings/backend.h"

namespace pagedkern::bindings {

class HostView {
 public:
  HostView(const Backend& backend, const Place& place, const Arg& arg) : HostView(backend, place, &arg) {}
  // Null where `arg` is.
  HostView(const Backend& backend, const Place& place, const Arg* arg) {
    if (arg == nullptr) return;
    data_ = arg->data;
    if (backend.read == nullptr || arg->extent == 0) return;
    copy_.resize(static_cast<size_t>(arg->extent));
    backend.read(copy_.data(), arg->data, arg->extent, place);
    data_ = copy_.data();
  }
  HostView(const HostView&) = delete;
  HostView& operator=(const HostView&) = delete;

  const char* data() const { return data_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(const_cast<char*>(data_));
  }

 private:
  std::vector<char> copy_;
  const char* data_ = nullptr;
};

// Rows of a [num_blocks, block_size, num_kv_heads, head_dim] cache as the host can read them, one at a time: a cache is
// too large to copy as a whole. A block that lies closely together is copied at once and kept until another is asked
// for.
class CacheRows {
 public:
  CacheRows(const Backend& backend, const Place& place, const Arg& cache)
      : backend_(backend), place_(place), cache_(cache) {
    span_ = cache.itemsize;
    for (int64_t d = 1; d < cache.dim; ++d) span_ += (cache.size(d) - 1) * cache.stride(d) * cache.itemsize;
    row_bytes_ = cache.size(3) * cache.itemsize;
    whole_ = span_ <= 4 * cache.size(1) * cache.size(2) * row_bytes_;
  }
  CacheRows(const CacheRows&) = delete;
  CacheRows& operator=(const CacheRows&) = delete;

  const char* row(int64_t block, int64_t token, int64_t head) {
    const char* base = cache_.data + block * cache_.stride(0) * cache_.itemsize;
    const int64_t offset = (token * cache_.stride(1) + head * cache_.stride(2)) * cache_.itemsize;
    if (backend_.read == nullptr) return base + offset;
    copy_.resize(static_cast<size_t>(whole_ ? span_ : row_bytes_));
    if (!whole_) {
      backend_.read(copy_.data(), base + offset, row_bytes_, place_);
      return copy_.data();
    }
    if (block != block_) backend_.read(copy_.data(), base, span_, place_);
    block_ = block;
    return copy_.data() + offset;
  }

 private:
  const Backend& backend_;
  const Place place_;
  const Arg& cache_;
  int64_t span_, row_bytes_;  // bytes from a block's first element to behind its last, and of a row
  bool whole_;
  int64_t block_ = -1;
  std::vector<char> copy_;
};

}  // namespace pagedkern::bindings
