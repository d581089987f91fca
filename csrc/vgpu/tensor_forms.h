// Registration of the tensor-core instruction forms.
#pragma once

#include "vgpu/registry.h"
#include "vgpu/tensor_types.h"
#include "vgpu/warp.h"

namespace pagedkern::vgpu {

const char* tensor_type_name(TensorType type);

// For .sync.aligned forms whose lanes hold fragments: false while lanes are still missing, a fault where they never
// come.
bool require_whole_warp(Warp& warp, u32 mask);

void register_tensor_forms(Registry& registry);
void register_wgmma_forms(Registry& registry);

}  // namespace pagedkern::vgpu
