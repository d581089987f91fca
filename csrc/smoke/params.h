// _smoke_add, the smallest kernel there is: it proves the road from source to device.
#pragma once

#include <cstdint>

namespace pagedkern {

// y[i] += alpha * x[i]
struct SmokeAddParams {
  const float* x;  // [num_elements]
  float* y;        // [num_elements]
  int64_t num_elements;
  float alpha;
};

}  // namespace pagedkern
