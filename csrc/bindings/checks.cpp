#include "bindings/checks.h"

#include "bindings/overlap.h"

namespace pagedkern::bindings {
namespace {

std::string expected_shape(std::initializer_list<Dim> dims) {
  std::string shape = "[";
  for (const Dim& dim : dims) {
    if (shape.size() > 1) shape += ", ";
    const bool literal = dim.name[0] == '\0';
    if (!literal) shape += dim.name;
    if (!literal && dim.size >= 0) shape += "=";
    if (dim.size >= 0) shape += std::to_string(dim.size);
  }
  return shape + "]";
}

bool shape_matches(const Arg& arg, std::initializer_list<Dim> expected) {
  if (arg.dim != static_cast<int64_t>(expected.size())) return false;
  int64_t d = 0;
  for (const Dim& dim : expected) {
    if (dim.size >= 0 && arg.size(d) != dim.size) return false;
    ++d;
  }
  return true;
}

// A tensor over foreign memory (torch.frombuffer, from_blob) may start between two elements, which no kernel can read.
void check_start(const char* op, const Arg& arg) {
  if (arg.numel > 0 && reinterpret_cast<uintptr_t>(arg.data) % arg.itemsize != 0) {
    fail(op, arg.label(), text("start at a multiple of its element size (", arg.itemsize, " bytes)"),
         text("address ", static_cast<const void*>(arg.data)));
  }
}

}  // namespace

void fail(const char* op, const std::string& argument, const std::string& rule, const std::string& got) {
  throw std::runtime_error(std::string(op) + ": " + argument + " must " + rule + ", got " + got);
}

void check_shape(const char* op, const Arg& arg, std::initializer_list<Dim> expected) {
  if (!shape_matches(arg, expected)) fail(op, arg.label(), "have shape " + expected_shape(expected), arg.shape());
}

void check_kind(const char* op, const Arg& arg, Kinds allowed) {
  if (!arg.is(allowed)) fail(op, arg.label(), "be " + kind_names(allowed), arg.dtype_name());
  check_start(op, arg);
}

void check_same_kind(const char* op, const Arg& arg, const Arg& other) {
  if (arg.scalar_type != other.scalar_type) {
    fail(op, arg.label(), text("have the dtype of ", other.label(), " (", other.dtype_name(), ")"), arg.dtype_name());
  }
  check_start(op, arg);
}

void check_same_device(const char* op, const Arg& arg, const Arg& other) {
  if (arg.device_type != other.device_type || arg.device_index != other.device_index) {
    fail(op, arg.label(), text("be on the device of ", other.label(), " (", other.device_name(), ")"),
         arg.device_name());
  }
}

void check_last_contiguous(const char* op, const Arg& arg) {
  const int64_t last = arg.dim - 1;
  if (arg.numel > 0 && arg.size(last) > 1 && arg.stride(last) != 1) {
    fail(op, arg.label(), "have a contiguous last dimension (stride 1)", "strides " + arg.stride_text());
  }
}

void check_contiguous(const char* op, const Arg& arg) {
  int64_t stride = 1;
  for (int64_t d = arg.dim - 1; d >= 0 && arg.numel > 0; --d) {
    if (arg.size(d) > 1 && arg.stride(d) != stride) {
      fail(op, arg.label(), "be contiguous", text("shape ", arg.shape(), ", strides ", arg.stride_text()));
    }
    stride *= arg.size(d);
  }
}

void check_compute_kind(const char* op, const Arg& arg, const Backend& backend) {
  const Kinds allowed = backend.float32 ? kHalfKinds | kinds(Kind::kFloat32) : kHalfKinds;
  if (!arg.is(allowed)) {
    fail(op, arg.label(), text("be ", kind_names(allowed), " on ", backend.name), arg.dtype_name());
  }
  check_start(op, arg);
}

void check_head_dim(const char* op, const Arg& arg, int64_t head_dim) {
  if (head_dim < 8 || head_dim > 256 || head_dim % 8 != 0) {
    fail(op, arg.label(), "have a head_dim (last dimension) that is a multiple of 8 up to 256",
         text(head_dim, " in shape ", arg.shape()));
  }
}

void check_head_ratio(const char* op, const Arg& query, int64_t num_heads, int64_t num_kv_heads) {
  if (num_heads < 1 || num_heads > INT32_MAX || num_heads % num_kv_heads != 0) {
    fail(op, query.label(), text("have num_heads that is a multiple of num_kv_heads=", num_kv_heads),
         text(num_heads, " heads in shape ", query.shape()));
  }
}

void check_no_self_overlap(const char* op, const Arg& written) {
  if (overlaps_itself(written)) {
    fail(op, written.label(), "not overlap itself, since it is written",
         text("shape ", written.shape(), ", strides ", written.stride_text()));
  }
}

void check_no_overlap(const char* op, const Arg& written, const Arg& other) {
  if (overlaps(written, other)) {
    fail(op, written.label(), text("not share memory with ", other.label(), ", since it is written"),
         text("overlapping memory (", written.shape(), " strides ", written.stride_text(), " and ", other.shape(),
              " strides ", other.stride_text(), ", ", other.data - written.data, " bytes apart)"));
  }
}

void check_written(const char* op, const Arg& written, std::initializer_list<const Arg*> others) {
  check_no_self_overlap(op, written);
  for (const Arg* other : others) {
    if (other != nullptr) check_no_overlap(op, written, *other);
  }
}

CachePair check_caches(const char* op, const Arg& key_cache, const Arg& value_cache, const Arg& reference,
                       const Backend& backend) {
  check_shape(op, key_cache, {{"num_blocks"}, {"block_size"}, {"num_kv_heads"}, {"head_dim"}});
  check_shape(op, value_cache,
              {{"num_blocks", key_cache.size(0)},
               {"block_size", key_cache.size(1)},
               {"num_kv_heads", key_cache.size(2)},
               {"head_dim", key_cache.size(3)}});
  const Kinds compute = backend.float32 ? kHalfKinds | kinds(Kind::kFloat32) : kHalfKinds;
  check_kind(op, key_cache, compute | kFp8Kinds);
  check_same_kind(op, value_cache, key_cache);
  check_same_device(op, key_cache, reference);
  check_same_device(op, value_cache, reference);
  check_head_dim(op, key_cache, key_cache.size(3));
  if (key_cache.size(1) < 1) fail(op, key_cache.label(), "have a block_size of at least 1", key_cache.shape());
  if (key_cache.size(2) < 1 || key_cache.size(2) > INT32_MAX) {
    fail(op, key_cache.label(), "have at least 1 KV head", key_cache.shape());
  }
  check_last_contiguous(op, key_cache);
  check_last_contiguous(op, value_cache);
  CachePair pair;
  pair.key_cache = {key_cache.data, key_cache.stride(0), key_cache.stride(1), key_cache.stride(2)};
  pair.value_cache = {value_cache.data, value_cache.stride(0), value_cache.stride(1), value_cache.stride(2)};
  pair.shape = {key_cache.size(0), key_cache.size(1), static_cast<int32_t>(key_cache.size(2)),
                static_cast<int32_t>(key_cache.size(3)), key_cache.dtype()};
  return pair;
}

void check_cache_kind(const char* op, const Arg& cache, const Arg& tensor) {
  if (!cache.is(kFp8Kinds) && cache.scalar_type != tensor.scalar_type) {
    fail(op, cache.label(),
         text("have the dtype of ", tensor.label(), " (", tensor.dtype_name(), ") or be ", kind_names(kFp8Kinds)),
         cache.dtype_name());
  }
}

KvScale check_scale(const char* op, const std::optional<Arg>& scale, const Arg& cache, const PagedCacheShape& shape) {
  if (!scale.has_value()) return {nullptr, 0, 0, 0};
  if (!is_fp8(shape.dtype)) {
    fail(op, scale->label(), text("be None unless ", cache.label(), " is FP8"),
         text("a scale for a ", cache.dtype_name(), " cache"));
  }
  check_kind(op, *scale, kinds(Kind::kFloat32));
  check_same_device(op, *scale, cache);
  float* data = scale->as<float>();
  if (scale->dim == 0 || (scale->dim == 1 && scale->size(0) == 1)) return {data, 0, 0, 0};
  if (scale->dim == 1 && scale->size(0) == shape.num_kv_heads) {
    check_contiguous(op, *scale);
    return {data, 0, 0, 1};
  }
  if (shape_matches(*scale, {{"", shape.num_blocks}, {"", shape.block_size}, {"", shape.num_kv_heads}})) {
    return {data, scale->stride(0), scale->stride(1), scale->stride(2)};
  }
  fail(op, scale->label(),
       text("have shape [], [1], [num_kv_heads=", shape.num_kv_heads, "] or [num_blocks=", shape.num_blocks,
            ", block_size=", shape.block_size, ", num_kv_heads=", shape.num_kv_heads, "]"),
       scale->shape());
}

const int32_t* check_int32_vector(const char* op, const Arg& arg, Dim length, const Arg& reference) {
  check_kind(op, arg, kinds(Kind::kInt32));
  check_shape(op, arg, {length});
  check_same_device(op, arg, reference);
  check_contiguous(op, arg);
  return arg.as<const int32_t>();
}

const float* check_per_head(const char* op, const std::optional<Arg>& arg, int64_t num_heads, const Arg& reference) {
  if (!arg.has_value()) return nullptr;
  check_kind(op, *arg, kinds(Kind::kFloat32));
  check_shape(op, *arg, {{"num_heads", num_heads}});
  check_same_device(op, *arg, reference);
  check_contiguous(op, *arg);
  return arg->as<const float>();
}

}  // namespace pagedkern::bindings
