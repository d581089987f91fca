// Registration of the asynchronous instruction forms.
#pragma once

#include "vgpu/registry.h"

namespace pagedkern::vgpu {

void register_copy_forms(Registry& registry);
void register_bulk_forms(Registry& registry);
void register_mbarrier_forms(Registry& registry);
void register_tma_forms(Registry& registry);
void register_policy_forms(Registry& registry);

}  // namespace pagedkern::vgpu
