// `pagedkern._C`: what is reached from Python without a tensor.
#include <pybind11/pybind11.h>

#include "config.h"
#include "vgpu/python.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "pagedkern's compiled helpers; pagedkern.build_info() is the public call.";
  m.def("build_info", [] {
    pybind11::dict info;
    info["version"] = PAGEDKERN_CONFIG_VERSION;
    info["compiler"] = __VERSION__;
    info["vgpu_ops_missing"] = PAGEDKERN_CONFIG_VGPU_OPS_MISSING;
    return info;
  });
  pybind11::module_ vgpu = m.def_submodule("vgpu", "The virtual GPU; pagedkern.vgpu is the public interface.");
  pagedkern::vgpu::init_python(vgpu);
}
