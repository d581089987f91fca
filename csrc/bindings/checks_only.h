// The checks of an op without its kernel, for kernels that are not this library's (triton_kernels).
#pragma once

#include <cstdint>

namespace pagedkern::bindings {

struct Backend;

// Until the next call of this thread, the ops check their arguments and do nothing else. Level 0: off. 1: what the
// tensors hold is not looked at, not even in check mode. 2: in check mode it is. Returns whether check mode is on.
bool checks_only(int64_t level);

// The level of this thread.
int64_t checks_only_level();

// What the ops run on while the level is above 0: any device's tensors, kernels that do nothing.
extern const Backend kChecksOnly;

}  // namespace pagedkern::bindings
