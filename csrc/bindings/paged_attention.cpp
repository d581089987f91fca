// paged_attention and paged_attention_workspace_size.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "bindings/checks.h"
#include "bindings/host_view.h"
#include "bindings/mode.h"
#include "bindings/ops.h"
#include "bindings/value_checks.h"

namespace pagedkern::bindings {
namespace {

constexpr const char* kOp = "paged_attention";
constexpr int64_t kWorkspaceAlignment = 64;  // bytes; a caller's tensor may start anywhere

int64_t workspace_need(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t num_seqs,
                       int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t num_splits) {
  int64_t bytes = 0;
  for (const Backend* backend : {kCpuTensors, kCudaTensors}) {
    if (backend == nullptr || backend->paged_attention_workspace_size == nullptr) continue;
    bytes = std::max(bytes, backend->paged_attention_workspace_size(num_tokens, num_heads, num_kv_heads, head_dim,
                                                                    num_seqs, max_seqlen_q, max_seqlen_k, num_splits));
  }
  return bytes == 0 ? 0 : bytes + kWorkspaceAlignment - 1;
}

struct AttentionArgs {
  Arg out, query, key_cache, value_cache, block_table, seq_lens;
  std::optional<Arg> cu_seqlens_q, alibi_slopes, sinks, k_scale, v_scale, lse, workspace;
};

const Arg* pointer(const std::optional<Arg>& arg) {
  return arg.has_value() ? &*arg : nullptr;
}

// Shapes, dtypes, devices and strides; fills what comes from tensors.
PagedAttentionParams check_tensors(const AttentionArgs& a, const Backend& backend) {
  const CachePair caches = check_caches(kOp, a.key_cache, a.value_cache, a.query, backend);
  check_shape(kOp, a.query, {{"num_tokens"}, {"num_heads"}, {"head_dim", caches.shape.head_dim}});
  check_compute_kind(kOp, a.query, backend);
  check_last_contiguous(kOp, a.query);
  check_head_ratio(kOp, a.query, a.query.size(1), caches.shape.num_kv_heads);
  check_cache_kind(kOp, a.key_cache, a.query);
  const int64_t num_tokens = a.query.size(0);
  const int64_t num_heads = a.query.size(1);
  check_shape(kOp, a.out, {{"num_tokens", num_tokens}, {"num_heads", num_heads}, {"head_dim", caches.shape.head_dim}});
  check_same_kind(kOp, a.out, a.query);
  check_same_device(kOp, a.out, a.query);
  check_last_contiguous(kOp, a.out);

  PagedAttentionParams params{};
  params.seq_lens = check_int32_vector(kOp, a.seq_lens, {"num_seqs"}, a.query);
  const int64_t num_seqs = a.seq_lens.size(0);
  check_kind(kOp, a.block_table, kinds(Kind::kInt32));
  check_shape(kOp, a.block_table, {{"num_seqs", num_seqs}, {"max_blocks"}});
  check_same_device(kOp, a.block_table, a.query);
  check_last_contiguous(kOp, a.block_table);
  if (a.cu_seqlens_q.has_value()) {
    params.cu_seqlens_q = check_int32_vector(kOp, *a.cu_seqlens_q, {"num_seqs+1", num_seqs + 1}, a.query);
  } else if (num_tokens != num_seqs) {
    fail(kOp, "query", text("have num_tokens equal to num_seqs=", num_seqs, " where cu_seqlens_q is None"),
         a.query.shape());
  }
  params.k_scale = check_scale(kOp, a.k_scale, a.key_cache, caches.shape);
  params.v_scale = check_scale(kOp, a.v_scale, a.value_cache, caches.shape);
  params.alibi_slopes = check_per_head(kOp, a.alibi_slopes, num_heads, a.query);
  params.sinks = check_per_head(kOp, a.sinks, num_heads, a.query);
  if (a.lse.has_value()) {
    check_kind(kOp, *a.lse, kinds(Kind::kFloat32));
    check_shape(kOp, *a.lse, {{"num_tokens", num_tokens}, {"num_heads", num_heads}});
    check_same_device(kOp, *a.lse, a.query);
    params.lse = a.lse->as<float>();
    params.lse_stride_token = a.lse->stride(0);
    params.lse_stride_head = a.lse->stride(1);
  }
  params.out = a.out.data;
  params.query = a.query.data;
  params.out_stride_token = a.out.stride(0);
  params.out_stride_head = a.out.stride(1);
  params.query_stride_token = a.query.stride(0);
  params.query_stride_head = a.query.stride(1);
  params.num_tokens = num_tokens;
  params.num_heads = static_cast<int32_t>(num_heads);
  params.dtype = a.query.dtype();
  params.key_cache = caches.key_cache;
  params.value_cache = caches.value_cache;
  params.cache = caches.shape;
  params.block_table = a.block_table.as<const int32_t>();
  params.block_table_stride = a.block_table.stride(0);
  params.max_blocks = a.block_table.size(1);
  params.num_seqs = num_seqs;
  return params;
}

void check_at_least(const char* name, int64_t value, int64_t least) {
  if (value < least || value > INT32_MAX) fail(kOp, name, text("be in [", least, ", 2^31)"), text(value));
}

void check_window(const char* name, int64_t value) {
  if (value < -1) fail(kOp, name, "be -1 (unbounded) or the number of keys it reaches", text(value));
}

void check_numbers(const PagedAttentionParams& params, double scale, double softcap, int64_t num_splits) {
  check_at_least("max_seqlen_q", params.max_seqlen_q, 0);
  check_at_least("max_seqlen_k", params.max_seqlen_k, 0);
  check_at_least("num_splits", num_splits, 0);
  check_window("window_left", params.window_left);
  check_window("window_right", params.window_right);
  if (!std::isfinite(params.scale) || params.scale <= 0) fail(kOp, "scale", "be finite and positive", text(scale));
  if (!std::isfinite(params.softcap) || params.softcap < 0) {
    fail(kOp, "softcap", "be finite and 0 (off) or positive", text(softcap));
  }
}

void check_outputs(const AttentionArgs& a) {
  const Arg* lse = pointer(a.lse);
  const Arg* workspace = pointer(a.workspace);
  const Arg* cu = pointer(a.cu_seqlens_q);
  const Arg* alibi = pointer(a.alibi_slopes);
  const Arg* sinks = pointer(a.sinks);
  const Arg* k = pointer(a.k_scale);
  const Arg* v = pointer(a.v_scale);
  check_written(
      kOp, a.out,
      {&a.query, &a.key_cache, &a.value_cache, &a.block_table, &a.seq_lens, cu, alibi, sinks, k, v, lse, workspace});
  if (lse != nullptr) {
    check_written(
        kOp, *lse,
        {&a.query, &a.key_cache, &a.value_cache, &a.block_table, &a.seq_lens, cu, alibi, sinks, k, v, workspace});
  }
  if (workspace != nullptr) {
    check_written(kOp, *workspace,
                  {&a.query, &a.key_cache, &a.value_cache, &a.block_table, &a.seq_lens, cu, alibi, sinks, k, v});
  }
}

void fill_workspace(const Arg& workspace, const Arg& query, PagedAttentionParams& params) {
  check_kind(kOp, workspace, kinds(Kind::kUInt8));
  check_shape(kOp, workspace, {{"bytes"}});
  check_same_device(kOp, workspace, query);
  check_contiguous(kOp, workspace);
  const int64_t need =
      workspace_need(params.num_tokens, params.num_heads, params.cache.num_kv_heads, params.cache.head_dim,
                     params.num_seqs, params.max_seqlen_q, params.max_seqlen_k, params.num_splits);
  if (workspace.numel < need) {
    fail(kOp, "workspace", text("have at least paged_attention_workspace_size(...)=", need, " bytes"),
         text(workspace.numel));
  }
  const auto address = reinterpret_cast<uintptr_t>(workspace.data);
  const uintptr_t aligned = (address + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  const auto skipped = static_cast<int64_t>(aligned - address);
  if (workspace.numel <= skipped) return;
  params.workspace = workspace.data + skipped;
  params.workspace_bytes = workspace.numel - skipped;
}

// What index tensors, scales and, in check mode, inputs hold.
void check_values(const AttentionArgs& a, const PagedAttentionParams& params, const Backend& backend) {
  const Place place = place_of(a.query);
  const HostView table(backend, place, a.block_table), lengths(backend, place, a.seq_lens);
  const HostView starts(backend, place, pointer(a.cu_seqlens_q));
  const HostView k_scale(backend, place, pointer(a.k_scale)), v_scale(backend, place, pointer(a.v_scale));
  PagedAttentionParams seen = params;
  seen.block_table = table.as<const int32_t>();
  seen.seq_lens = lengths.as<const int32_t>();
  seen.cu_seqlens_q = starts.as<const int32_t>();
  seen.k_scale.data = k_scale.as<float>();
  seen.v_scale.data = v_scale.as<float>();
  check_attention_indices(kOp, seen);
  check_scales(kOp, seen.k_scale, seen.v_scale, seen.cache.num_kv_heads);
  if (!check_mode()) return;
  const HostView query(backend, place, a.query);
  const HostView slopes(backend, place, pointer(a.alibi_slopes)), sinks(backend, place, pointer(a.sinks));
  seen.query = query.data();
  seen.alibi_slopes = slopes.as<const float>();
  seen.sinks = sinks.as<const float>();
  CacheRows key_rows(backend, place, a.key_cache), value_rows(backend, place, a.value_cache);
  check_attention_inputs(kOp, seen, key_rows, value_rows);
}

void log_call(const PagedAttentionParams& p, const AttentionArgs& a, const Backend& backend) {
  log_once(text("paged_attention on ", backend.name, " (", backend.kernels(), "): ", a.query.dtype_name(), " over a ",
                a.key_cache.dtype_name(), " cache, num_tokens ", p.num_tokens, ", num_seqs ", p.num_seqs, ", heads ",
                p.num_heads, "/", p.cache.num_kv_heads, ", head_dim ", p.cache.head_dim, ", block_size ",
                p.cache.block_size, ", max_seqlen_q ", p.max_seqlen_q, ", max_seqlen_k ", p.max_seqlen_k,
                ", num_splits ", p.num_splits));
}

}  // namespace

void paged_attention(const Tensor& out, const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                     const Tensor& block_table, const Tensor& seq_lens, const OptionalTensor& cu_seqlens_q,
                     int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, bool causal, int64_t window_left,
                     int64_t window_right, double softcap, const OptionalTensor& alibi_slopes,
                     const OptionalTensor& sinks, const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                     const OptionalTensor& lse, int64_t num_splits, const OptionalTensor& workspace) {
  const AttentionArgs a{{"out", out},
                        {"query", query},
                        {"key_cache", key_cache},
                        {"value_cache", value_cache},
                        {"block_table", block_table},
                        {"seq_lens", seq_lens},
                        optional_arg("cu_seqlens_q", cu_seqlens_q),
                        optional_arg("alibi_slopes", alibi_slopes),
                        optional_arg("sinks", sinks),
                        optional_arg("k_scale", k_scale),
                        optional_arg("v_scale", v_scale),
                        optional_arg("lse", lse),
                        optional_arg("workspace", workspace)};
  const Backend& backend = backend_for(kOp, a.query);
  PagedAttentionParams params = check_tensors(a, backend);
  params.max_seqlen_q = max_seqlen_q;
  params.max_seqlen_k = max_seqlen_k;
  params.scale = static_cast<float>(scale);
  params.causal = causal;
  params.window_left = window_left;
  params.window_right = window_right;
  params.softcap = static_cast<float>(softcap);
  check_numbers(params, scale, softcap, num_splits);
  params.num_splits = static_cast<int32_t>(num_splits);
  if (a.workspace.has_value()) fill_workspace(*a.workspace, a.query, params);
  check_outputs(a);
  const auto run = entry(kOp, backend, backend.paged_attention);
  if (backend.host_values || check_mode()) check_values(a, params, backend);
  if (params.num_tokens == 0 || params.num_seqs == 0) return;
  if (log_enabled()) log_call(params, a, backend);
  run(params, place_of(a.query));
}

int64_t paged_attention_workspace_size(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                       int64_t num_seqs, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                       int64_t num_splits) {
  const char* op = "paged_attention_workspace_size";
  const struct {
    const char* name;
    int64_t value;
    int64_t least;
  } numbers[] = {{"num_tokens", num_tokens, 0},     {"num_heads", num_heads, 1},  {"num_kv_heads", num_kv_heads, 1},
                 {"head_dim", head_dim, 8},         {"num_seqs", num_seqs, 0},    {"max_seqlen_q", max_seqlen_q, 0},
                 {"max_seqlen_k", max_seqlen_k, 0}, {"num_splits", num_splits, 0}};
  for (const auto& number : numbers) {
    if (number.value < number.least || number.value > INT32_MAX) {
      fail(op, number.name, text("be in [", number.least, ", 2^31)"), text(number.value));
    }
  }
  if (num_heads % num_kv_heads != 0) {
    fail(op, "num_heads", text("be a multiple of num_kv_heads=", num_kv_heads), text(num_heads));
  }
  if (head_dim > 256 || head_dim % 8 != 0) fail(op, "head_dim", "be a multiple of 8 up to 256", text(head_dim));
  return workspace_need(num_tokens, num_heads, num_kv_heads, head_dim, num_seqs, max_seqlen_q, max_seqlen_k,
                        num_splits);
}

}  // namespace pagedkern::bindings
