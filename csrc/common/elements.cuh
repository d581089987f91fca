// Vectors of elements between memory's types and float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "arch/convert.cuh"
#include "arch/fp8_encode.cuh"
#include "common/fp8.h"
#include "common/quotient.h"
#include "common/vectors.cuh"

namespace pagedkern {

// Two elements of a 16-bit type, the first in the low half.
template <class T>
static __device__ __forceinline__ float2 unpack2(uint32_t packed);

template <>
__device__ __forceinline__ float2 unpack2<__nv_bfloat16>(uint32_t packed) {
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xFFFF0000u)};
}

template <>
__device__ __forceinline__ float2 unpack2<__half>(uint32_t packed) {
  __half2 halves;
  memcpy(&halves, &packed, sizeof(halves));
  return __half22float2(halves);
}

static __device__ __forceinline__ float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
static __device__ __forceinline__ float to_float(__half x) {
  return __half2float(x);
}
static __device__ __forceinline__ float to_float(float x) {
  return x;
}

template <class T>
static __device__ __forceinline__ T from_float(float x) {
  const uint16_t bits = static_cast<uint16_t>(pack2<T>(x, 0.0f));
  T value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}

// Two FP8 codes, the first in the low byte.
template <class Format>
static __device__ __forceinline__ uint16_t encode2(float low, float high);

template <>
__device__ __forceinline__ uint16_t encode2<E4M3>(float low, float high) {
  return f32x2_to_e4m3x2(low, high);
}

template <>
__device__ __forceinline__ uint16_t encode2<E5M2>(float low, float high) {
  return f32x2_to_e5m2x2(low, high);
}

template <class Format>
static __device__ __forceinline__ float2 decode2(uint16_t codes);

template <>
__device__ __forceinline__ float2 decode2<E4M3>(uint16_t codes) {
  return unpack2<__half>(e4m3x2_to_f16x2(codes));
}

template <>
__device__ __forceinline__ float2 decode2<E5M2>(uint16_t codes) {
  return unpack2<__half>(e5m2x2_to_f16x2(codes));
}

// kCount neighbouring elements in registers, moved with the widest accesses there are: kCount * sizeof(T) is that of
// one element or a multiple of 4 bytes, and memory is aligned to as much of it as 16 bytes.
template <class T, int kCount>
struct Chunk {
  static constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  static constexpr int kAccess = kBytes < 16 ? kBytes : 16;
  using Vector = typename Access<kAccess>::Type;
  Vector vector[kBytes / kAccess];

  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kBytes / kAccess; ++i) vector[i] = reinterpret_cast<const Vector*>(from)[i];
  }
  __device__ __forceinline__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kBytes / kAccess; ++i) reinterpret_cast<Vector*>(to)[i] = vector[i];
  }
  __device__ __forceinline__ void get(float (&x)[kCount]) const {
    if constexpr (sizeof(T) == 4 || kCount == 1) {
      T values[kCount];
      memcpy(values, vector, sizeof(values));
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = to_float(values[i]);
    } else {
      uint32_t words[kBytes / 4];
      memcpy(words, vector, sizeof(words));
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i) {
        const float2 two = unpack2<T>(words[i]);
        x[2 * i] = two.x;
        x[2 * i + 1] = two.y;
      }
    }
  }
  __device__ __forceinline__ void set(const float (&x)[kCount]) {
    if constexpr (sizeof(T) == 4 || kCount == 1) {
      T values[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = from_float<T>(x[i]);
      memcpy(vector, values, sizeof(values));
    } else {
      uint32_t words[kBytes / 4];
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i) words[i] = pack2<T>(x[2 * i], x[2 * i + 1]);
      memcpy(vector, words, sizeof(words));
    }
  }
};

// kCount FP8 codes: 1, or a multiple of 4.
template <class Format, int kCount>
struct Codes : Chunk<uint8_t, kCount> {
  __device__ __forceinline__ void encode(const float (&x)[kCount]) {
    uint32_t words[(kCount + 3) / 4];
    if constexpr (kCount == 1) {
      words[0] = encode2<Format>(x[0], 0.0f);
      this->vector[0] = static_cast<uint8_t>(words[0]);
    } else {
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        words[i] = encode2<Format>(x[4 * i], x[4 * i + 1]) |
                   static_cast<uint32_t>(encode2<Format>(x[4 * i + 2], x[4 * i + 3])) << 16;
      }
      memcpy(this->vector, words, kCount);
    }
  }
  __device__ __forceinline__ void decode(float (&x)[kCount]) const {
    if constexpr (kCount == 1) {
      x[0] = decode2<Format>(this->vector[0]).x;
    } else {
      uint32_t words[kCount / 4];
      memcpy(words, this->vector, kCount);
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const float2 two = decode2<Format>(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16)));
        x[2 * i] = two.x;
        x[2 * i + 1] = two.y;
      }
    }
  }
};

// Two neighbouring lanes, both with two halves: the even one gets both first halves, the odd one both second halves, in
// the order of the lanes. All lanes of a warp call it.
static __device__ __forceinline__ uint4 trade_halves(uint2 first, uint2 second, bool odd) {
  const uint2 given = odd ? first : second;
  const uint2 got = {__shfl_xor_sync(0xFFFFFFFFu, given.x, 1), __shfl_xor_sync(0xFFFFFFFFu, given.y, 1)};
  return odd ? uint4{got.x, got.y, second.x, second.y} : uint4{first.x, first.y, got.x, got.y};
}

}  // namespace pagedkern
