// f16, bf16 and fp8 bits to and from float, branch-free where the lane loops need it. Every function is static: this
// header is compiled under different instruction sets, and no copy may leak from one to the other.
#pragma once

#include <bit>
#include <cmath>

#include "vgpu/types.h"

namespace pagedkern::vgpu {

static inline float half_to_float(u16 h) {
  u32 magnitude = u32(h & 0x7fff) << 13;
  float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;  // exact, subnormals included
  u32 special = magnitude | 0x7f800000u;
  u32 bits = magnitude >= 0x7c00u << 13 ? special : std::bit_cast<u32>(scaled);
  return std::bit_cast<float>(bits | u32(h & 0x8000) << 16);
}

static inline u16 float_to_half(float value) {  // nearest even; NaN becomes 0x7fff
  u32 x = std::bit_cast<u32>(value);
  u32 sign = x >> 16 & 0x8000;
  x &= 0x7fffffff;
  u32 small =
      std::bit_cast<u32>(std::bit_cast<float>(x) + 0.5f) - 0x3f000000u;  // subnormal halves: the addition rounds
  u32 normal = (x + 0xc8000fffu + (x >> 13 & 1)) >> 13;
  u32 r = x < 0x38800000u ? small : x >= 0x47800000u ? 0x7c00u : normal;
  return x > 0x7f800000u ? u16(0x7fff) : u16(r | sign);
}

static inline float bf16_to_float(u16 b) {
  return std::bit_cast<float>(u32(b) << 16);
}

static inline u16 float_to_bf16(float value) {  // nearest even; NaN becomes 0x7fff
  u32 x = std::bit_cast<u32>(value);
  u32 r = (x + 0x7fffu + (x >> 16 & 1)) >> 16;
  return (x & 0x7fffffff) > 0x7f800000u ? u16(0x7fff) : u16(r);
}

// double to float rounding to odd: a later rounding to fewer bits (at most 22) is then right.
static inline float double_to_float_odd(double d) {
  float f = float(d);
  u32 bits = std::bit_cast<u32>(f);
  double back = double(f);
  bool inexact = back != d && d == d;
  if (inexact && !(bits & 1)) {
    bool f_larger = std::fabs(back) > std::fabs(d);
    bits = f_larger ? bits - 1 : bits + 1;
  }
  return std::bit_cast<float>(bits);
}

// a * b + c in double, rounded to odd at 53 bits: exact enough for one later rounding to f16, bf16 or f32.
static inline double fma_odd(double product, double c) {  // `product` is exact
  double s = product + c;
  double t = s - product;
  double e = (product - (s - t)) + (c - t);
  u64 bits = std::bit_cast<u64>(s);
  if (e != 0 && std::isfinite(s) && !(bits & 1)) {
    bool away = (e > 0) == (s > 0);
    if (s == 0) return e;
    bits = away ? bits + 1 : bits - 1;
  }
  return std::bit_cast<double>(bits);
}

static inline u16 double_to_half(double d) {
  return float_to_half(double_to_float_odd(d));
}
static inline u16 double_to_bf16(double d) {
  return float_to_bf16(double_to_float_odd(d));
}

static inline float e4m3_to_float(u8 v) {
  u32 magnitude = v & 0x7f;
  float f = magnitude == 0x7f ? std::bit_cast<float>(0x7fffffffu) : std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  return v & 0x80 ? -f : f;
}

static inline float e5m2_to_float(u8 v) {
  return half_to_float(u16(v << 8));
}

// Nearest even with saturation to the largest finite value (.satfinite); NaN becomes 0x7f.
static inline u8 float_to_e4m3(float value) {
  u32 x = std::bit_cast<u32>(value);
  u32 sign = x >> 24 & 0x80;
  x &= 0x7fffffff;
  u32 small =
      std::bit_cast<u32>(std::bit_cast<float>(x) + 0x1p14f) - 0x46800000u;  // ulp of 2^14 is 2^-9, the subnormal step
  u32 normal = (x - (120u << 23) + 0x7ffffu + (x >> 20 & 1)) >> 20;
  u32 r = x < 0x3c800000u ? small : normal;
  r = x >= 0x43e00000u || r > 0x7e ? 0x7e : r;
  return x > 0x7f800000u ? u8(0x7f) : u8(r | sign);
}

static inline u8 float_to_e5m2(float value) {
  u32 x = std::bit_cast<u32>(value);
  u32 sign = x >> 24 & 0x80;
  x &= 0x7fffffff;
  u32 small = std::bit_cast<u32>(std::bit_cast<float>(x) + 0x1p7f) - 0x43000000u;  // ulp of 2^7 is 2^-16
  u32 normal = (x - (112u << 23) + 0xfffffu + (x >> 21 & 1)) >> 21;
  u32 r = x < 0x38800000u ? small : normal;
  r = x >= 0x47600000u || r > 0x7b ? 0x7b : r;
  return x > 0x7f800000u ? u8(0x7f) : u8(r | sign);
}

}  // namespace pagedkern::vgpu
