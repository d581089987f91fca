// Partial results of a query tile's parts, as the threads hold them: thread by thread, 16 bytes each at a time.
#pragma once

#include "common/split_merge.cuh"
#include "paged_prefill/attend.cuh"

namespace pagedkern {

// Where this thread's part of a slot begins; its next 16 bytes lie slot_threads further.
template <int kDim>
static __device__ __forceinline__ float4* thread_slot(const PagedPrefillParams& p, int64_t slot) {
  return reinterpret_cast<float4*>(p.partials) + slot * PagedPrefillConfig<kDim, false>::kSlotVectors * p.slot_threads +
         ClusterPlace::of(p).rank * blockDim.x + threadIdx.x;
}

template <int kDim>
static __device__ __forceinline__ void store_partial(const PagedPrefillParams& p, const WarpRows<kDim>& rows,
                                                     int64_t slot) {
  float4* to = thread_slot<kDim>(p, slot);
  *to = make_float4(rows.base[0], rows.base[1], rows.sum[0], rows.sum[1]);
#pragma unroll
  for (int d = 0; d < kDim / 8; ++d) {
    const float (&x)[4] = rows.output[d];
    to[(d + 1) * p.slot_threads] = make_float4(x[0], x[1], x[2], x[3]);
  }
}

template <int kDim>
static __device__ __forceinline__ void add_partial(const PagedPrefillParams& p, WarpRows<kDim>& rows, int64_t slot) {
  const float4* from = thread_slot<kDim>(p, slot);
  const float4 state = __ldcg(from);
  float mine[2], other[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float base = r == 0 ? state.x : state.y;
    const float top = fmaxf(rows.base[r], base);
    mine[r] = rescale_factor(rows.base[r], top);
    other[r] = rescale_factor(base, top);
    rows.base[r] = top;
    rows.sum[r] = rows.sum[r] * mine[r] + (r == 0 ? state.z : state.w) * other[r];
  }
#pragma unroll
  for (int d = 0; d < kDim / 8; ++d) {
    const float4 x = __ldcg(from + (d + 1) * p.slot_threads);
    float (&y)[4] = rows.output[d];
    y[0] = y[0] * mine[0] + x.x * other[0];
    y[1] = y[1] * mine[0] + x.y * other[0];
    y[2] = y[2] * mine[1] + x.z * other[1];
    y[3] = y[3] * mine[1] + x.w * other[1];
  }
}

// Puts down what this block has of the unit. True for the block that comes last, of those with the same rows: `rows`
// are then those of all parts, in their order.
template <int kDim, class Shared>
static __device__ __forceinline__ bool merge_parts(const PagedPrefillParams& p, const Part& part, int32_t num_rows,
                                                   const Cut& cut, const ClusterPlace& place, WarpRows<kDim>& rows,
                                                   Shared& s) {
  PartPlaces places = places_of(p, part, cut, place.bucket);
  places.counter = (places.counter << p.cluster_log) + place.rank;
  const bool live = static_cast<int32_t>(threadIdx.x / 32) * Shared::Config::kWarpRows < num_rows;  // the warp's
  if (live) store_partial(p, rows, places.mine);
  if (!is_last_part(p, places, s.split)) return false;
  rows.clear();
  if (!live) return true;
  int64_t slot = places.first_slot;
  for (int i = 0; i < places.parts; ++i) {
    add_partial(p, rows, slot);
    slot = i == 0 ? places.next_slots : slot + places.step;
  }
  return true;
}

}  // namespace pagedkern
