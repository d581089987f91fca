// The parts of the quantised linear layers that are compiled once per SIMD level.
#pragma once

#include <cstdint>

#include "cpu/simd.h"
#include "quantized_linear/params.h"

namespace pagedkern::cpu {

// Rows go through the weights in tiles of at most this many, as evenly as they divide. What a row gives does not depend
// on its tile.
constexpr int64_t kTileRows = 8;

constexpr int64_t num_row_tiles(int64_t rows) {
  return (rows + kTileRows - 1) / kTileRows;
}
constexpr int64_t first_row_of(int64_t tile, int64_t rows) {
  return tile * rows / num_row_tiles(rows);
}

// A linear's input in 8 bits: x = scale * (value - zero), one scale and zero per row and group. The rows of a tile lie
// together, so that the kernel finds them at constant distances: [tile][group][row of the tile][32] values,
// [tile][group][row] of the rest.
struct QuantizedRows {
  uint8_t* values;
  float* scales;
  float* totals;   // scale * (sum of the values - 32 * zero)
  int32_t* zeros;  // -zero as 16 bits, below 16 bits of 0
};

}  // namespace pagedkern::cpu

// Normalises, if so asked, and quantises the rows of tiles [tile_begin, tile_end).
PAGEDKERN_DECLARE_SIMD(void, quantize_tiles,
                       (const QuantizedLinear& linear, int64_t num_rows, float eps, int64_t tile_begin,
                        int64_t tile_end, const QuantizedRows& rows))

// Outputs of panels [panel_begin, panel_end), of the first half where the linear is gated, for those tiles of rows.
PAGEDKERN_DECLARE_SIMD(void, linear_panels,
                       (const QuantizedLinear& linear, int64_t num_rows, int64_t tile_begin, int64_t tile_end,
                        const QuantizedRows& rows, int64_t panel_begin, int64_t panel_end))
