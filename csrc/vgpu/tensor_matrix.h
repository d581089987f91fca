// The register side of ldmatrix, stmatrix and movmatrix, and their cost in shared-memory wavefronts.
#pragma once

#include <array>
#include <cstdint>

#include "vgpu/tensor_mma.h"

namespace pagedkern::vgpu {

// Eight rows of eight 16-bit elements, as they lie in shared memory.
using MatrixRows = std::array<std::array<uint8_t, 16>, 8>;

// Lane l holds elements 2 (l mod 4) and the next of row l / 4; with trans, of column l / 4.
void matrix_to_lanes(const MatrixRows& rows, bool trans, LaneWords& out);
void lanes_to_matrix(const LaneWords& in, bool trans, MatrixRows& rows);

// movmatrix.trans: the same matrix, transposed, lane to lane.
LaneWords transpose_lanes(const LaneWords& in);

// How many passes over the 32 four-byte banks one request of `count` accesses of `bytes` each takes: the largest
// number of different words that fall on one bank. Accesses to one word are one.
int bank_wavefronts(const uint32_t* addresses, int count, int bytes);

}  // namespace pagedkern::vgpu
