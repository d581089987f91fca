// Memory that is kept from call to call and only grows.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace pagedkern::cpu {

class Buffer {
 public:
  char* at_least(int64_t bytes) {
    if (bytes > size_) {
      size_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
      data_.reset(static_cast<char*>(std::aligned_alloc(4096, static_cast<size_t>(size_))));
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> data_;
  int64_t size_ = 0;
};

}  // namespace pagedkern::cpu
