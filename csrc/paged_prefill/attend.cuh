// One warp's 16 query rows against one tile of keys and values.
#pragma once

#include "arch/mma.cuh"
#include "common/online_softmax.cuh"
#include "paged_prefill/tile.cuh"

namespace pagedkern {

// What a lane knows of its rows, lane / 4 and lane / 4 + 8 of its warp's 16. Rows there are not repeat the last one.
template <int kDim>
struct WarpRows {
  float output[kDim / 8][4];  // as mma leaves it: dims 8 n + 2 (lane % 4), two of the first row, two of the second
  float base[2];              // what weights are relative to, as a score times log2(e); -inf: no key yet
  float sum[2];               // of this lane's weights
  KeyRange keys[2];           // that the row sees
  KeyRange any;               // that some row of the warp sees
  KeyRange all;               // that all rows of the warp see
  int32_t position[2];        // of the row's own key
  float slope[2];             // ALiBi

  // No key yet.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      base[r] = minus_infinity();
      sum[r] = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output[d][i] = 0.0f;
    }
  }
};

template <class Config, int kDim>
static __device__ __forceinline__ void load_query_fragments(const uint16_t* query,
                                                            uint32_t (&fragments)[kDim / 16][4]) {
  const int row = threadIdx.x / 32 * Config::kWarpRows + threadIdx.x % 16, half = threadIdx.x % 32 / 16;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const int piece = swizzle_piece<Config::kPieces>(row, 2 * k + half);
    ldmatrix_x4(fragments[k], shared_address(query + (row * Config::kPieces + piece) * 8));
  }
}

// S = Q K^T, for those blocks of 16 keys from first to last - 1; kWhole: for all.
template <class T, class Config, int kDim, bool kWhole>
static __device__ __forceinline__ void score(const uint16_t* keys, const uint16_t* query,
                                             const uint32_t (&fragments)[kDim / 16][4], int first, int last,
                                             float (&scores)[Config::kKeys / 8][4]) {
  constexpr int kPieces = Config::kPieces;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int key_row = lane % 8 + (lane / 16) * 8, key_piece = lane / 8 % 2;
  const int query_row = warp * Config::kWarpRows + lane % 16, query_piece = lane / 16;
  const uint32_t key_base = shared_address(keys) + key_row * kPieces * 16;
  const uint32_t query_base = shared_address(query) + query_row * kPieces * 16;
#pragma unroll
  for (int n = 0; n < Config::kKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[4];
    if constexpr (Config::kQueryInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = fragments[k][i];
    } else {
      ldmatrix_x4(a, query_base + swizzle_piece<kPieces>(query_row, 2 * k + query_piece) * 16);
    }
    const uint32_t address = key_base + swizzle_piece<kPieces>(key_row, 2 * k + key_piece) * 16;
#pragma unroll
    for (int j = 0; j < Config::kKeys / 16; ++j) {
      if (!kWhole && (j < first || j >= last)) continue;
      uint32_t b[4];
      ldmatrix_x4(b, address + j * 16 * kPieces * 16);
      mma_m16n8k16<T>(scores[2 * j], a, b[0], b[1]);
      mma_m16n8k16<T>(scores[2 * j + 1], a, b[2], b[3]);
    }
  }
}

// Per-token k_scale, softcap and ALiBi, in the contract's order: raw products become scores in natural units.
template <class Config, int kDim>
static __device__ __forceinline__ void apply_options(const PagedPrefillParams& p, const WarpRows<kDim>& rows,
                                                     const float* key_scales, int first_key, const float (&scale)[2],
                                                     float (&scores)[Config::kKeys / 8][4]) {
  const int column = threadIdx.x % 4 * 2;
  const float cap = p.op.softcap, inverse_cap = 1.0f / cap;
#pragma unroll
  for (int n = 0; n < Config::kKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = n * 8 + column + i % 2;
      float s = scores[n][i] * scale[i / 2];
      if (p.op.k_scale.per_token()) s *= key_scales[key];
      if (cap != 0) s = cap * tanhf(s * inverse_cap);
      scores[n][i] = s + rows.slope[i / 2] * static_cast<float>(first_key + key - rows.position[i / 2]);
    }
  }
}

template <class Config, int kDim>
static __device__ __forceinline__ void mask_scores(const WarpRows<kDim>& rows, int first_key,
                                                   float (&scores)[Config::kKeys / 8][4]) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < Config::kKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first_key + n * 8 + column + i % 2;
      if (key < rows.keys[i / 2].begin || key >= rows.keys[i / 2].end) scores[n][i] = minus_infinity();
    }
  }
}

// Scores times `unit` are in units of log2: to weights, times `value_scales` of their keys if there are any; `factor`
// brings the old sums to them. Scores and maximum are rounded alike before one is taken from the other (no fused
// multiply-add): of large scores, what rounding leaves would be more than an exponent can hold.
template <class T, class Config, int kDim>
static __device__ __forceinline__ void weigh(const float (&unit)[2], const float* value_scales, WarpRows<kDim>& rows,
                                             float (&scores)[Config::kKeys / 8][4], float (&factor)[2]) {
  constexpr float kMargin = std::is_same_v<T, __half> ? 14.0f : 0.0f;  // bfloat16 has the range of float32
  const float* scales = value_scales == nullptr ? nullptr : value_scales + threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = minus_infinity();
    if (scales == nullptr) {
#pragma unroll
      for (int n = 0; n < Config::kKeys / 8; ++n) top = fmaxf(top, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      top = __fmul_rn(quad_max(top), unit[r]);
    } else {
#pragma unroll
      for (int n = 0; n < Config::kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          top = fmaxf(top, scaled_score(__fmul_rn(scores[n][2 * r + i], unit[r]), scales[n * 8 + i]));
        }
      }
      top = quad_max(top);
    }
    const float base = fmaxf(rows.base[r], below_maximum(top, kMargin));
    factor[r] = rescale_factor(rows.base[r], base);
    rows.base[r] = base;
    const float guarded = guarded_maximum(base);
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < Config::kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& weight = scores[n][2 * r + i];
        weight = exp2_approx(__fsub_rn(__fmul_rn(weight, unit[r]), guarded));
        sum += weight;
        if (scales != nullptr) weight *= scales[n * 8 + i];
      }
    }
    rows.sum[r] = rows.sum[r] * factor[r] + sum;
  }
}

// O = O factor + P V, for those blocks of 16 keys from first to last - 1; kWhole: for all.
template <class T, class Config, int kDim, bool kWhole>
static __device__ __forceinline__ void accumulate(const uint16_t* values, const float (&weights)[Config::kKeys / 8][4],
                                                  const float (&factor)[2], int first, int last, WarpRows<kDim>& rows) {
  constexpr int kPieces = Config::kPieces;
  const int lane = threadIdx.x % 32;
  const int row = lane % 16, half = lane / 16;
  const uint32_t base = shared_address(values) + row * kPieces * 16;
  if (__any_sync(0xFFFFFFFFu, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rows.output[d][i] *= factor[i / 2];
    }
  }
#pragma unroll
  for (int j = 0; j < Config::kKeys / 16; ++j) {
    if (!kWhole && (j < first || j >= last)) continue;
    const uint32_t a[4] = {
        pack2<T>(weights[2 * j][0], weights[2 * j][1]), pack2<T>(weights[2 * j][2], weights[2 * j][3]),
        pack2<T>(weights[2 * j + 1][0], weights[2 * j + 1][1]), pack2<T>(weights[2 * j + 1][2], weights[2 * j + 1][3])};
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, base + j * 16 * kPieces * 16 + swizzle_piece<kPieces>(row, 2 * d + half) * 16);
      mma_m16n8k16<T>(rows.output[2 * d], a, b[0], b[1]);
      mma_m16n8k16<T>(rows.output[2 * d + 1], a, b[2], b[3]);
    }
  }
}

// What the op asks for beside scaled products.
struct ScoreOptions {
  bool scores;  // per-token k_scale, softcap or ALiBi
  bool values;  // per-token v_scale
};

// The tile of keys first_key on: scores, weights, sums. kWhole: every row of the warp sees every key, and there are no
// options. `scale`: of the two rows' scores.
template <class T, class Config, int kDim, bool kWhole, class Tiles>
static __device__ __forceinline__ void attend_tile(const PagedPrefillParams& p, const Tiles& tiles,
                                                   const uint16_t* query, const uint32_t (&fragments)[kDim / 16][4],
                                                   const float (&token_scales)[2][Config::kKeys], int first_key,
                                                   const float (&scale)[2], const ScoreOptions& options,
                                                   WarpRows<kDim>& rows) {
  const int first = kWhole ? 0 : max(rows.any.begin - first_key, 0) / 16;
  const int last = kWhole ? Config::kKeys / 16 : (min(rows.any.end - first_key, Config::kKeys) + 15) / 16;
  float scores[Config::kKeys / 8][4], factor[2], unit[2] = {scale[0] * kLog2E, scale[1] * kLog2E};
  score<T, Config, kDim, kWhole>(tiles[0], query, fragments, first, last, scores);
  if constexpr (!kWhole) {
    if (options.scores) {
      apply_options<Config>(p, rows, token_scales[0], first_key, scale, scores);
      unit[0] = unit[1] = kLog2E;
    }
    mask_scores<Config>(rows, first_key, scores);
  }
  weigh<T, Config>(unit, !kWhole && options.values ? token_scales[1] : nullptr, rows, scores, factor);
  accumulate<T, Config, kDim, kWhole>(tiles[1], scores, factor, first, last, rows);
}

}  // namespace pagedkern
