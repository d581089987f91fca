// merge_attention_states.
#include "bindings/checks.h"
#include "bindings/host_view.h"
#include "bindings/mode.h"
#include "bindings/ops.h"
#include "bindings/overlap.h"
#include "bindings/value_checks.h"

namespace pagedkern::bindings {
namespace {

constexpr const char* kOp = "merge_attention_states";

void check_lse(const Arg& lse, const Arg& out) {
  check_kind(kOp, lse, kinds(Kind::kFloat32));
  check_shape(kOp, lse, {{"num_tokens", out.size(0)}, {"num_heads", out.size(1)}});
  check_same_device(kOp, lse, out);
}

void check_part(const Arg& part, const Arg& out) {
  check_shape(kOp, part, {{"num_tokens", out.size(0)}, {"num_heads", out.size(1)}, {"head_dim", out.size(2)}});
  check_kind(kOp, part, kinds(out.kind) | kinds(Kind::kFloat32));
  check_same_device(kOp, part, out);
  check_last_contiguous(kOp, part);
}

// A result may be one of the inputs, element for element, but not lie across one.
void check_in_place(const Arg& written, const Arg& input) {
  if (!same_memory(written, input)) check_no_overlap(kOp, written, input);
}

}  // namespace

void merge_attention_states(const Tensor& out, const OptionalTensor& lse, const Tensor& out_a, const Tensor& lse_a,
                            const Tensor& out_b, const Tensor& lse_b) {
  const Arg o("out", out);
  const Arg a("out_a", out_a);
  const Arg b("out_b", out_b);
  const Arg la("lse_a", lse_a);
  const Arg lb("lse_b", lse_b);
  const std::optional<Arg> l = optional_arg("lse", lse);
  const Backend& backend = backend_for(kOp, o);
  check_shape(kOp, o, {{"num_tokens"}, {"num_heads"}, {"head_dim"}});
  check_compute_kind(kOp, o, backend);
  check_head_dim(kOp, o, o.size(2));
  check_last_contiguous(kOp, o);
  check_part(a, o);
  check_part(b, o);
  check_lse(la, o);
  check_lse(lb, o);
  check_no_self_overlap(kOp, o);
  for (const Arg* part : {&a, &b}) check_in_place(o, *part);
  for (const Arg* part : {&la, &lb}) check_no_overlap(kOp, o, *part);
  MergeStatesParams params{};
  if (l.has_value()) {
    check_lse(*l, o);
    check_written(kOp, *l, {&o, &a, &b});
    for (const Arg* part : {&la, &lb}) check_in_place(*l, *part);
    params.lse = l->as<float>();
    params.lse_stride_token = l->stride(0);
    params.lse_stride_head = l->stride(1);
  }
  params.out = o.data;
  params.out_a = a.data;
  params.out_b = b.data;
  params.lse_a = la.as<const float>();
  params.lse_b = lb.as<const float>();
  params.out_stride_token = o.stride(0);
  params.out_stride_head = o.stride(1);
  params.a_stride_token = a.stride(0);
  params.a_stride_head = a.stride(1);
  params.b_stride_token = b.stride(0);
  params.b_stride_head = b.stride(1);
  params.lse_a_stride_token = la.stride(0);
  params.lse_a_stride_head = la.stride(1);
  params.lse_b_stride_token = lb.stride(0);
  params.lse_b_stride_head = lb.stride(1);
  params.num_tokens = o.size(0);
  params.num_heads = static_cast<int32_t>(o.size(1));
  params.head_dim = static_cast<int32_t>(o.size(2));
  params.out_dtype = o.dtype();
  params.a_dtype = a.dtype();
  params.b_dtype = b.dtype();
  const auto run = entry(kOp, backend, backend.merge_attention_states);
  if (check_mode()) {
    const Place place = place_of(o);
    const HostView a_host(backend, place, a), b_host(backend, place, b);
    const HostView la_host(backend, place, la), lb_host(backend, place, lb);
    MergeStatesParams seen = params;
    seen.out_a = a_host.data();
    seen.out_b = b_host.data();
    seen.lse_a = la_host.as<const float>();
    seen.lse_b = lb_host.as<const float>();
    check_merge_inputs(kOp, seen);
  }
  if (o.numel > 0) run(params, place_of(o));
}

}  // namespace pagedkern::bindings
