// Where the partial results of a unit's parts lie, and which block of them is the last.
#pragma once

#include "common/split_schedule.h"

namespace pagedkern {

struct PartPlaces {
  int64_t counter;
  int64_t first_slot;  // of part 0
  int64_t next_slots;  // of part 1, the others behind it
  int64_t mine;        // slot
  int32_t step;        // between the slots of parts 1, 2, ...
  int32_t parts;
};

static __device__ __forceinline__ PartPlaces places_of(const SplitParams& p, const Part& part, const Cut& cut,
                                                       uint32_t bucket) {
  PartPlaces places;
  if (p.op.num_splits > 0) {  // a slot for every piece, whatever the buckets
    const int64_t place = p.place_tokens > 0 ? part.query_begin / p.place_tokens : part.seq;
    places.counter = place * p.place_units + part.unit;
    places.first_slot = places.counter * p.max_splits;
    places.next_slots = places.first_slot + 1;
    places.mine = places.first_slot + part.piece;
    places.step = 1;
    places.parts = part.unit_pieces;
    return places;
  }
  // Two slots a bucket: of its first part, and of another that it begins and does not end.
  const int64_t first = bucket_of(part.unit_begin, cut.pieces, cut.buckets);
  const int64_t last = bucket_of(part.unit_begin + part.unit_pieces - 1, cut.pieces, cut.buckets);
  places.counter = first;
  places.first_slot = 2 * first + (bucket_begin(first, cut.pieces, cut.buckets) == part.unit_begin ? 0 : 1);
  places.next_slots = 2 * (first + 1);
  places.mine = bucket == first ? places.first_slot : 2 * static_cast<int64_t>(bucket);
  places.step = 2;
  places.parts = static_cast<int32_t>(last - first + 1);
  return places;
}

// Counts an arrival; true for the last of `parts`. A word that does not look like a count is none yet, so that the
// workspace may hold anything before; the last arrival leaves 0.
static __device__ __forceinline__ bool arrive_last(uint64_t* counter, int32_t parts) {
  constexpr uint64_t kMark = 0x9E3779B978000000ULL;
  constexpr uint64_t kCount = (1ULL << 27) - 1;  // no unit has more tiles of keys
  auto* word = reinterpret_cast<unsigned long long*>(counter);
  unsigned long long seen = 0;  // the likeliest: nobody was here
  for (;;) {
    const uint64_t count = ((seen & ~kCount) == kMark ? seen & kCount : 0) + 1;
    const bool last = count == static_cast<uint64_t>(parts);
    const unsigned long long found = atomicCAS(word, seen, last ? 0 : kMark | count);
    if (found == seen) return last;
    seen = found;
  }
}

// For all threads of a block that have written its partial result: whether every part of the unit is there now, to be
// read by this block.
template <class Shared>
static __device__ __forceinline__ bool is_last_part(const SplitParams& p, const PartPlaces& places, Shared& shared) {
  __syncthreads();
  if (threadIdx.x == 0) {  // its fences order what the block has written and is going to read
    __threadfence();
    shared.last = arrive_last(p.counters + places.counter, places.parts);
    __threadfence();
  }
  __syncthreads();
  return shared.last != 0;
}

}  // namespace pagedkern
