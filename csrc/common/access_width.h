// How wide an access every row of a set of pointers and strides allows.
#pragma once

#include <cstdint>

namespace pagedkern {

// Gathers addresses and byte strides; width() is the widest power of two up to 16 bytes that divides them all.
class AccessWidth {
 public:
  AccessWidth& pointer(const void* address) {
    return bytes(static_cast<int64_t>(reinterpret_cast<uintptr_t>(address)));
  }
  AccessWidth& bytes(int64_t count) {
    bits_ |= static_cast<uint64_t>(count);
    return *this;
  }
  int width() const { return static_cast<int>(bits_ & (~bits_ + 1)); }

 private:
  uint64_t bits_ = 16;
};

}  // namespace pagedkern
