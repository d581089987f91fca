// swap_blocks: blocks between two cache tensors, on one device or across, as few transfers as the strides allow.
#include <algorithm>
#include <numeric>

#include "bindings/checks.h"
#include "bindings/mode.h"
#include "bindings/ops.h"
#include "bindings/overlap.h"
#include "bindings/value_checks.h"

namespace pagedkern::bindings {
namespace {

constexpr const char* kOp = "swap_blocks";

// A dimension inside a block, on either side. Bytes.
struct Level {
  int64_t size;
  int64_t source_stride;
  int64_t destination_stride;
};

// The dimensions of a block, outermost first, with those merged that are one run of memory on both sides. The last
// level is a run of bytes (both strides 1).
std::vector<Level> block_levels(const Arg& src, const Arg& dst) {
  std::vector<Level> levels;
  for (int64_t d = 1; d < src.dim; ++d) {
    if (src.size(d) > 1) levels.push_back({src.size(d), src.stride(d) * src.itemsize, dst.stride(d) * dst.itemsize});
  }
  std::stable_sort(levels.begin(), levels.end(),
                   [](const Level& a, const Level& b) { return a.destination_stride > b.destination_stride; });
  levels.push_back({src.itemsize, 1, 1});
  for (size_t i = levels.size() - 1; i > 0; --i) {
    Level& outer = levels[i - 1];
    const Level& inner = levels[i];
    if (outer.source_stride == inner.source_stride * inner.size &&
        outer.destination_stride == inner.destination_stride * inner.size) {
      outer = {outer.size * inner.size, inner.source_stride, inner.destination_stride};
      levels.erase(levels.begin() + static_cast<int64_t>(i));
    }
  }
  return levels;
}

// Appends one block: the two innermost levels are one copy of rows, the others loop around it.
void append_block(const std::vector<Level>& levels, size_t level, char* destination, const char* source,
                  std::vector<RowCopy>& copies) {
  const size_t left = levels.size() - level;
  const Level& outer = levels[level];
  if (left == 1) {
    copies.push_back({destination, source, outer.size, outer.size, outer.size, 1});
  } else if (left == 2) {
    copies.push_back(
        {destination, source, outer.destination_stride, outer.source_stride, levels.back().size, outer.size});
  } else {
    for (int64_t i = 0; i < outer.size; ++i) {
      append_block(levels, level + 1, destination + i * outer.destination_stride, source + i * outer.source_stride,
                   copies);
    }
  }
}

// One transfer for each run of adjacent pairs where blocks are plain runs of memory, else the copies of each block.
std::vector<RowCopy> plan(const Arg& src, const Arg& dst, const Arg& mapping) {
  const std::vector<Level> levels = block_levels(src, dst);
  const int64_t source_block = src.stride(0) * src.itemsize;
  const int64_t destination_block = dst.stride(0) * dst.itemsize;
  const bool plain = levels.size() == 1;
  const int64_t bytes = levels.back().size;
  const bool dense = plain && source_block == bytes && destination_block == bytes;
  std::vector<RowCopy> copies;
  int64_t last_source = -2, last_destination = -2;
  for (int64_t i = 0; i < mapping.size(0); ++i) {
    const int64_t source = mapping.as<const int64_t>()[i * mapping.stride(0)];
    const int64_t destination = mapping.as<const int64_t>()[i * mapping.stride(0) + mapping.stride(1)];
    const bool adjacent = source == last_source + 1 && destination == last_destination + 1;
    if (adjacent && dense) {
      copies.back().bytes += bytes;
    } else if (adjacent && plain) {
      ++copies.back().rows;
    } else if (plain) {
      copies.push_back({dst.data + destination * destination_block, src.data + source * source_block, destination_block,
                        source_block, bytes, 1});
    } else {
      append_block(levels, 0, dst.data + destination * destination_block, src.data + source * source_block, copies);
    }
    last_source = source;
    last_destination = destination;
  }
  return copies;
}

void check_sides(const Arg& src, const Arg& dst) {
  if (src.dim < 2) fail(kOp, "src", "have shape [num_blocks, ...]", src.shape());
  const bool same_blocks = src.dim == dst.dim && std::equal(src.sizes + 1, src.sizes + src.dim, dst.sizes + 1);
  if (!same_blocks) {
    fail(kOp, "dst", text("have blocks like src (shape ", src.shape(), " but for num_blocks)"), dst.shape());
  }
  check_kind(kOp, src, kHalfKinds | kFp8Kinds | kinds(Kind::kFloat32) | kinds(Kind::kUInt8));
  check_same_kind(kOp, dst, src);
  const int32_t cpu = aoti_torch_device_type_cpu();
  if (src.device_type != cpu && dst.device_type != cpu) check_same_device(kOp, dst, src);
  check_no_self_overlap(kOp, dst);
}

}  // namespace

void swap_blocks(const Tensor& src, const Tensor& dst, const Tensor& block_mapping) {
  const Arg source("src", src);
  const Arg destination("dst", dst);
  const Arg mapping("block_mapping", block_mapping);
  const int32_t cpu = aoti_torch_device_type_cpu();
  const Arg& device_side = source.device_type != cpu ? source : destination;
  const Backend& backend = backend_for(kOp, device_side);
  check_sides(source, destination);
  check_kind(kOp, mapping, kinds(Kind::kInt64));
  check_shape(kOp, mapping, {{"pairs"}, {"", 2}});
  if (mapping.device_type != cpu) fail(kOp, "block_mapping", "be on the CPU", mapping.device_name());
  check_no_overlap(kOp, destination, mapping);
  const bool one_side = same_memory(source, destination);
  if (!one_side) check_no_overlap(kOp, destination, source);
  check_mapping(kOp, mapping, source.size(0), destination.size(0), one_side);
  const auto run = entry(kOp, backend, backend.copy_rows);
  if (mapping.size(0) == 0 || source.numel == 0) return;
  const std::vector<RowCopy> copies = plan(source, destination, mapping);
  run(copies.data(), static_cast<int64_t>(copies.size()), place_of(device_side));
}

}  // namespace pagedkern::bindings
