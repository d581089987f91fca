// pagedkern_cpu::quantized_linears: what an engine needs on the CPU beside the ops of the contract.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <vector>

#include "bindings/checks.h"
#include "cpu/kernels.h"

namespace pagedkern::bindings {
namespace {

constexpr const char* kOp = "quantized_linears";
constexpr int64_t kAccumulate = 1, kGated = 2;  // the bits of `flags`

using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;

std::vector<Arg> args_of(const char* name, const Tensors& tensors) {
  std::vector<Arg> args;
  args.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) args.emplace_back(name, tensors[i], static_cast<int32_t>(i));
  return args;
}

std::string element(const char* name, size_t i) {
  return text(name, "[", i, "]");
}

void check_on_cpu(const Arg& arg) {
  if (arg.device_type != aoti_torch_device_type_cpu()) fail(kOp, arg.label(), "be on the CPU", arg.device_name());
}

void check_length(const char* name, size_t length, size_t expected) {
  if (length != expected) fail(kOp, name, text("have as many entries as weight (", expected, ")"), text(length));
}

void check_buffers(const std::vector<Arg>& buffers) {
  if (buffers.empty()) fail(kOp, "buffers", "hold the inputs and outputs", "none");
  for (const Arg& buffer : buffers) {
    check_on_cpu(buffer);
    check_kind(kOp, buffer, kHalfKinds | kinds(Kind::kFloat32));
    check_shape(kOp, buffer, {{"num_rows", buffers[0].dim > 0 ? buffers[0].size(0) : -1}, {"features"}});
    check_last_contiguous(kOp, buffer);
  }
}

const Arg& buffer_at(const std::vector<Arg>& buffers, const char* name, const Ints& indices, size_t i) {
  const int64_t size = static_cast<int64_t>(buffers.size());
  if (indices[i] < 0 || indices[i] >= size) {
    fail(kOp, element(name, i), text("be the number of a buffer, 0 to ", size - 1), text(indices[i]));
  }
  return buffers[static_cast<size_t>(indices[i])];
}

// norm or bias: float32 [size], or of no elements for none.
const float* vector_or_none(const Arg& arg, const char* what, int64_t size) {
  check_on_cpu(arg);
  check_kind(kOp, arg, kinds(Kind::kFloat32));
  if (arg.numel == 0) return nullptr;
  check_shape(kOp, arg, {{what, size}});
  check_contiguous(kOp, arg);
  return arg.as<const float>();
}

QuantFormat check_weight(const Arg& weight, int64_t in_features, int64_t out_features) {
  check_on_cpu(weight);
  check_kind(kOp, weight, kinds(Kind::kUInt8));
  if (in_features % kQuantGroup != 0) {
    fail(kOp, weight.label(), text("get an input of a multiple of ", kQuantGroup, " features"), text(in_features));
  }
  const int64_t panels = (out_features + kPanelOutputs - 1) / kPanelOutputs;
  check_shape(kOp, weight, {{"panels", panels}, {"groups", in_features / kQuantGroup}, {"group_bytes"}});
  check_contiguous(kOp, weight);
  for (const QuantFormat format : {QuantFormat::k4Bit, QuantFormat::k8Bit}) {
    if (weight.size(2) == group_bytes(format)) return format;
  }
  fail(kOp, weight.label(),
       text("have groups of ", group_bytes(QuantFormat::k4Bit), " (4 bits) or ", group_bytes(QuantFormat::k8Bit),
            " bytes (8 bits)"),
       text(weight.size(2)));
}

QuantizedLinear linear_of(const Arg& x, const Arg& out, const Arg& weight, const Arg& norm, const Arg& bias,
                          int64_t flags) {
  QuantizedLinear linear{};
  linear.accumulate = (flags & kAccumulate) != 0;
  linear.gated = (flags & kGated) != 0;
  linear.in_features = x.size(1);
  linear.out_features = out.size(1) * (linear.gated ? 2 : 1);
  if (linear.gated && out.size(1) % kPanelOutputs != 0) {
    fail(kOp, out.label(), text("have a multiple of ", kPanelOutputs, " features where the linear is gated"),
         text(out.size(1)));
  }
  linear.format = check_weight(weight, linear.in_features, linear.out_features);
  linear.x = x.data;
  linear.out = out.data;
  linear.weight = weight.as<const uint8_t>();
  linear.norm = vector_or_none(norm, "in_features", linear.in_features);
  linear.bias = vector_or_none(bias, "out_features", linear.out_features);
  linear.x_stride = x.stride(0);
  linear.out_stride = out.stride(0);
  linear.x_dtype = x.dtype();
  linear.out_dtype = out.dtype();
  return linear;
}

// No written buffer may share memory with anything else: threads read one while others write another.
void check_apart(const Arg& written, const std::vector<Arg>& buffers, const std::vector<Arg>& weights) {
  check_no_self_overlap(kOp, written);
  for (const Arg& buffer : buffers) {
    if (&buffer != &written) check_no_overlap(kOp, written, buffer);
  }
  for (const Arg& weight : weights) check_no_overlap(kOp, written, weight);
}

cpu::ThreadPool thread_pool() {
  const auto parallel_for = [](int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
    torch::stable::parallel_for(0, count, grain, body);
  };
  return {parallel_for, static_cast<int>(torch::stable::get_num_threads())};
}

void quantized_linears(Tensors buffer, Ints input, Ints output, Tensors weight, Tensors norm, Tensors bias, Ints flags,
                       double eps) {
  const std::vector<Arg> buffers = args_of("buffers", buffer), weights = args_of("weight", weight);
  const std::vector<Arg> norms = args_of("norm", norm), biases = args_of("bias", bias);
  const size_t count = weights.size();
  check_length("input", input.size(), count);
  check_length("output", output.size(), count);
  check_length("norm", norms.size(), count);
  check_length("bias", biases.size(), count);
  check_length("flags", flags.size(), count);
  if (!(std::isfinite(eps) && eps >= 0)) fail(kOp, "eps", "be finite and not negative", text(eps));
  check_buffers(buffers);
  std::vector<QuantizedLinear> linears;
  linears.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const Arg& x = buffer_at(buffers, "input", input, i);
    const Arg& out = buffer_at(buffers, "output", output, i);
    if (&x == &out) fail(kOp, element("output", i), "be another buffer than its input", text(output[i]));
    if (flags[i] < 0 || flags[i] > (kAccumulate | kGated)) {
      fail(kOp, element("flags", i), "be a sum of 1 (accumulate) and 2 (gated)", text(flags[i]));
    }
    linears.push_back(linear_of(x, out, weights[i], norms[i], biases[i], flags[i]));
    check_apart(out, buffers, weights);
  }
  const QuantizedLinearsParams params = {linears.data(), static_cast<int64_t>(count), buffers[0].size(0),
                                         static_cast<float>(eps)};
  if (count > 0 && params.num_rows > 0) cpu::quantized_linears(params, thread_pool());
}

}  // namespace
}  // namespace pagedkern::bindings

#define PAGEDKERN_JOIN_CPU(name) name##_cpu
#define PAGEDKERN_CPU_NAMESPACE_OF(name) PAGEDKERN_JOIN_CPU(name)
#define PAGEDKERN_CPU_NAMESPACE PAGEDKERN_CPU_NAMESPACE_OF(PAGEDKERN_NAMESPACE)

STABLE_TORCH_LIBRARY(PAGEDKERN_CPU_NAMESPACE, m) {
  m.def(
      "quantized_linears(Tensor(a!)[] buffers, int[] input, int[] output, Tensor[] weight, Tensor[] norm, "
      "Tensor[] bias, int[] flags, float eps) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(PAGEDKERN_CPU_NAMESPACE, CPU, m) {
  m.impl("quantized_linears", TORCH_BOX(&pagedkern::bindings::quantized_linears));
}
