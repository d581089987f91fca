// The virtual GPU's part of the Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace pagedkern::vgpu {

void init_python(pybind11::module_& m);

}  // namespace pagedkern::vgpu
