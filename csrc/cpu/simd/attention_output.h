// The two ends of an item: queries in, results out, or into partials that the last split of a tile merges.
#pragma once

#include "cpu/simd/attention_tile.h"

namespace pagedkern::cpu::PAGEDKERN_SIMD {

constexpr float kLn2 = 0.6931471805599453f;

template <class T>
inline void copy_as_floats(const T* from, int head_dim, int64_t padded, float* to) {
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(to + d, load(from + d));
  if (d < head_dim) store(to + d, load_part(from + d, static_cast<int>(head_dim - d)));
  for (d = (head_dim + kLanes - 1) / kLanes * kLanes; d < padded; d += kLanes) store(to + d, broadcast(0.0f));
}

// One query row as words of kStep elements, zeros behind head_dim.
template <class Mode>
inline void load_query(const PagedAttentionParams& params, int64_t offset, int64_t padded, float* words) {
  const int head_dim = params.cache.head_dim;
  if constexpr (Mode::kStep == 2) {
    std::memset(words, 0, padded * sizeof(float));
    std::memcpy(words, static_cast<const BFloat16*>(params.query) + offset, head_dim * sizeof(BFloat16));
  } else {
    switch (params.dtype) {
      case DType::kFloat16:
        return copy_as_floats(static_cast<const Half*>(params.query) + offset, head_dim, padded, words);
      case DType::kBFloat16:
        return copy_as_floats(static_cast<const BFloat16*>(params.query) + offset, head_dim, padded, words);
      default: return copy_as_floats(static_cast<const float*>(params.query) + offset, head_dim, padded, words);
    }
  }
}

template <class T>
inline void store_scaled(const float* from, float factor, int head_dim, T* to) {
  int d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(to + d, mul(load(from + d), broadcast(factor)));
  if (d < head_dim) store_part(to + d, mul(load_part(from + d, head_dim - d), broadcast(factor)), head_dim - d);
}

inline float exp2_of_scalar(float x) {
  return first_lane(exp2_of(broadcast(x)));
}

// Weight of a part with this maximum (log2) under a common one.
inline float part_weight(float maximum, float common) {
  return maximum == -kInfinity ? 1.0f : exp2_of_scalar(maximum - common);
}

// Writes out and lse of one row from the sum over all its keys.
inline void write_row(const PagedAttentionParams& params, int64_t token, int64_t head, int64_t kv_head,
                      const float* output, float maximum, float sum) {
  float factor = 1.0f;
  if (params.sinks != nullptr) {
    const float sink = params.sinks[head] * kLog2E;
    const float common = sink > maximum ? sink : maximum;
    if (common != -kInfinity) {
      factor = part_weight(maximum, common);
      sum = sum * factor + exp2_of_scalar(sink - common);
    }
    maximum = common;
  }
  // An empty sum is 0 exactly: its row has no live key, and no sink.
  const float lse = sum == 0.0f ? -kInfinity : (maximum + std::log2(sum)) * kLn2;
  if (params.v_scale.data != nullptr && !params.v_scale.per_token()) {
    factor *= params.v_scale.data[params.v_scale.offset(0, 0, kv_head)];
  }
  factor = sum == 0.0f ? 0.0f : factor / sum;
  if (params.lse != nullptr) params.lse[token * params.lse_stride_token + head * params.lse_stride_head] = lse;
  const int64_t offset = token * params.out_stride_token + head * params.out_stride_head;
  const int head_dim = params.cache.head_dim;
  switch (params.dtype) {
    case DType::kFloat16: return store_scaled(output, factor, head_dim, static_cast<Half*>(params.out) + offset);
    case DType::kBFloat16: return store_scaled(output, factor, head_dim, static_cast<BFloat16*>(params.out) + offset);
    default: return store_scaled(output, factor, head_dim, static_cast<float*>(params.out) + offset);
  }
}

inline float* partial_row(const AttentionTask& task, const AttentionItem& item, int split, int64_t kv_head, int row) {
  const int64_t rows = static_cast<int64_t>(item.num_tokens) * task.group;
  const int64_t index =
      item.partial_row + (split * static_cast<int64_t>(task.params->cache.num_kv_heads) + kv_head) * rows + row;
  return task.partials + index * (task.params->cache.head_dim + 2);
}

inline void write_partial(float* partial, int head_dim, const float* output, float maximum, float sum) {
  std::memcpy(partial, output, head_dim * sizeof(float));
  partial[head_dim] = maximum;
  partial[head_dim + 1] = sum;
}

// The splits of a row in their order, whoever finishes last: the result never depends on threads.
inline void merge_row(const AttentionTask& task, const AttentionItem& item, int64_t kv_head, int row, float* merged,
                      float& maximum, float& sum) {
  const int head_dim = task.params->cache.head_dim;
  maximum = -kInfinity;
  for (int s = 0; s < item.num_splits; ++s) {
    const float m = partial_row(task, item, s, kv_head, row)[head_dim];
    maximum = m > maximum ? m : maximum;
  }
  sum = 0.0f;
  for (int d = 0; d < head_dim + kLanes; d += kLanes) store(merged + d, broadcast(0.0f));
  for (int s = 0; s < item.num_splits; ++s) {
    const float* partial = partial_row(task, item, s, kv_head, row);
    const float weight = part_weight(partial[head_dim], maximum);
    sum += weight * partial[head_dim + 1];
    const Vec factor = broadcast(weight);
    int d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) store(merged + d, fma(factor, load(partial + d), load(merged + d)));
    if (d < head_dim) store(merged + d, fma(factor, load_part(partial + d, head_dim - d), load(merged + d)));
  }
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
