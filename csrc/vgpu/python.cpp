// The binding that pagedkern/vgpu builds on: programs, memory ranges, launches. Arguments and reports are shaped in
// Python.
#include "vgpu/python.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <set>

#include "vgpu/capture.h"
#include "vgpu/device.h"
#include "vgpu/launch.h"
#include "vgpu/registry.h"

namespace pagedkern::vgpu {
namespace {

namespace py = pybind11;

py::tuple to_tuple(const Dim3& d) {
  return py::make_tuple(d.x, d.y, d.z);
}

Dim3 to_dim(const py::tuple& t) {
  return {t[0].cast<u32>(), t[1].cast<u32>(), t[2].cast<u32>()};
}

py::dict report_dict(const Kernel& kernel, const LaunchReport& r) {
  const Counters& c = r.counters;
  py::dict d, classes;
  d["kernel"] = r.kernel;
  d["grid"] = to_tuple(r.config.grid);
  d["block"] = to_tuple(r.config.block);
  d["cluster"] = to_tuple(r.config.cluster);
  d["warp_instructions"] = c.warp_instructions;
  d["thread_instructions"] = c.thread_instructions;
  for (size_t k = 0; k < c.by_class.size(); ++k) {
    if (c.by_class[k]) classes[class_name(InstClass(k))] = c.by_class[k];
  }
  d["instructions_by_class"] = classes;
  d["global_load_bytes"] = c.global_load_bytes;
  d["global_load_requests"] = c.global_load_requests;
  d["global_load_sectors"] = c.global_load_sectors;
  d["global_store_bytes"] = c.global_store_bytes;
  d["global_store_requests"] = c.global_store_requests;
  d["global_store_sectors"] = c.global_store_sectors;
  d["global_vector_bytes"] = c.global_vector_bytes;
  d["global_vector_requests"] = c.global_vector_requests;
  d["unique_global_read_bytes"] = c.unique_global_read_bytes;
  d["unique_global_write_bytes"] = c.unique_global_write_bytes;
  d["bulk_bytes"] = c.bulk_bytes;
  d["shared_load_wavefronts"] = c.shared_load_wavefronts;
  d["shared_store_wavefronts"] = c.shared_store_wavefronts;
  d["shared_bank_conflicts"] = c.shared_bank_conflicts;
  d["tensor_flops"] = c.tensor_flops;
  d["barriers"] = c.barriers;
  d["atomics"] = c.atomics;
  d["seconds"] = r.seconds;
  std::map<u32, u64> lines;
  for (size_t pc = 0; pc < r.executed.size(); ++pc) lines[kernel.where[pc].line] += r.executed[pc];
  d["executed_by_line"] = lines;
  return d;
}

LaunchOptions to_options(const py::dict& options) {
  LaunchOptions o;
  o.seed = options["seed"].cast<u64>();
  o.async_completion = AsyncCompletion(options["async_completion"].cast<int>());
  o.check_uninitialized = options["uninitialized"].cast<bool>();
  o.check_races = options["races"].cast<bool>();
  o.check_global_races = options["global_races"].cast<bool>();
  o.check_barriers = options["barriers"].cast<bool>();
  o.check_async = options["async"].cast<bool>();
  o.counters = options["counters"].cast<bool>();
  o.max_warp_instructions = options["max_warp_instructions"].cast<u64>();
  o.threads = options["threads"].cast<int>();
  return o;
}

py::dict run(const std::shared_ptr<Program>& program, const std::string& name, const py::tuple& grid,
             const py::tuple& block, const py::tuple& cluster, u32 shared_bytes, const py::bytes& params,
             const std::vector<py::tuple>& ranges, const py::dict& options) {
  const Kernel& kernel = program->kernel(name);
  LaunchConfig config{to_dim(grid), to_dim(block), to_dim(cluster), shared_bytes};
  std::string raw = params;
  std::vector<u8> buffer(raw.begin(), raw.end());
  GlobalMemory memory;
  for (bool freed : {true, false}) {  // first what was freed, so that memory in use that took its place counts
    for (const py::tuple& r : ranges) {
      if (r[4].cast<bool>() != freed) continue;
      memory.add(r[0].cast<u64>(), r[1].cast<u64>(), r[2].cast<std::string>(), r[3].cast<bool>());
      if (freed) memory.remove(r[0].cast<u64>());
    }
  }
  const LaunchOptions o = to_options(options);
  LaunchReport report;
  {
    py::gil_scoped_release release;
    report = launch(kernel, config, buffer, memory, o);
  }
  return report_dict(kernel, report);
}

// Python's KernelFault carries the parts of the message as attributes.
void register_fault(py::module_& m) {
  static PyObject* fault = PyErr_NewException("pagedkern.vgpu.KernelFault", PyExc_RuntimeError, nullptr);
  static PyObject* parse = PyErr_NewException("pagedkern.vgpu.ParseError", PyExc_ValueError, nullptr);
  static PyObject* refused = PyErr_NewException("pagedkern.vgpu.LaunchError", PyExc_ValueError, nullptr);
  m.attr("KernelFault") = py::handle(fault);
  m.attr("ParseError") = py::handle(parse);
  m.attr("LaunchError") = py::handle(refused);
  py::register_local_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const KernelFault& e) {
      py::object value = py::reinterpret_borrow<py::object>(fault)(py::str(e.what()));
      value.attr("kind") = e.kind;
      value.attr("detail") = e.detail;
      value.attr("kernel") = e.site.kernel;
      value.attr("block") = to_tuple(e.site.block);
      value.attr("thread") = to_tuple(e.site.thread);
      value.attr("ptx_line") = e.site.ptx_line;
      value.attr("instruction") = e.site.instruction;
      value.attr("source") = e.site.source.empty() ? py::object(py::none()) : py::object(py::str(e.site.source));
      PyErr_SetObject(fault, value.ptr());
    } catch (const ParseError& e) {
      PyErr_SetString(parse, e.what());
    } catch (const LaunchError& e) {
      PyErr_SetString(refused, e.what());
    }
  });
}

py::list kernel_params(const Kernel& k) {
  py::list out;
  for (const ParamSlot& p : k.params) out.append(py::make_tuple(p.name, p.offset, p.bytes, p.align));
  return out;
}

py::bytes encode_tensor_map(u32 type, u64 address, const std::vector<u64>& dims, const std::vector<u64>& strides,
                            const std::vector<u32>& box, const std::vector<u32>& element_strides, u32 interleave,
                            u32 swizzle, u32 l2_promotion, u32 nan_fill) {
  TensorMap map;
  map.type = TmaType(std::min(type, 255u));
  map.rank = u32(dims.size());
  map.address = address;
  if (dims.size() > kMaxTensorRank || strides.size() + 1 != dims.size() || box.size() != dims.size() ||
      element_strides.size() != dims.size()) {
    throw py::value_error("globalDim, globalStrides, boxDim and elementStrides do not fit together");
  }
  std::copy(dims.begin(), dims.end(), map.dims.begin());
  std::copy(strides.begin(), strides.end(), map.strides.begin());
  std::copy(box.begin(), box.end(), map.box.begin());
  std::copy(element_strides.begin(), element_strides.end(), map.element_strides.begin());
  map.interleave = interleave;
  map.swizzle = swizzle;
  map.l2_promotion = l2_promotion;
  map.nan_fill = nan_fill;
  u8 bytes[kTensorMapBytes];
  if (const std::string problem = make_tensor_map(map, bytes); !problem.empty()) throw py::value_error(problem);
  return py::bytes(reinterpret_cast<const char*>(bytes), kTensorMapBytes);
}

}  // namespace

void init_python(py::module_& m) {
  register_fault(m);
  // Local to the module: an extension built by itself may live beside pagedkern._C (PAGEDKERN_VGPU_EXTENSION).
  py::class_<Program, std::shared_ptr<Program>>(m, "Program", py::module_local())
      .def(py::init(&Program::compile), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("kernels",
                             [](const Program& p) {
                               std::vector<std::string> names;
                               for (const auto& k : p.kernels) names.push_back(k->name);
                               return names;
                             })
      .def("params", [](const Program& p, const std::string& kernel) { return kernel_params(p.kernel(kernel)); })
      .def("info",
           [](const Program& p, const std::string& kernel) {
             const Kernel& k = p.kernel(kernel);
             py::dict d;
             d["instructions"] = k.code.size();
             d["param_bytes"] = k.param_bytes;
             d["static_shared_bytes"] = k.shared_static_bytes;
             d["local_bytes"] = k.local_bytes;
             d["register_bytes"] = k.register_bytes;
             d["tracked_registers"] = (k.register_bytes - k.track_begin) / sizeof(TrackState);
             d["reqntid"] = to_tuple(k.reqntid);
             d["maxntid"] = to_tuple(k.maxntid);
             return d;
           })
      .def("variables",
           [](const Program& p) {  // name -> (address, bytes)
             py::dict d;
             for (const auto& v : p.variables)
               d[py::str(v->name)] = py::make_tuple(reinterpret_cast<u64>(v->data), v->bytes);
             return d;
           })
      .def("forms", [](const Program& p, const std::string& kernel) {
        std::set<std::string> names;
        for (const Inst& i : p.kernel(kernel).code) names.insert(Registry::instance().forms()[i.form].name);
        return names;
      });
  m.def("launch", &run);
  m.def(
      "set_options",
      [](const py::object& options) {
        const LaunchOptions o = options.is_none() ? LaunchOptions{} : to_options(options);
        set_thread_options(options.is_none() ? nullptr : &o);
      },
      "How launches that compiled host code makes in this thread run; None: the defaults, and no reports are kept.");
  m.def(
      "take_reports",
      [] {
        py::list out;
        for (const FinishedLaunch& l : take_thread_reports()) out.append(report_dict(*l.kernel, l.report));
        return out;
      },
      "Reports of those launches since the last call, oldest first.");
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def("launch", &Graph::launch, py::call_guard<py::gil_scoped_release>())
      .def("size", &Graph::size);
  m.def(
      "begin_capture", [] { return begin_capture(nullptr, /*every_stream=*/true, /*relaxed=*/false); },
      "What compiled host code gives to any stream in this thread is kept from here on; False: that is so already.");
  m.def("is_capturing", [] { return current_capture() != nullptr; });
  m.def(
      "capture_call",
      [](const py::function& call) {
        current_capture()->graph->add([call] {
          const py::gil_scoped_acquire acquire;
          call();
        });
      },
      "Keeps a call while is_capturing().");
  m.def("end_capture", &end_capture, "What was kept; None: a call came that no capture allows.");
  m.def("encode_tensor_map", &encode_tensor_map,
        "The 128 bytes of a tensor map; ValueError names the argument that is wrong.");
  m.def("level", &Registry::level);
  m.def(
      "forms",
      [] {
        std::vector<std::pair<std::string, std::string>> out;
        for (const Form& f : Registry::instance().forms()) out.emplace_back(f.name, class_name(f.cls));
        return out;
      },
      "Every instruction form: (name, class).");
  m.def(
      "find_form",
      [](const std::string& opcode) -> py::object {
        const Form* f = Registry::instance().find(opcode);
        return f ? py::object(py::str(f->name)) : py::object(py::none());
      },
      "The table's form that executes an opcode as written in PTX, or None.");
  m.def(
      "executed_forms",
      [] {
        std::map<std::string, u64> out;
        std::vector<u64> counts = executed_forms();
        for (const Form& f : Registry::instance().forms()) {
          if (counts[f.index]) out[f.name] = counts[f.index];
        }
        return out;
      },
      "Warp instructions executed in this process, by form.");
}

}  // namespace pagedkern::vgpu

#ifdef PAGEDKERN_VGPU_STANDALONE
PYBIND11_MODULE(_vgpu, m) {
  pagedkern::vgpu::init_python(m);
}
#endif
