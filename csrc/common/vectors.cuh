// Accesses of a width that is known when the kernel is compiled.
#pragma once

#include <cstdint>

#include "common/access_width.h"

namespace pagedkern {

// The type of one access.
template <int kBytes>
struct Access;
template <>
struct Access<16> {
  using Type = uint4;
};
template <>
struct Access<8> {
  using Type = uint2;
};
template <>
struct Access<4> {
  using Type = uint32_t;
};
template <>
struct Access<2> {
  using Type = uint16_t;
};
template <>
struct Access<1> {
  using Type = uint8_t;
};

}  // namespace pagedkern
