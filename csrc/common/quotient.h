// Division of many values by one scale, for FP8.
#pragma once

#include <cmath>

#include "common/paged_cache.h"

namespace pagedkern {

// x / scale, rounded as one IEEE division wherever an FP8 code depends on it: quotients below 2^-20 only keep their
// sign and those from 2^17 only their saturation. With r = 1 / scale rounded, q = x r and the exact rest x - q scale,
// one correction q + rest r is the rounded quotient (Markstein); scales far from 1 are brought near it by a power of
// two.
class Quotient {
 public:
  PAGEDKERN_HOST_DEVICE explicit Quotient(float scale) {
    adjust_ = scale < 0x1p-64f ? 0x1p80f : scale > 0x1p64f ? 0x1p-80f : 1.0f;
    scale_ = scale * adjust_;
    reciprocal_ = 1.0f / scale_;
  }

  PAGEDKERN_HOST_DEVICE float operator()(float x) const {
    const float adjusted = x * adjust_;
    const float q = adjusted * reciprocal_;
    const float rest = fmaf(-q, scale_, adjusted);
    // No correction where the rest is 0 (a corrected -0 would be +0), infinite or NaN.
    const float corrected = fmaf(rest, reciprocal_, q);
    return (fabsf(rest) > 0.0f) & (fabsf(q) < 0x1p17f) ? corrected : q;  // `&&` would be two branches
  }

 private:
  float adjust_, scale_, reciprocal_;
};

}  // namespace pagedkern
