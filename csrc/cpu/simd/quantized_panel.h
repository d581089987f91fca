// The two inner loops of the quantised linear layers: a group of inputs to 8 bits, and a tile of rows times a panel.
#pragma once

#include <math.h>

#include "cpu/simd/attention_vec.h"
#include "cpu/simd/quantized_linear.h"

namespace pagedkern::cpu::PAGEDKERN_SIMD {

constexpr int64_t kFetchAhead = 2048;     // bytes of weights
constexpr float kSteps = 255.0f;          // of a group's range
constexpr float kSmallestRange = 1e-30f;  // below it a group counts as zero: its inverse would overflow

// Where a group's values lie, and what stands before them.
constexpr int64_t sums_at(QuantFormat format) {
  return format == QuantFormat::k4Bit ? 64 : 32;
}
constexpr int64_t values_at(QuantFormat format) {
  return sums_at(format) + 32;
}

// A panel's end runs on into the next one, so that what is fetched ahead is right across panels too.
template <int64_t kBytes>
inline void fetch_ahead(const uint8_t* weight) {
  PAGEDKERN_UNROLL
  for (int64_t i = 0; i < kBytes; i += 64) __builtin_prefetch(weight + kFetchAhead + i);
}

inline void store_group(float scale, int32_t zero, int32_t sum, int64_t at, const QuantizedRows& rows) {
  rows.scales[at] = scale;
  rows.totals[at] = scale * static_cast<float>(sum - zero * static_cast<int32_t>(kQuantGroup));
  rows.zeros[at] = -zero & 0xFFFF;
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD

#if defined(__AVX512VNNI__)
#include "cpu/simd/quantized_panel_vnni.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "cpu/simd/quantized_panel_avx2.h"
#else
#include "cpu/simd/quantized_panel_generic.h"
#endif
