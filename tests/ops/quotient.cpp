// Counts quotients that are not the IEEE one, over every mantissa of a scale and of a float16 value.
#include "common/quotient.h"

#include <cstdint>
#include <cstdio>
#include <cstring>

int main() {
  uint64_t wrong = 0;
  for (uint32_t mantissa = 0; mantissa < 1u << 23; ++mantissa) {
    const uint32_t bits = 0x3F800000u | mantissa;
    float scale;
    std::memcpy(&scale, &bits, sizeof(scale));
    const pagedkern::Quotient quotient(scale);
    int wrong_here = 0;
    for (int i = 0; i < 1024; ++i) {
      const float x = 1.0f + static_cast<float>(i) / 1024.0f;
      wrong_here += quotient(x) != x / scale ? 1 : 0;
    }
    wrong += wrong_here;
  }
  std::printf("%llu\n", static_cast<unsigned long long>(wrong));
}
