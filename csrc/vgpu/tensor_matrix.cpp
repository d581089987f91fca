#include "vgpu/tensor_matrix.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace pagedkern::vgpu {
namespace {

uint16_t at(const MatrixRows& rows, int row, int column) {
  uint16_t value;
  std::memcpy(&value, rows[row].data() + 2 * column, 2);
  return value;
}

}  // namespace

void matrix_to_lanes(const MatrixRows& rows, bool trans, LaneWords& out) {
  for (int lane = 0; lane < 32; ++lane) {
    const int major = lane / 4, minor = 2 * (lane % 4);
    const uint32_t low = trans ? at(rows, minor, major) : at(rows, major, minor);
    const uint32_t high = trans ? at(rows, minor + 1, major) : at(rows, major, minor + 1);
    out[lane] = low | high << 16;
  }
}

void lanes_to_matrix(const LaneWords& in, bool trans, MatrixRows& rows) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 2; ++i) {
      const int major = lane / 4, minor = 2 * (lane % 4) + i;
      const uint16_t value = static_cast<uint16_t>(in[lane] >> (16 * i));
      std::memcpy(rows[trans ? minor : major].data() + 2 * (trans ? major : minor), &value, 2);
    }
  }
}

LaneWords transpose_lanes(const LaneWords& in) {
  MatrixRows rows;
  lanes_to_matrix(in, false, rows);
  LaneWords out;
  matrix_to_lanes(rows, true, out);
  return out;
}

int bank_wavefronts(const uint32_t* addresses, int count, int bytes) {
  constexpr int kBanks = 32;
  constexpr int kMaxWords = 32 * 4;
  uint32_t words[kMaxWords];
  int n = 0;
  for (int i = 0; i < count; ++i) {
    for (uint32_t word = addresses[i] / 4; word <= (addresses[i] + bytes - 1) / 4 && n < kMaxWords; ++word) {
      words[n++] = word;
    }
  }
  std::sort(words, words + n);
  n = static_cast<int>(std::unique(words, words + n) - words);
  int load[kBanks] = {};
  int worst = 0;
  for (int i = 0; i < n; ++i) worst = std::max(worst, ++load[words[i] % kBanks]);
  return worst;
}

}  // namespace pagedkern::vgpu
