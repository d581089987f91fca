// The mathematics of a warp: scores of its keys, their softmax, and values, with mma.sync.
//
// Keys are the m of the mma of scores and head_dim the m of the mma of values; the query rows are the n of both, in
// eights, so that nothing is padded to 16 rows. A lane meets the same rows in scores and in sums; weights are
// transposed on their way from one to the other. FP8 codes become float16 in registers, two an instruction; the order
// of k (the query is read to match) and of m (the output is) is the one that needs no shuffle.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "arch/convert.cuh"
#include "arch/fp8x4.cuh"
#include "arch/ldmatrix.cuh"
#include "arch/mma.cuh"
#include "arch/movmatrix.cuh"
#include "common/online_softmax.cuh"
#include "paged_decode/load.cuh"

namespace pagedkern {

template <DType kCache>
struct DecodeMath {
  using Type = __half;
};
template <>
struct DecodeMath<DType::kBFloat16> {
  using Type = __nv_bfloat16;
};

template <DType kCache>
static __device__ __forceinline__ void fp8x4_to_f16x4(uint32_t codes, uint32_t& low, uint32_t& high) {
  kCache == DType::kFloat8E4M3 ? e4m3x4_to_f16x4(codes, low, high) : e5m2x4_to_f16x4(codes, low, high);
}

// Weights are 2^(score - reference). The reference follows the maximum late, in leaps: sums are rescaled only when a
// weight would pass 2^kHeadroom, float16's last power of two.
constexpr float kMargin = 12.0f;
constexpr float kHeadroom = 15.0f;

// Columns are eights of query rows; lane l has rows 2 (l % 4) and the next of each.
template <class Config>
struct DecodeState {
  float out[Config::kDim / 16][Config::kColumns][4];  // head_dim x rows
  float sum[Config::kColumns][2];                     // of this lane's weights, before they are rounded
  float reference[Config::kColumns][2];
  float limit[Config::kColumns][2];  // scores beyond it raise the reference; -inf: there was no score yet

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < Config::kColumns; ++c) {
#pragma unroll
      for (int m = 0; m < Config::kDim / 16; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][c][i] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum[c][i] = 0.0f;
        reference[c][i] = 0.0f;
        limit[c][i] = minus_infinity();
      }
    }
  }
};

// The query tile as second operands, in registers where it leaves enough of them.
template <class Config>
struct DecodeQuery {
  static constexpr int kSteps = Config::kDim / 16;
  uint32_t kept[Config::kQueryInRegisters ? kSteps : 1][Config::kColumns][2];

  static __device__ __forceinline__ void load(const PagedDecodeShared<Config>& shared, int step, int lane,
                                              uint32_t (&to)[Config::kColumns][2]) {
#pragma unroll
    for (int c = 0; c < Config::kColumns; ++c) {
      const uint16_t* row = shared.query[c * 8 + lane / 4] + step * 16;
      if constexpr (Config::kFp8) {  // the four codes of a 32-bit word of keys stand side by side
        const uint2 four = *reinterpret_cast<const uint2*>(row + lane % 4 * 4);
        to[c][0] = four.x;
        to[c][1] = four.y;
      } else {
        to[c][0] = *reinterpret_cast<const uint32_t*>(row + lane % 4 * 2);
        to[c][1] = *reinterpret_cast<const uint32_t*>(row + lane % 4 * 2 + 8);
      }
    }
  }
  __device__ __forceinline__ void keep(const PagedDecodeShared<Config>& shared, int lane) {
    if constexpr (Config::kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load(shared, step, lane, kept[step]);
    }
  }
};

// Address of the lane's row of four matrices, 16 keys by two chunks, in the order of an mma's first operand: keys are
// its rows, or its columns where values are transposed. Later pairs of chunks follow by matrix_chunks.
template <class Config, bool kValues>
static __device__ __forceinline__ uint32_t matrix_rows(int lane) {
  const int eight = lane / 8;
  return kValues ? swizzled<Config>(eight / 2 * 8 + lane % 8, eight % 2)
                 : swizzled<Config>(eight % 2 * 8 + lane % 8, eight / 2);
}
template <class Config>
static __device__ __forceinline__ uint32_t matrix_chunks(uint32_t rows, int chunk) {
  constexpr int kTurned = Config::kChunks % 8 == 0 ? 7 : 3;
  return (rows ^ ((chunk & kTurned) << 4)) + ((chunk & ~kTurned) << 4);
}

template <class Config>
using Scores = float[Config::kSlabs][Config::kColumns][4];  // [.][.][(key, row), (key, row + 1), the same of key + 8]

// `rows` is the lane's matrix_rows of the first slab.
template <class Config>
static __device__ __forceinline__ void score_keys(const PagedDecodeShared<Config>& shared,
                                                  const DecodeQuery<Config>& query, uint32_t rows, int lane,
                                                  Scores<Config>& scores) {
  using Math = typename DecodeMath<Config::kCache>::Type;
#pragma unroll
  for (int slab = 0; slab < Config::kSlabs; ++slab) {
#pragma unroll
    for (int i = 0; i < Config::kColumns * 4; ++i) scores[slab][i / 4][i % 4] = 0.0f;
  }
#pragma unroll
  for (int chunk = 0; chunk < Config::kChunks; chunk += 2) {
    constexpr int kSteps = Config::kFp8 ? 2 : 1;  // of k, in two chunks
    uint32_t b[kSteps][Config::kColumns][2];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int step = chunk / 2 * kSteps + i;
      if constexpr (!Config::kQueryInRegisters) query.load(shared, step, lane, b[i]);
#pragma unroll
      for (int j = 0; Config::kQueryInRegisters && j < 2 * Config::kColumns; ++j) {
        b[i][j / 2][j % 2] = query.kept[step][j / 2][j % 2];
      }
    }
#pragma unroll
    for (int slab = 0; slab < Config::kSlabs; ++slab) {
      uint32_t r[4];
      ldmatrix_x4(r, matrix_chunks<Config>(rows, chunk) + slab * Config::kSlabBytes);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint32_t a[4] = {r[0], r[1], r[2], r[3]};
        if constexpr (Config::kFp8) {
          fp8x4_to_f16x4<Config::kCache>(r[2 * i], a[0], a[2]);
          fp8x4_to_f16x4<Config::kCache>(r[2 * i + 1], a[1], a[3]);
        }
#pragma unroll
        for (int c = 0; c < Config::kColumns; ++c) mma_m16n8k16<Math>(scores[slab][c], a, b[i][c][0], b[i][c][1]);
      }
    }
  }
}

template <class Config>
using Weights = uint32_t[Config::kSlabs][Config::kColumns][2];  // second operands: pairs of neighbouring keys of a row

template <class Config>
static __device__ __forceinline__ void sum_values(uint32_t rows, const Weights<Config>& weights,
                                                  DecodeState<Config>& state) {
  using Math = typename DecodeMath<Config::kCache>::Type;
#pragma unroll
  for (int chunk = 0; chunk < Config::kChunks; chunk += 2) {
#pragma unroll
    for (int slab = 0; slab < Config::kSlabs; ++slab) {
      uint32_t r[4];
      ldmatrix_x4_trans(r, matrix_chunks<Config>(rows, chunk) + slab * Config::kSlabBytes);
      constexpr int kTiles = Config::kFp8 ? 2 : 1;  // of m, in two chunks
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        uint32_t a[4] = {r[0], r[1], r[2], r[3]};
        if constexpr (Config::kFp8) {
          // Bytes of a word: two neighbours of head_dim of one key, the same of the next key.
          fp8x4_to_f16x4<Config::kCache>(__byte_perm(r[i], 0, 0x3120), a[0], a[1]);
          fp8x4_to_f16x4<Config::kCache>(__byte_perm(r[2 + i], 0, 0x3120), a[2], a[3]);
        }
#pragma unroll
        for (int c = 0; c < Config::kColumns; ++c) {
          mma_m16n8k16<Math>(state.out[chunk / 2 * kTiles + i][c], a, weights[slab][c][0], weights[slab][c][1]);
        }
      }
    }
  }
}

// Over the eight lanes that share rows.
static __device__ __forceinline__ float rows_max(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
  return x;
}
static __device__ __forceinline__ float rows_sum(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
  return x;
}

// Key of a score, counted from the slab's first.
static __device__ __forceinline__ int key_of(int lane, int i) {
  return lane / 4 + i / 2 * 8;
}

// Scores of keys a row does not see become -inf, whatever they were.
template <class Config>
static __device__ __forceinline__ void mask_scores(const PagedDecodeShared<Config>& shared, int32_t first, int lane,
                                                   Scores<Config>& scores) {
#pragma unroll
  for (int c = 0; c < Config::kColumns * 2; ++c) {
    const int row = c / 2 * 8 + lane % 4 * 2 + c % 2;
    const int32_t begin = shared.begin[row], end = shared.end[row];
#pragma unroll
    for (int i = 0; i < Config::kSlabs * 2; ++i) {
      const int32_t key = first + i / 2 * Config::kSlabKeys + key_of(lane, i % 2 * 2);
      float& score = scores[i / 2][c / 2][i % 2 * 2 + c % 2];
      score = key >= begin && key < end ? score : minus_infinity();
    }
  }
}

// Brings the sums of rows whose greatest score passes the limit to a new reference. `greatest` is the lane's, in units
// of `factor` to the score.
template <class Config>
static __device__ __forceinline__ void raise_reference(DecodeState<Config>& state,
                                                       const float (&greatest)[Config::kColumns][2],
                                                       const float (&factor)[Config::kColumns][2]) {
#pragma unroll
  for (int c = 0; c < Config::kColumns; ++c) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float top = rows_max(greatest[c][i]);
      float scale = 1.0f;
      if (top > state.limit[c][i]) {
        const float score = __fmul_rn(top, factor[c][i]);
        const float reference = below_maximum(score, kMargin);
        scale = state.limit[c][i] == minus_infinity() ? 0.0f : exp2_approx(state.reference[c][i] - reference);
        state.reference[c][i] = reference;
        const float room = __fdividef(kHeadroom - kMargin, factor[c][i]);
        state.limit[c][i] = reference < score ? __fadd_rn(top, room) : top;
      }
      state.sum[c][i] *= scale;
#pragma unroll
      for (int m = 0; m < Config::kDim / 16; ++m) {
        state.out[m][c][i] *= scale;
        state.out[m][c][2 + i] *= scale;
      }
    }
  }
}

// Scores to weights; the sums take them up. Score and reference are rounded alike before one is taken from the other
// (no fused multiply-add): of large scores, what rounding leaves would be more than an exponent can hold.
template <class Config>
static __device__ __forceinline__ void weigh(DecodeState<Config>& state, const Scores<Config>& scores,
                                             const float (&factor)[Config::kColumns][2], Weights<Config>& weights) {
  using Math = typename DecodeMath<Config::kCache>::Type;
  float greatest[Config::kColumns][2];
  bool passes = false;
#pragma unroll
  for (int c = 0; c < Config::kColumns; ++c) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      greatest[c][i] = fmaxf(scores[0][c][i], scores[0][c][2 + i]);
#pragma unroll
      for (int slab = 1; slab < Config::kSlabs; ++slab) {
        greatest[c][i] = fmaxf(greatest[c][i], fmaxf(scores[slab][c][i], scores[slab][c][2 + i]));
      }
      passes |= greatest[c][i] > state.limit[c][i];
    }
  }
  if (__builtin_expect(__any_sync(0xFFFFFFFFu, passes), 0)) raise_reference(state, greatest, factor);
#pragma unroll
  for (int slab = 0; slab < Config::kSlabs; ++slab) {
#pragma unroll
    for (int c = 0; c < Config::kColumns; ++c) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float weight[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          weight[i] =
              exp2_approx(__fsub_rn(__fmul_rn(scores[slab][c][2 * half + i], factor[c][i]), state.reference[c][i]));
          state.sum[c][i] = __fadd_rn(state.sum[c][i], weight[i]);
        }
        weights[slab][c][half] = movmatrix_trans(pack2<Math>(weight[0], weight[1]));
      }
    }
  }
}

// tanh to about 1e-7 of its value: near 0 by its series, where the quotient would cancel.
static __device__ __forceinline__ float accurate_tanh(float x) {
  if (fabsf(x) < 0.04f) {
    const float square = x * x;
    return x * (1.0f + square * (-1.0f / 3.0f + square * (2.0f / 15.0f)));
  }
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(2.0f * kLog2E * x));
}

// The same with every option: softcap, ALiBi, a scale of its own for each key and value. Values' scales go into the
// weights; the reference follows score + log2(scale), so that weights keep the range of float16 at any scale.
template <class Config>
static __device__ __forceinline__ void weigh_general(const PagedDecodeParams& p,
                                                     const PagedDecodeShared<Config>& shared,
                                                     const float (&scale)[2][Config::kWarpKeys], int32_t first,
                                                     int lane, DecodeState<Config>& state, Scores<Config>& scores,
                                                     Weights<Config>& weights) {
  using Math = typename DecodeMath<Config::kCache>::Type;
  const bool key_scales = Config::kFp8 && p.op.k_scale.per_token(),
             value_scales = Config::kFp8 && p.op.v_scale.per_token();
  float greatest[Config::kColumns][2], one[Config::kColumns][2];
  bool passes = false;
#pragma unroll
  for (int c = 0; c < Config::kColumns * 2; ++c) {
    const int row = c / 2 * 8 + lane % 4 * 2 + c % 2;
    const float factor = shared.factor[row], slope = shared.slope[row];
    const int32_t begin = shared.begin[row], end = shared.end[row], position = shared.position[row];
    const float cap = p.op.softcap * kLog2E;
    float& most = greatest[c / 2][c % 2];
    most = minus_infinity();
    one[c / 2][c % 2] = 1.0f;
#pragma unroll
    for (int i = 0; i < Config::kSlabs * 2; ++i) {
      const int place = i / 2 * Config::kSlabKeys + key_of(lane, i % 2 * 2);
      const int32_t key = first + place;
      float& score = scores[i / 2][c / 2][i % 2 * 2 + c % 2];
      score *= factor;
      if (key_scales) score *= scale[0][place];
      if (p.op.softcap > 0.0f) score = cap * accurate_tanh(__fdividef(score, cap));
      score = fmaf(slope, static_cast<float>(key - position), score);
      if (key < begin || key >= end) score = minus_infinity();
      most = fmaxf(most, value_scales ? scaled_score(score, scale[1][place]) : score);
    }
    passes |= most > state.limit[c / 2][c % 2];
  }
  if (__any_sync(0xFFFFFFFFu, passes)) raise_reference(state, greatest, one);
#pragma unroll
  for (int i = 0; i < Config::kSlabs * 2; ++i) {
    const int slab = i / 2, half = i % 2;
    const float value_scale = value_scales ? scale[1][slab * Config::kSlabKeys + key_of(lane, half * 2)] : 1.0f;
#pragma unroll
    for (int c = 0; c < Config::kColumns; ++c) {
      float weight[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float score = scores[slab][c][2 * half + j];
        weight[j] = exp2_approx(score - state.reference[c][j]);
        state.sum[c][j] += weight[j];
        if (score != minus_infinity()) weight[j] *= value_scale;
      }
      weights[slab][c][half] = movmatrix_trans(pack2<Math>(weight[0], weight[1]));
    }
  }
}

}  // namespace pagedkern
