// Programmatic dependent launch.
#pragma once

namespace pagedkern {

// Until the kernels this launch depends on have finished and their writes can be seen; nothing to wait for otherwise.
static __device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace pagedkern
