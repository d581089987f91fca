// The PTX text inside what nvcc embeds in a host object.
#pragma once

#include <string>

namespace pagedkern::vgpu::runtime {

// `wrapper` is what __cudaRegisterFatBinary receives. Throws std::runtime_error where it holds no plain PTX for sm_90.
std::string ptx_of_fatbin(const void* wrapper);

}  // namespace pagedkern::vgpu::runtime
