// `pagedkern._C`: what is reached from Python without a tensor.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "config.h"
#include "paged_decode/launcher.h"
#include "paged_prefill/launcher.h"
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
  m.def(
      "paged_decode_plan",
      [](const std::vector<int32_t>& seq_lens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, bool fp8,
         int64_t multiprocessors) {
        const auto cache = fp8 ? pagedkern::DType::kFloat8E4M3 : pagedkern::DType::kBFloat16;
        const pagedkern::DecodePlan plan =
            pagedkern::paged_decode_plan(seq_lens, num_heads, num_kv_heads, head_dim, cache, multiprocessors);
        pybind11::dict result;
        result["bucket_tiles"] = plan.bucket_tiles;
        result["partial_bytes"] = plan.partial_bytes;
        result["tile_keys"] = plan.tile_keys;
        result["bytes_in_flight"] = plan.bytes_in_flight;
        result["blocks_per_multiprocessor"] = plan.blocks_per_multiprocessor;
        return result;
      },
      pybind11::arg("seq_lens"), pybind11::arg("num_heads"), pybind11::arg("num_kv_heads"), pybind11::arg("head_dim"),
      pybind11::arg("fp8"), pybind11::arg("multiprocessors") = 132,
      "What decode attention's schedule comes to for one query token a sequence.");
  m.def(
      "paged_prefill_plan",
      [](const std::vector<int32_t>& cu_seqlens_q, const std::vector<int32_t>& seq_lens, int64_t num_heads,
         int64_t num_kv_heads, int64_t head_dim, bool fp8, int64_t multiprocessors) {
        if (seq_lens.empty() || cu_seqlens_q.size() != seq_lens.size() + 1) {
          throw std::invalid_argument("cu_seqlens_q has one entry more than seq_lens, which is not empty");
        }
        const auto cache = fp8 ? pagedkern::DType::kFloat8E4M3 : pagedkern::DType::kBFloat16;
        const pagedkern::PrefillPlan plan = pagedkern::paged_prefill_plan(
            cu_seqlens_q, seq_lens, num_heads, num_kv_heads, head_dim, cache, multiprocessors);
        pybind11::dict result;
        result["bucket_tiles"] = plan.bucket_tiles;
        result["partial_bytes"] = plan.partial_bytes;
        result["tile_keys"] = plan.tile_keys;
        return result;
      },
      pybind11::arg("cu_seqlens_q"), pybind11::arg("seq_lens"), pybind11::arg("num_heads"),
      pybind11::arg("num_kv_heads"), pybind11::arg("head_dim"), pybind11::arg("fp8"),
      pybind11::arg("multiprocessors") = 132,
      "What the schedule of longer queries, or of more heads than decode's tile takes, comes to.");
  pybind11::module_ vgpu = m.def_submodule("vgpu", "The virtual GPU; pagedkern.vgpu is the public interface.");
  pagedkern::vgpu::init_python(vgpu);
}
