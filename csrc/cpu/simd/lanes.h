// Vectors of kLanes float32 with exact conversions from and to every element type of the op contract, the same bytes at
// every SIMD level. Everything is in namespace lanes of the level's own.
//   load(p), load_part(p, n)        kLanes or the first n < kLanes elements (the rest 0), no alignment needed
//   store(p, v), store_part(p, v, n)  rounded to nearest even; FP8 as common/fp8.h says; NaN is 0x7FFF in 16-bit types
//   load_pairs, store_pairs         2 * kLanes elements as evens and odds
//   mul_rounded                     a product that no compiler may contract into a fused multiply-add
#pragma once

#include <cstdint>
#include <cstring>

#include "common/fp8.h"

namespace pagedkern::cpu::PAGEDKERN_SIMD::lanes {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
template <class Format>
struct Fp8 {
  uint8_t bits;
};

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD::lanes

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "cpu/simd/lanes_avx512.h"
#elif defined(__AVX2__) && defined(__F16C__)
#include "cpu/simd/lanes_avx2.h"
#else
#include "cpu/simd/lanes_generic.h"
#endif

namespace pagedkern::cpu::PAGEDKERN_SIMD::lanes {

// The first `pairs` < kLanes pairs, by way of a full-sized copy.
template <class T>
inline void load_pairs_part(const T* p, int pairs, Vec& even, Vec& odd) {
  T staged[2 * kLanes] = {};
  std::memcpy(staged, p, 2 * pairs * sizeof(T));
  load_pairs(staged, even, odd);
}

template <class T>
inline void store_pairs_part(T* p, int pairs, Vec even, Vec odd) {
  T staged[2 * kLanes];
  store_pairs(staged, even, odd);
  std::memcpy(p, staged, 2 * pairs * sizeof(T));
}

}  // namespace pagedkern::cpu::PAGEDKERN_SIMD::lanes
