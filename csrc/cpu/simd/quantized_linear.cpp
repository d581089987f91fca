// Linear layers over weights in 4 or 8 bits: inputs to 8 bits, then products in integers, scaled group by group.
#include "cpu/simd/quantized_linear.h"

#include <math.h>

#include "cpu/simd/attention_vec.h"
#include "cpu/simd/quantized_panel.h"

namespace pagedkern::cpu::PAGEDKERN_SIMD {
namespace {

static_assert(kPanelOutputs % kLanes == 0 && kQuantGroup % kLanes == 0);

// ---- Inputs to 8 bits.

template <class T>
float inverse_rms(const T* x, int64_t n, float eps) {
  Vec sums[2] = {broadcast(0.0f), broadcast(0.0f)};
  for (int64_t i = 0; i < n; i += 2 * kLanes) {
    for (int j = 0; j < 2; ++j) {
      const Vec v = load(x + i + j * kLanes);
      sums[j] = fma(v, v, sums[j]);
    }
  }
  return 1.0f / sqrtf(sum_of_lanes(add(sums[0], sums[1])) / static_cast<float>(n) + eps);
}

// `at` is the row's place among the scales of its tile; tile_rows is what lies between two groups of it.
template <class T>
void quantize_row(const QuantizedLinear& linear, float eps, const T* x, int64_t at, int64_t tile_rows,
                  const QuantizedRows& rows) {
  const float* norm = linear.norm;
  const Vec scale = broadcast(norm != nullptr ? inverse_rms(x, linear.in_features, eps) : 1.0f);
  for (int64_t i = 0; i < linear.in_features; i += kQuantGroup, at += tile_rows) {
    alignas(64) float group[kQuantGroup];
    for (int64_t j = 0; j < kQuantGroup; j += kLanes) {
      Vec v = load(x + i + j);
      if (norm != nullptr) v = mul(mul(v, scale), load(norm + i + j));
      store(group + j, v);
    }
    quantize_group(group, at, rows);
  }
}

template <class T>
void quantize_tiles_of(const QuantizedLinear& linear, int64_t num_rows, float eps, int64_t tile_begin, int64_t tile_end,
                       const QuantizedRows& rows) {
  const int64_t groups = linear.in_features / kQuantGroup;
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const int64_t first = first_row_of(tile, num_rows), end = first_row_of(tile + 1, num_rows);
    for (int64_t row = first; row < end; ++row) {
      const T* x = static_cast<const T*>(linear.x) + row * linear.x_stride;
      quantize_row(linear, eps, x, first * groups + row - first, end - first, rows);
    }
  }
}

// ---- From products to outputs.

// x / (1 + e^-x), by way of an exponential that cannot overflow.
inline Vec silu(Vec x) {
  const Vec zero = broadcast(0.0f), one = broadcast(1.0f);
  const Vec magnitude = max_else(sub(zero, x), x);
  const Vec e = exp2_of(mul(magnitude, broadcast(-1.4426950408889634f)));
  return mul(x, div(where_less(x, zero, e, one), add(one, e)));
}

using Products = float[kTileRows][kPanelOutputs];

inline Vec with_bias(const float* products, const float* bias, int64_t at, int64_t size) {
  const Vec y = load(products);
  if (bias == nullptr || at >= size) return y;
  return add(y, size - at >= kLanes ? load(bias + at) : load_part(bias + at, static_cast<int>(size - at)));
}

// `up` is the other half of a gated linear.
template <class Out>
void write_outputs(const QuantizedLinear& linear, int64_t first_row, int64_t rows, int64_t panel, const Products& y,
                   const Products& up) {
  const int64_t size = linear.gated ? linear.out_features / 2 : linear.out_features;
  for (int64_t row = 0; row < rows; ++row) {
    Out* out_row = static_cast<Out*>(linear.out) + (first_row + row) * linear.out_stride;
    for (int64_t j = 0; j < kPanelOutputs; j += kLanes) {
      const int64_t at = panel * kPanelOutputs + j;
      if (at >= size) break;
      Vec v = with_bias(y[row] + j, linear.bias, at, size);
      if (linear.gated) {
        const float* bias = linear.bias == nullptr ? nullptr : linear.bias + size;
        v = mul(silu(v), with_bias(up[row] + j, bias, at, size));
      }
      Out* out = out_row + at;
      if (size - at >= kLanes) {
        store(out, linear.accumulate ? add(load(out), v) : v);
      } else {
        const int rest = static_cast<int>(size - at);
        store_part(out, linear.accumulate ? add(load_part(out, rest), v) : v, rest);
      }
    }
  }
}

template <class Out>
void linear_panels_of(const QuantizedLinear& linear, int64_t num_rows, int64_t tile_begin, int64_t tile_end,
                      const QuantizedRows& rows, int64_t panel_begin, int64_t panel_end) {
  const int64_t groups = linear.in_features / kQuantGroup;
  const int64_t panel_bytes = groups * group_bytes(linear.format);
  const int64_t up_panels = linear.out_features / 2 / kPanelOutputs;
  alignas(64) Products y, up;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const uint8_t* weight = linear.weight + panel * panel_bytes;
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      const int64_t first = first_row_of(tile, num_rows), count = first_row_of(tile + 1, num_rows) - first;
      const QuantizedRows from = {rows.values + first * linear.in_features, rows.scales + first * groups,
                                  rows.totals + first * groups, rows.zeros + first * groups};
      multiply_panel(linear.format, weight, groups, from, count, y);
      if (linear.gated) multiply_panel(linear.format, weight + up_panels * panel_bytes, groups, from, count, up);
      write_outputs<Out>(linear, first, count, panel, y, up);
    }
  }
}

}  // namespace

void quantize_tiles(const QuantizedLinear& linear, int64_t num_rows, float eps, int64_t tile_begin, int64_t tile_end,
                    const QuantizedRows& rows) {
  switch (linear.x_dtype) {
    case DType::kBFloat16: return quantize_tiles_of<BFloat16>(linear, num_rows, eps, tile_begin, tile_end, rows);
    case DType::kFloat16: return quantize_tiles_of<Half>(linear, num_rows, eps, tile_begin, tile_end, rows);
    default: return quantize_tiles_of<float>(linear, num_rows, eps, tile_begin, tile_end, rows);
  }
}

void linear_panels(const QuantizedLinear& linear, int64_t num_rows, int64_t tile_begin, int64_t tile_end,
                   const QuantizedRows& rows, int64_t panel_begin, int64_t panel_end) {
  switch (linear.out_dtype) {
    case DType::kBFloat16:
      return linear_panels_of<BFloat16>(linear, num_rows, tile_begin, tile_end, rows, panel_begin, panel_end);
    case DType::kFloat16:
      return linear_panels_of<Half>(linear, num_rows, tile_begin, tile_end, rows, panel_begin, panel_end);
    default: return linear_panels_of<float>(linear, num_rows, tile_begin, tile_end, rows, panel_begin, panel_end);
  }
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
