// gather_cache.
#include "bindings/checks.h"
#include "bindings/host_view.h"
#include "bindings/mode.h"
#include "bindings/ops.h"
#include "bindings/value_checks.h"

namespace pagedkern::bindings {
namespace {

constexpr const char* kOp = "gather_cache";

void check_rows(const Arg& rows, const Arg& key, const CachePair& caches, const Arg& cache, const Backend& backend) {
  check_shape(kOp, rows,
              {{"total", &rows == &key ? -1 : key.size(0)},
               {"num_kv_heads", caches.shape.num_kv_heads},
               {"head_dim", caches.shape.head_dim}});
  check_compute_kind(kOp, rows, backend);
  check_same_device(kOp, rows, cache);
  check_last_contiguous(kOp, rows);
}

}  // namespace

void gather_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                  const Tensor& block_table, const Tensor& seq_lens, const Tensor& cu_seqlens,
                  const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  const Arg k("key", key);
  const Arg v("value", value);
  const Arg kc("key_cache", key_cache);
  const Arg vc("value_cache", value_cache);
  const Arg table("block_table", block_table);
  const Arg lengths("seq_lens", seq_lens);
  const Arg cu("cu_seqlens", cu_seqlens);
  const std::optional<Arg> ks = optional_arg("k_scale", k_scale);
  const std::optional<Arg> vs = optional_arg("v_scale", v_scale);
  const Backend& backend = backend_for(kOp, kc);
  const CachePair caches = check_caches(kOp, kc, vc, kc, backend);
  check_rows(k, k, caches, kc, backend);
  check_same_kind(kOp, v, k);
  check_rows(v, k, caches, kc, backend);
  check_cache_kind(kOp, kc, k);
  GatherCacheParams params{};
  params.seq_lens = check_int32_vector(kOp, lengths, {"num_seqs"}, kc);
  params.num_seqs = lengths.size(0);
  params.cu_seqlens = check_int32_vector(kOp, cu, {"num_seqs+1", params.num_seqs + 1}, kc);
  check_kind(kOp, table, kinds(Kind::kInt32));
  check_shape(kOp, table, {{"num_seqs", params.num_seqs}, {"max_blocks"}});
  check_same_device(kOp, table, kc);
  check_last_contiguous(kOp, table);
  params.k_scale = check_scale(kOp, ks, kc, caches.shape);
  params.v_scale = check_scale(kOp, vs, vc, caches.shape);
  const Arg* ks_or_null = ks.has_value() ? &*ks : nullptr;
  const Arg* vs_or_null = vs.has_value() ? &*vs : nullptr;
  check_written(kOp, k, {&v, &kc, &vc, &table, &lengths, &cu, ks_or_null, vs_or_null});
  check_written(kOp, v, {&kc, &vc, &table, &lengths, &cu, ks_or_null, vs_or_null});
  params.key = k.data;
  params.value = v.data;
  params.key_stride_token = k.stride(0);
  params.key_stride_head = k.stride(1);
  params.value_stride_token = v.stride(0);
  params.value_stride_head = v.stride(1);
  params.total = k.size(0);
  params.dtype = k.dtype();
  params.key_cache = caches.key_cache;
  params.value_cache = caches.value_cache;
  params.cache = caches.shape;
  params.block_table = table.as<const int32_t>();
  params.block_table_stride = table.stride(0);
  params.max_blocks = table.size(1);
  const auto run = entry(kOp, backend, backend.gather_cache);
  if (backend.host_values || check_mode()) {
    const Place place = place_of(kc);
    const HostView table_host(backend, place, table), lengths_host(backend, place, lengths),
        cu_host(backend, place, cu);
    const HostView ks_host(backend, place, ks_or_null), vs_host(backend, place, vs_or_null);
    GatherCacheParams seen = params;
    seen.block_table = table_host.as<const int32_t>();
    seen.seq_lens = lengths_host.as<const int32_t>();
    seen.cu_seqlens = cu_host.as<const int32_t>();
    seen.k_scale.data = ks_host.as<float>();
    seen.v_scale.data = vs_host.as<float>();
    check_gather_indices(kOp, seen);
    check_scales(kOp, seen.k_scale, seen.v_scale, seen.cache.num_kv_heads);
    if (check_mode()) {
      CacheRows key_rows(backend, place, kc), value_rows(backend, place, vc);
      check_gather_inputs(kOp, seen, key_rows, value_rows);
    }
  }
  if (params.total > 0 && params.num_seqs > 0) run(params, place_of(kc));
}

}  // namespace pagedkern::bindings
