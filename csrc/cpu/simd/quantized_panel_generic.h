// quantized_panel.h for any machine: right, not fast.
#pragma once

namespace pagedkern::cpu::PAGEDKERN_SIMD {

inline void quantize_group(const float* x, int64_t at, const QuantizedRows& rows) {
  float high = 0.0f, below = 0.0f;
  bool finite = true;
  for (int i = 0; i < kQuantGroup; ++i) {
    high = x[i] > high ? x[i] : high;
    below = -x[i] > below ? -x[i] : below;
    finite = finite && (float_to_bits(x[i]) & 0x7F800000u) != 0x7F800000u;
  }
  const float range = high + below;
  const float inverse = finite && range >= kSmallestRange ? kSteps / range : 0.0f;
  const int32_t zero = static_cast<int32_t>(rintf(below * inverse));
  int32_t sum = 0;
  for (int i = 0; i < kQuantGroup; ++i) {
    const int32_t value = (finite ? static_cast<int32_t>(rintf(x[i] * inverse)) : 0) + zero;
    rows.values[at * kQuantGroup + i] = static_cast<uint8_t>(value < 0 ? 0 : value > 255 ? 255 : value);
    sum += rows.values[at * kQuantGroup + i];
  }
  store_group(finite ? range / kSteps : NAN, zero, sum, at, rows);
}

// Output j's products of one group with 32 inputs.
inline int32_t dot_group(QuantFormat format, const uint8_t* words, int j, const uint8_t* x) {
  int32_t sum = 0;
  for (int i = 0; i < (format == QuantFormat::k4Bit ? 4 : 8); ++i) {
    for (int b = 0; b < 4; ++b) {
      const int32_t value = words[64 * i + 4 * j + b];
      if (format == QuantFormat::k4Bit) {
        sum += (value & 15) * x[4 * i + b] + (value >> 4) * x[16 + 4 * i + b];
      } else {
        sum += static_cast<int8_t>(value) * x[4 * i + b];
      }
    }
  }
  return sum;
}

inline void multiply_panel(QuantFormat format, const uint8_t* weight, int64_t groups, const QuantizedRows& rows,
                           int64_t count, float (*y)[kPanelOutputs]) {
  for (int64_t r = 0; r < count; ++r) {
    for (int j = 0; j < kPanelOutputs; ++j) y[r][j] = 0.0f;
  }
  for (int64_t g = 0; g < groups; ++g, weight += group_bytes(format)) {
    alignas(64) float scale[kPanelOutputs], minimum[kPanelOutputs] = {};
    int16_t sums[kPanelOutputs];
    std::memcpy(sums, weight + sums_at(format), sizeof(sums));
    for (int64_t j = 0; j < kPanelOutputs; j += kLanes) {
      const Half* stored = reinterpret_cast<const Half*>(weight) + j;
      store(scale + j, load(stored));
      if (format == QuantFormat::k4Bit) store(minimum + j, load(stored + kPanelOutputs));
    }
    for (int64_t r = 0; r < count; ++r) {
      const int64_t at = g * count + r;
      for (int j = 0; j < kPanelOutputs; ++j) {
        const int32_t dot = dot_group(format, weight + values_at(format), j, rows.values + at * kQuantGroup) +
                            static_cast<int16_t>(rows.zeros[at]) * sums[j];
        y[r][j] += static_cast<float>(dot) * rows.scales[at] * scale[j] + minimum[j] * rows.totals[at];
      }
    }
  }
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
