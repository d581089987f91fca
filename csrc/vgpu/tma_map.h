// Tensor maps: the checks cuTensorMapEncodeTiled makes, a private 128-byte form, and tensormap.replace on it.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "vgpu/tensor_wgmma.h"

namespace pagedkern::vgpu {

constexpr int kTensorMapBytes = 128;
constexpr int kMaxTensorRank = 5;

// Numbered as CUtensorMapDataType.
enum class TmaType : uint8_t { kU8, kU16, kU32, kS32, kU64, kS64, kF16, kF32, kF64, kBF16, kF32Ftz, kTF32, kTF32Ftz };

int tma_type_bytes(TmaType t);
bool tma_type_is_float(TmaType t);
const char* tma_type_name(TmaType t);

struct TensorMap {
  TmaType type = TmaType::kU8;
  uint32_t rank = 1;
  uint64_t address = 0;
  std::array<uint64_t, kMaxTensorRank> dims{};         // elements, innermost first
  std::array<uint64_t, kMaxTensorRank - 1> strides{};  // bytes, of dimension 1 and up
  std::array<uint32_t, kMaxTensorRank> box{};          // elements
  std::array<uint32_t, kMaxTensorRank> element_strides{};
  uint32_t interleave = 0;  // CUtensorMapInterleave: 0 none, 1 16B, 2 32B
  uint32_t swizzle = 0;     // CUtensorMapSwizzle: 0 none, 1 32B, 2 64B, 3 128B
  uint32_t l2_promotion = 0;
  uint32_t nan_fill = 0;  // CUtensorMapFloatOOBfill

  SmemSwizzle smem_swizzle() const;
  // Elements the box takes along dimension d: element strides thin it out, except along the innermost.
  uint32_t box_count(uint32_t d) const;
  uint64_t box_bytes() const;
};

// Empty where hardware and driver would accept the map, else what is wrong, by the name of the argument.
std::string tensor_map_problem(const TensorMap& map);

// Empty where the virtual GPU executes the map; else the name of the feature it refuses.
std::string tensor_map_unsupported(const TensorMap& map);

void tensor_map_encode(const TensorMap& map, uint8_t* bytes);
// False with a reason where the 128 bytes are no tensor map, were damaged, or lack a field.
bool tensor_map_decode(const uint8_t* bytes, TensorMap& map, std::string& why);

enum class TmaField : uint8_t {
  kGlobalAddress,
  kRank,
  kBoxDim,
  kGlobalDim,
  kGlobalStride,
  kElementStride,
  kElemType,
  kInterleave,
  kSwizzle,
  kFill,
};

// tensormap.replace.tile: `ordinal` is used by the array fields. The bytes may be all zero (a map built field by
// field) or a tensor map. False with a reason for values the field cannot hold.
bool tensor_map_replace(uint8_t* bytes, TmaField field, uint32_t ordinal, uint64_t value, std::string& why);

}  // namespace pagedkern::vgpu
