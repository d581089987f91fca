// reshape_and_cache, reshape_and_cache_dynamic, rope_reshape_and_cache.
#include "bindings/checks.h"
#include "bindings/host_view.h"
#include "bindings/mode.h"
#include "bindings/ops.h"
#include "bindings/value_checks.h"

namespace pagedkern::bindings {
namespace {

// What the three ops share: rows, caches and slots.
struct WriteArgs {
  const char* op;
  Arg key, value, key_cache, value_cache, slot_mapping;
  const Backend& backend;

  WriteArgs(const char* op, const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
            const Tensor& slot_mapping)
      : op(op),
        key("key", key),
        value("value", value),
        key_cache("key_cache", key_cache),
        value_cache("value_cache", value_cache),
        slot_mapping("slot_mapping", slot_mapping),
        backend(backend_for(op, this->key_cache)) {}

  // Everything but the scales.
  CacheWriteParams check() const {
    const CachePair caches = check_caches(op, key_cache, value_cache, key_cache, backend);
    check_rows(key, caches.shape);
    check_rows(value, caches.shape);
    check_same_kind(op, value, key);
    check_kind(op, slot_mapping, kIndexKinds);
    check_shape(op, slot_mapping, {{"n"}});
    check_same_device(op, slot_mapping, key_cache);
    if (slot_mapping.numel > key.size(0)) {
      fail(op, "slot_mapping", text("have at most num_tokens=", key.size(0), " entries"), slot_mapping.shape());
    }
    CacheWriteParams params{};
    params.key = key.data;
    params.value = value.data;
    params.key_stride_token = key.stride(0);
    params.key_stride_head = key.stride(1);
    params.value_stride_token = value.stride(0);
    params.value_stride_head = value.stride(1);
    params.dtype = key.dtype();
    params.key_cache = caches.key_cache;
    params.value_cache = caches.value_cache;
    params.cache = caches.shape;
    params.slot_mapping = slot_mapping.data;
    params.slot_is_int32 = slot_mapping.kind == Kind::kInt32;
    params.slot_stride = slot_mapping.stride(0);
    params.num_slots = slot_mapping.numel;
    return params;
  }

  void check_rows(const Arg& rows, const PagedCacheShape& shape) const {
    check_shape(op, rows,
                {{"num_tokens", &rows == &key ? -1 : key.size(0)},
                 {"num_kv_heads", shape.num_kv_heads},
                 {"head_dim", shape.head_dim}});
    check_compute_kind(op, rows, backend);
    check_same_device(op, rows, key_cache);
    check_last_contiguous(op, rows);
  }

  // `k` and `v` are the scales that are read, null where there is none.
  void check_values(const CacheWriteParams& params, const Arg* k, const Arg* v) const {
    if (!backend.host_values && !check_mode()) return;
    const Place place = place_of(key_cache);
    const HostView slots(backend, place, slot_mapping), k_host(backend, place, k), v_host(backend, place, v);
    CacheWriteParams seen = params;
    seen.slot_mapping = slots.data();
    seen.k_scale.data = k_host.as<float>();
    seen.v_scale.data = v_host.as<float>();
    check_slots(op, seen);
    check_scales(op, seen.k_scale, seen.v_scale, seen.cache.num_kv_heads);
    if (!check_mode()) return;
    const HostView key_host(backend, place, key), value_host(backend, place, value);
    seen.key = key_host.data();
    seen.value = value_host.data();
    check_write_inputs(op, seen);
  }
};

const Arg* pointer(const std::optional<Arg>& arg) {
  return arg.has_value() ? &*arg : nullptr;
}

}  // namespace

void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& slot_mapping, const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  const char* op = "reshape_and_cache";
  const WriteArgs args(op, key, value, key_cache, value_cache, slot_mapping);
  const std::optional<Arg> k_scale_arg = optional_arg("k_scale", k_scale);
  const std::optional<Arg> v_scale_arg = optional_arg("v_scale", v_scale);
  CacheWriteParams params = args.check();
  check_cache_kind(op, args.key_cache, args.key);
  params.k_scale = check_scale(op, k_scale_arg, args.key_cache, params.cache);
  params.v_scale = check_scale(op, v_scale_arg, args.value_cache, params.cache);
  const Arg* k = pointer(k_scale_arg);
  const Arg* v = pointer(v_scale_arg);
  check_written(op, args.key_cache, {&args.value_cache, &args.key, &args.value, &args.slot_mapping, k, v});
  check_written(op, args.value_cache, {&args.key, &args.value, &args.slot_mapping, k, v});
  const auto run = entry(op, args.backend, args.backend.reshape_and_cache);
  args.check_values(params, k, v);
  if (params.num_slots > 0) run(params, place_of(args.key_cache));
}

void reshape_and_cache_dynamic(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                               const Tensor& value_cache, const Tensor& k_scale, const Tensor& v_scale,
                               const Tensor& slot_mapping) {
  const char* op = "reshape_and_cache_dynamic";
  const WriteArgs args(op, key, value, key_cache, value_cache, slot_mapping);
  const Arg k("k_scale", k_scale);
  const Arg v("v_scale", v_scale);
  check_kind(op, args.key_cache, kFp8Kinds);
  CacheWriteParams params = args.check();
  for (const Arg* scale : {&k, &v}) {
    check_kind(op, *scale, kinds(Kind::kFloat32));
    check_shape(op, *scale,
                {{"num_blocks", params.cache.num_blocks},
                 {"block_size", params.cache.block_size},
                 {"num_kv_heads", params.cache.num_kv_heads}});
    check_same_device(op, *scale, args.key_cache);
  }
  check_written(op, args.key_cache, {&args.value_cache, &k, &v, &args.key, &args.value, &args.slot_mapping});
  check_written(op, args.value_cache, {&k, &v, &args.key, &args.value, &args.slot_mapping});
  check_written(op, k, {&v, &args.key, &args.value, &args.slot_mapping});
  check_written(op, v, {&args.key, &args.value, &args.slot_mapping});
  const auto run = entry(op, args.backend, args.backend.reshape_and_cache_dynamic);
  args.check_values(params, nullptr, nullptr);  // before the scales are in it: they are written, whatever they hold
  params.k_scale = {k.as<float>(), k.stride(0), k.stride(1), k.stride(2)};
  params.v_scale = {v.as<float>(), v.stride(0), v.stride(1), v.stride(2)};
  if (params.num_slots > 0) run(params, place_of(args.key_cache));
}

namespace {

RopeParams check_rope(const WriteArgs& args, const Arg& query, const Arg& positions, const Arg& cos_sin,
                      bool interleaved) {
  const char* op = args.op;
  const int64_t head_dim = args.key.size(2);
  check_shape(op, query, {{"num_tokens", args.key.size(0)}, {"num_heads"}, {"head_dim", head_dim}});
  check_same_kind(op, query, args.key);
  check_same_device(op, query, args.key_cache);
  check_last_contiguous(op, query);
  check_head_ratio(op, query, query.size(1), args.key.size(1));
  check_kind(op, positions, kIndexKinds);
  check_shape(op, positions, {{"num_tokens", args.key.size(0)}});
  check_same_device(op, positions, args.key_cache);
  check_kind(op, cos_sin, kinds(Kind::kFloat32) | kinds(query.kind));
  check_shape(op, cos_sin, {{"max_position"}, {"rotary_dim"}});
  check_same_device(op, cos_sin, args.key_cache);
  check_last_contiguous(op, cos_sin);
  const int64_t rotary_dim = cos_sin.size(1);
  if (rotary_dim < 2 || rotary_dim % 2 != 0 || rotary_dim > head_dim) {
    fail(op, "cos_sin_cache", text("have an even rotary_dim (last dimension) of 2 to head_dim=", head_dim),
         cos_sin.shape());
  }
  RopeParams rope{};
  rope.query = query.data;
  rope.key = args.key.data;
  rope.query_stride_token = query.stride(0);
  rope.query_stride_head = query.stride(1);
  rope.num_heads = static_cast<int32_t>(query.size(1));
  rope.positions = positions.data;
  rope.position_is_int32 = positions.kind == Kind::kInt32;
  rope.position_stride = positions.stride(0);
  rope.cos_sin_cache = cos_sin.data;
  rope.cos_sin_stride = cos_sin.stride(0);
  rope.max_position = cos_sin.size(0);
  rope.cos_sin_dtype = cos_sin.dtype();
  rope.rotary_dim = static_cast<int32_t>(rotary_dim);
  rope.interleaved = interleaved;
  return rope;
}

void check_rope_values(const WriteArgs& args, const RopeParams& rope, int64_t num_slots, const Arg& positions) {
  if (!args.backend.host_values && !check_mode()) return;
  const HostView host(args.backend, place_of(args.key_cache), positions);
  RopeParams seen = rope;
  seen.positions = host.data();
  check_positions(args.op, seen, num_slots);
}

void check_rope_rows(const WriteArgs& args, const CacheWriteParams& params, const RopeParams& rope, const Arg& query,
                     const Arg& positions, const Arg& cos_sin) {
  const Place place = place_of(args.key_cache);
  const HostView slots(args.backend, place, args.slot_mapping), query_host(args.backend, place, query);
  const HostView position_host(args.backend, place, positions), cos_sin_host(args.backend, place, cos_sin);
  CacheWriteParams seen = params;
  seen.slot_mapping = slots.data();
  RopeParams seen_rope = rope;
  seen_rope.query = query_host.as<void>();
  seen_rope.positions = position_host.data();
  seen_rope.cos_sin_cache = cos_sin_host.data();
  check_rope_inputs(args.op, seen, seen_rope);
}

}  // namespace

void rope_reshape_and_cache(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                            const Tensor& value_cache, const Tensor& positions, const Tensor& cos_sin_cache,
                            const Tensor& slot_mapping, bool interleaved, const OptionalTensor& k_scale,
                            const OptionalTensor& v_scale) {
  const char* op = "rope_reshape_and_cache";
  const WriteArgs args(op, key, value, key_cache, value_cache, slot_mapping);
  const Arg query_arg("query", query);
  const Arg position_arg("positions", positions);
  const Arg cos_sin("cos_sin_cache", cos_sin_cache);
  const std::optional<Arg> k_scale_arg = optional_arg("k_scale", k_scale);
  const std::optional<Arg> v_scale_arg = optional_arg("v_scale", v_scale);
  CacheWriteParams params = args.check();
  check_cache_kind(op, args.key_cache, args.key);
  params.k_scale = check_scale(op, k_scale_arg, args.key_cache, params.cache);
  params.v_scale = check_scale(op, v_scale_arg, args.value_cache, params.cache);
  const RopeParams rope = check_rope(args, query_arg, position_arg, cos_sin, interleaved);
  const Arg* k = pointer(k_scale_arg);
  const Arg* v = pointer(v_scale_arg);
  const Arg* slots = &args.slot_mapping;
  check_written(op, query_arg,
                {&args.key, &args.value, &args.key_cache, &args.value_cache, &position_arg, &cos_sin, slots, k, v});
  check_written(op, args.key, {&args.value, &args.key_cache, &args.value_cache, &position_arg, &cos_sin, slots, k, v});
  check_written(op, args.key_cache, {&args.value_cache, &args.value, &position_arg, &cos_sin, slots, k, v});
  check_written(op, args.value_cache, {&args.value, &position_arg, &cos_sin, slots, k, v});
  const auto run = entry(op, args.backend, args.backend.rope_reshape_and_cache);
  check_rope_values(args, rope, params.num_slots, position_arg);
  args.check_values(params, k, v);
  if (check_mode()) check_rope_rows(args, params, rope, query_arg, position_arg, cos_sin);
  if (params.num_slots > 0) run(params, rope, place_of(args.key_cache));
}

}  // namespace pagedkern::bindings
