// copy_blocks.
#include <algorithm>

#include "bindings/checks.h"
#include "bindings/host_view.h"
#include "bindings/mode.h"
#include "bindings/ops.h"
#include "bindings/value_checks.h"

namespace pagedkern::bindings {
namespace {

constexpr const char* kOp = "copy_blocks";

// Whether the kernels get the mapping from the host, who checks it. On the virtual GPU every tensor is on the CPU: a
// short mapping stands for one of the host, a longer one for one of the device, so that both ways are taken.
bool is_host_mapping(const Arg& mapping) {
  if (mapping.device_type != aoti_torch_device_type_cpu()) return false;
#ifdef PAGEDKERN_VGPU
  constexpr int64_t kHostPairs = 4;
  return mapping.size(0) <= kHostPairs;
#else
  return true;
#endif
}

std::vector<Arg> args_of(const char* name, const std::vector<Tensor>& tensors) {
  std::vector<Arg> args;
  args.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) args.emplace_back(name, tensors[i], static_cast<int32_t>(i));
  return args;
}

// All caches share block_size, heads, head_dim, dtype and device; the number of blocks and the strides are their own.
void check_cache(const Arg& cache, const Arg& first) {
  if (&cache == &first) {
    check_shape(kOp, cache, {{"num_blocks"}, {"block_size"}, {"num_kv_heads"}, {"head_dim"}});
  } else {
    check_shape(
        kOp, cache,
        {{"num_blocks"}, {"block_size", first.size(1)}, {"num_kv_heads", first.size(2)}, {"head_dim", first.size(3)}});
  }
  check_kind(kOp, cache, kHalfKinds | kFp8Kinds | kinds(Kind::kFloat32));
  check_same_kind(kOp, cache, first);
  check_same_device(kOp, cache, first);
  check_last_contiguous(kOp, cache);
  check_no_self_overlap(kOp, cache);
}

PagedCache paged(const Arg& cache) {
  return {cache.data, cache.stride(0), cache.stride(1), cache.stride(2)};
}

}  // namespace

void copy_blocks(std::vector<Tensor> key_caches, std::vector<Tensor> value_caches, const Tensor& block_mapping) {
  const std::vector<Arg> keys = args_of("key_caches", key_caches);
  const std::vector<Arg> values = args_of("value_caches", value_caches);
  const Arg mapping("block_mapping", block_mapping);
  if (keys.size() != values.size()) {
    fail(kOp, "value_caches", text("have as many tensors as key_caches (", keys.size(), ")"), text(values.size()));
  }
  check_kind(kOp, mapping, kinds(Kind::kInt64));
  check_shape(kOp, mapping, {{"pairs"}, {"", 2}});
  if (keys.empty()) return;
  const Backend& backend = backend_for(kOp, keys[0]);
  std::vector<CopyBlocksLayer> layers(keys.size());
  int64_t num_blocks = keys[0].dim > 0 ? keys[0].size(0) : 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    check_cache(keys[i], keys[0]);
    check_cache(values[i], keys[0]);
    check_no_overlap(kOp, keys[i], values[i]);
    check_no_overlap(kOp, keys[i], mapping);
    check_no_overlap(kOp, values[i], mapping);
    layers[i] = {paged(keys[i]), paged(values[i])};
    num_blocks = std::min({num_blocks, keys[i].size(0), values[i].size(0)});
  }
  const bool host_mapping = is_host_mapping(mapping);
  if (mapping.device_type != aoti_torch_device_type_cpu()) check_same_device(kOp, mapping, keys[0]);
  const auto run = entry(kOp, backend, backend.copy_blocks);
  if (host_mapping) {
    check_mapping(kOp, mapping, num_blocks, num_blocks, /*one_side=*/true);
  } else if (check_mode()) {
    const HostView host(backend, place_of(keys[0]), mapping);
    Arg seen = mapping;
    seen.data = const_cast<char*>(host.data());
    check_mapping(kOp, seen, num_blocks, num_blocks, /*one_side=*/true);
  }
  CopyBlocksParams params{};
  params.layers = layers.data();
  params.num_layers = static_cast<int32_t>(layers.size());
  params.num_blocks = num_blocks;
  params.block_size = keys[0].size(1);
  params.num_kv_heads = static_cast<int32_t>(keys[0].size(2));
  params.head_dim = static_cast<int32_t>(keys[0].size(3));
  params.itemsize = static_cast<int32_t>(keys[0].itemsize);
  params.block_mapping = mapping.as<const int64_t>();
  params.mapping_stride_pair = mapping.stride(0);
  params.mapping_stride_side = mapping.stride(1);
  params.num_pairs = mapping.size(0);
  params.mapping_on_host = host_mapping;
  if (params.num_pairs > 0 && keys[0].numel > 0) run(params, place_of(keys[0]));
}

}  // namespace pagedkern::bindings
