// Do strided tensors share memory? Exact, so that slices of one fused tensor pass and true overlaps do not.
#pragma once

#include "bindings/arg.h"

namespace pagedkern::bindings {

// Whether two elements of the tensor with different indices share a byte (a stride of 0, as_strided windows).
bool overlaps_itself(const Arg& tensor);

// Whether an element of a shares a byte with an element of b.
bool overlaps(const Arg& a, const Arg& b);

// The same elements at the same places: one tensor given twice.
bool same_memory(const Arg& a, const Arg& b);

}  // namespace pagedkern::bindings
