// merge_attention_states, row by row.
#include "cpu/simd/merge_states.h"

#include <math.h>

#include <cstring>

#include "cpu/simd/lanes.h"

namespace pagedkern::cpu::PAGEDKERN_SIMD {
namespace {

using namespace lanes;

using MergeRow = void (*)(void* out, const void* a, const void* b, float weight_a, float weight_b, int64_t n);
using ConvertRow = void (*)(void* out, const void* x, int64_t n);

// Reads of a and b come before the write of the same elements: out may be either.
template <class Out, class A, class B>
void merge_row(void* out_row, const void* a_row, const void* b_row, float weight_a, float weight_b, int64_t n) {
  Out* out = static_cast<Out*>(out_row);
  const A* a = static_cast<const A*>(a_row);
  const B* b = static_cast<const B*>(b_row);
  const Vec wa = broadcast(weight_a), wb = broadcast(weight_b);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store(out + i, add(mul_rounded(load(a + i), wa), mul_rounded(load(b + i), wb)));
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    const Vec merged = add(mul_rounded(load_part(a + i, rest), wa), mul_rounded(load_part(b + i, rest), wb));
    store_part(out + i, merged, rest);
  }
}

template <class Out, class In>
void convert_row(void* out_row, const void* row, int64_t n) {
  if constexpr (sizeof(Out) == sizeof(In)) {
    if (out_row != row) std::memmove(out_row, row, static_cast<size_t>(n) * sizeof(Out));
  } else {
    Out* out = static_cast<Out*>(out_row);
    const In* x = static_cast<const In*>(row);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i));
    if (i < n) store_part(out + i, load_part(x + i, static_cast<int>(n - i)), static_cast<int>(n - i));
  }
}

struct RowKernels {
  MergeRow merge;
  ConvertRow take_a, take_b;
};

template <class Out>
RowKernels choose_of(bool a_is_float, bool b_is_float) {
  const ConvertRow take_a = a_is_float ? convert_row<Out, float> : convert_row<Out, Out>;
  const ConvertRow take_b = b_is_float ? convert_row<Out, float> : convert_row<Out, Out>;
  MergeRow merge = nullptr;
  if (a_is_float) {
    merge = b_is_float ? merge_row<Out, float, float> : merge_row<Out, float, Out>;
  } else {
    merge = b_is_float ? merge_row<Out, Out, float> : merge_row<Out, Out, Out>;
  }
  return {merge, take_a, take_b};
}

RowKernels choose(const MergeStatesParams& params) {
  const bool a_is_float = params.a_dtype == DType::kFloat32, b_is_float = params.b_dtype == DType::kFloat32;
  switch (params.out_dtype) {
    case DType::kFloat16: return choose_of<Half>(a_is_float, b_is_float);
    case DType::kBFloat16: return choose_of<BFloat16>(a_is_float, b_is_float);
    default: return choose_of<float>(true, true);
  }
}

// No key at all, or a backend's mark for that.
inline bool is_empty(float lse) {
  return lse == HUGE_VALF || lse == -HUGE_VALF;
}

}  // namespace

void merge_state_rows(const MergeStatesParams& params, int64_t row_begin, int64_t row_end) {
  const RowKernels kernels = choose(params);
  const int64_t out_item = size_of(params.out_dtype), a_item = size_of(params.a_dtype),
                b_item = size_of(params.b_dtype);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t token = row / params.num_heads, head = row % params.num_heads;
    char* out =
        static_cast<char*>(params.out) + (token * params.out_stride_token + head * params.out_stride_head) * out_item;
    const char* a =
        static_cast<const char*>(params.out_a) + (token * params.a_stride_token + head * params.a_stride_head) * a_item;
    const char* b =
        static_cast<const char*>(params.out_b) + (token * params.b_stride_token + head * params.b_stride_head) * b_item;
    const float lse_a = params.lse_a[token * params.lse_a_stride_token + head * params.lse_a_stride_head];
    const float lse_b = params.lse_b[token * params.lse_b_stride_token + head * params.lse_b_stride_head];
    float lse;
    if (is_empty(lse_a) && is_empty(lse_b)) {
      std::memset(out, 0, static_cast<size_t>(params.head_dim * out_item));
      lse = -HUGE_VALF;
    } else if (is_empty(lse_b)) {
      kernels.take_a(out, a, params.head_dim);
      lse = lse_a;
    } else if (is_empty(lse_a)) {
      kernels.take_b(out, b, params.head_dim);
      lse = lse_b;
    } else {
      const bool a_leads = lse_a > lse_b;
      const float lesser = expf(a_leads ? lse_b - lse_a : lse_a - lse_b);
      const float weight_lesser = lesser / (1.0f + lesser), weight_leader = 1.0f / (1.0f + lesser);
      kernels.merge(out, a, b, a_leads ? weight_leader : weight_lesser, a_leads ? weight_lesser : weight_leader,
                    params.head_dim);
      lse = (a_leads ? lse_a : lse_b) + log1pf(lesser);
    }
    if (params.lse != nullptr) params.lse[token * params.lse_stride_token + head * params.lse_stride_head] = lse;
  }
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD
