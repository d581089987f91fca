#include "vgpu/tma_map.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>

namespace pagedkern::vgpu {
namespace {

constexpr uint32_t kMagic = 0x704d5456;
constexpr uint32_t kAllSet = (1u << 28) - 1;

// The private form. `set` has a bit for each field (of each dimension) that has been written. The second 64-bit word is
// left empty: some libraries clear a bit of it, which works round a fault of a driver's own form.
struct Stored {
  uint32_t magic;
  uint32_t set;
  uint64_t unused;
  uint64_t address;
  uint64_t strides[4];
  uint32_t dims_less_one[5];
  uint16_t box[5];
  uint8_t element_strides[5];
  uint8_t type, rank, interleave, swizzle, l2_promotion, fill;
  uint32_t checksum;
};
static_assert(sizeof(Stored) <= kTensorMapBytes);

int bit_of(TmaField field, uint32_t ordinal) {
  switch (field) {
    case TmaField::kGlobalAddress: return 0;
    case TmaField::kRank: return 1;
    case TmaField::kElemType: return 2;
    case TmaField::kInterleave: return 3;
    case TmaField::kSwizzle: return 4;
    case TmaField::kFill: return 5;
    case TmaField::kBoxDim: return 6 + static_cast<int>(ordinal);
    case TmaField::kGlobalDim: return 11 + static_cast<int>(ordinal);
    case TmaField::kGlobalStride: return 16 + static_cast<int>(ordinal);
    default: return 20 + static_cast<int>(ordinal);
  }
}

uint32_t checksum_of(const Stored& s) {
  uint32_t hash = 2166136261u;
  const auto* bytes = reinterpret_cast<const uint8_t*>(&s);
  for (size_t i = 0; i < offsetof(Stored, checksum); ++i) hash = (hash ^ bytes[i]) * 16777619u;
  return hash;
}

void save(Stored& s, uint8_t* bytes) {
  s.checksum = checksum_of(s);
  std::memset(bytes, 0, kTensorMapBytes);
  std::memcpy(bytes, &s, sizeof s);
}

uint32_t fields_of_rank(uint32_t rank) {
  const uint32_t each = (1u << rank) - 1;
  return 0x3fu | each << 6 | each << 11 | (each >> 1) << 16 | each << 20;
}

}  // namespace

int tma_type_bytes(TmaType t) {
  switch (t) {
    case TmaType::kU8: return 1;
    case TmaType::kU16:
    case TmaType::kF16:
    case TmaType::kBF16: return 2;
    case TmaType::kU64:
    case TmaType::kS64:
    case TmaType::kF64: return 8;
    default: return 4;
  }
}

bool tma_type_is_float(TmaType t) {
  return t >= TmaType::kF16;
}

const char* tma_type_name(TmaType t) {
  static constexpr const char* kNames[] = {"u8",  "u16", "u32",  "s32",     "u64",  "s64",     "f16",
                                           "f32", "f64", "bf16", "f32.ftz", "tf32", "tf32.ftz"};
  return static_cast<size_t>(t) < std::size(kNames) ? kNames[static_cast<size_t>(t)] : "unknown";
}

SmemSwizzle TensorMap::smem_swizzle() const {
  static constexpr SmemSwizzle kModes[] = {SmemSwizzle::kNone, SmemSwizzle::k32B, SmemSwizzle::k64B,
                                           SmemSwizzle::k128B};
  return kModes[swizzle & 3];
}

uint32_t TensorMap::box_count(uint32_t d) const {
  return d == 0 ? box[0] : (box[d] + element_strides[d] - 1) / element_strides[d];
}

uint64_t TensorMap::box_bytes() const {
  uint64_t bytes = static_cast<uint64_t>(tma_type_bytes(type));
  for (uint32_t d = 0; d < rank; ++d) bytes *= box_count(d);
  return bytes;
}

std::string tensor_map_problem(const TensorMap& m) {
  if (m.type > TmaType::kTF32Ftz) return "tensorDataType is not one of sm_90";
  if (m.rank < 1 || m.rank > kMaxTensorRank) return "tensorRank must be 1 to 5";
  if (m.interleave > 2) return "interleave is unknown";
  if (m.swizzle > 3) return "swizzle is not one of sm_90";
  if (m.l2_promotion > 3) return "l2Promotion is unknown";
  if (m.nan_fill > 1) return "oobFill is unknown";
  if (m.interleave != 0 && m.rank < 3) return "tensorRank must be 3 or more with an interleave";
  if (m.nan_fill && !tma_type_is_float(m.type)) return "oobFill of NaN needs a floating point tensorDataType";
  const uint64_t alignment = m.interleave == 2 ? 32 : 16;
  if (m.address % alignment != 0) return "globalAddress must be aligned to " + std::to_string(alignment) + " bytes";
  const uint64_t element = static_cast<uint64_t>(tma_type_bytes(m.type));
  for (uint32_t d = 0; d < m.rank; ++d) {
    const std::string at = "[" + std::to_string(d) + "]";
    if (m.dims[d] == 0 || m.dims[d] > (1ull << 32)) return "globalDim" + at + " must be 1 to 2^32";
    if (m.box[d] == 0 || m.box[d] > 256) return "boxDim" + at + " must be 1 to 256";
    if (m.element_strides[d] == 0 || m.element_strides[d] > 8) return "elementStrides" + at + " must be 1 to 8";
    if (d == 0) continue;
    const uint64_t stride = m.strides[d - 1];
    const std::string name = "globalStrides[" + std::to_string(d - 1) + "]";
    if (stride % alignment != 0) return name + " must be a multiple of " + std::to_string(alignment) + " bytes";
    if (stride >= (1ull << 40)) return name + " must be less than 2^40";
  }
  const uint64_t inner = m.box[0] * element;
  if (m.interleave == 0) {
    if (inner % 16 != 0) return "boxDim[0] must span a multiple of 16 bytes";
    if (m.swizzle != 0 && inner > smem_swizzle_span(m.smem_swizzle())) {
      return "boxDim[0] spans more bytes than the swizzle";
    }
  } else if (m.interleave == 2 && m.swizzle != 1) {
    return "interleave of 32B needs the 32B swizzle";
  }
  return "";
}

std::string tensor_map_unsupported(const TensorMap& m) {
  if (m.interleave != 0) return "interleaved tensor map";
  if (m.type == TmaType::kTF32 || m.type == TmaType::kTF32Ftz) return "tensor map of tf32 (rounding of the copy)";
  const uint64_t inner = static_cast<uint64_t>(m.box[0]) * tma_type_bytes(m.type);
  if (m.swizzle != 0 && inner < smem_swizzle_span(m.smem_swizzle())) {
    return "tensor map whose box rows are narrower than its swizzle";
  }
  return "";
}

void tensor_map_encode(const TensorMap& m, uint8_t* bytes) {
  Stored s;
  std::memset(&s, 0, sizeof s);
  s.magic = kMagic;
  s.set = kAllSet & fields_of_rank(m.rank);
  s.address = m.address;
  for (uint32_t d = 0; d < m.rank; ++d) {
    s.dims_less_one[d] = static_cast<uint32_t>(m.dims[d] - 1);
    s.box[d] = static_cast<uint16_t>(m.box[d]);
    s.element_strides[d] = static_cast<uint8_t>(m.element_strides[d]);
    if (d > 0) s.strides[d - 1] = m.strides[d - 1];
  }
  s.type = static_cast<uint8_t>(m.type);
  s.rank = static_cast<uint8_t>(m.rank);
  s.interleave = static_cast<uint8_t>(m.interleave);
  s.swizzle = static_cast<uint8_t>(m.swizzle);
  s.l2_promotion = static_cast<uint8_t>(m.l2_promotion);
  s.fill = static_cast<uint8_t>(m.nan_fill);
  save(s, bytes);
}

bool tensor_map_decode(const uint8_t* bytes, TensorMap& m, std::string& why) {
  Stored s;
  std::memcpy(&s, bytes, sizeof s);
  if (s.magic != kMagic) {
    why = "these 128 bytes are not a tensor map";
    return false;
  }
  if (s.checksum != checksum_of(s)) {
    why = "the tensor map was overwritten in part";
    return false;
  }
  if (s.rank < 1 || s.rank > kMaxTensorRank || (s.set & fields_of_rank(s.rank)) != fields_of_rank(s.rank)) {
    why = "the tensor map lacks fields: tensormap.replace has not set them all";
    return false;
  }
  m = TensorMap{};
  m.type = static_cast<TmaType>(s.type);
  m.rank = s.rank;
  m.address = s.address;
  for (uint32_t d = 0; d < m.rank; ++d) {
    m.dims[d] = static_cast<uint64_t>(s.dims_less_one[d]) + 1;
    m.box[d] = s.box[d];
    m.element_strides[d] = s.element_strides[d];
    if (d > 0) m.strides[d - 1] = s.strides[d - 1];
  }
  m.interleave = s.interleave;
  m.swizzle = s.swizzle;
  m.l2_promotion = s.l2_promotion;
  m.nan_fill = s.fill;
  why = tensor_map_problem(m);
  return why.empty();
}

bool tensor_map_replace(uint8_t* bytes, TmaField field, uint32_t ordinal, uint64_t value, std::string& why) {
  Stored s;
  std::memcpy(&s, bytes, sizeof s);
  if (s.magic == 0 && std::all_of(bytes, bytes + kTensorMapBytes, [](uint8_t b) { return b == 0; })) {
    s.magic = kMagic;
  } else if (s.magic != kMagic || s.checksum != checksum_of(s)) {
    why = "these 128 bytes are neither zero nor a tensor map";
    return false;
  }
  const auto within = [&](uint64_t low, uint64_t high) {
    if (value < low || value > high) why = "value " + std::to_string(value) + " does not fit the field";
    return why.empty();
  };
  why.clear();
  const bool is_array = field == TmaField::kBoxDim || field == TmaField::kGlobalDim ||
                        field == TmaField::kGlobalStride || field == TmaField::kElementStride;
  if (is_array && ordinal >= (field == TmaField::kGlobalStride ? 4u : 5u)) {
    why = "dimension " + std::to_string(ordinal) + " does not exist";
    return false;
  }
  // tensormap.replace numbers f32.ftz, f64 and bf16 differently from the driver's enumeration.
  static constexpr TmaType kElemTypes[] = {
      TmaType::kU8,  TmaType::kU16,    TmaType::kU32, TmaType::kS32,  TmaType::kU64,  TmaType::kS64,    TmaType::kF16,
      TmaType::kF32, TmaType::kF32Ftz, TmaType::kF64, TmaType::kBF16, TmaType::kTF32, TmaType::kTF32Ftz};
  switch (field) {
    case TmaField::kGlobalAddress: s.address = value; break;
    case TmaField::kRank:
      if (!within(0, kMaxTensorRank - 1)) return false;
      s.rank = static_cast<uint8_t>(value + 1);
      break;
    case TmaField::kBoxDim:
      if (!within(1, 256)) return false;
      s.box[ordinal] = static_cast<uint16_t>(value);
      break;
    case TmaField::kGlobalDim:
      if (!within(1, 0xffffffffull)) return false;
      s.dims_less_one[ordinal] = static_cast<uint32_t>(value - 1);
      break;
    case TmaField::kGlobalStride:
      if (!within(0, (1ull << 40) - 1)) return false;
      s.strides[ordinal] = value;
      break;
    case TmaField::kElementStride:
      if (!within(1, 8)) return false;
      s.element_strides[ordinal] = static_cast<uint8_t>(value);
      break;
    case TmaField::kElemType:
      if (!within(0, std::size(kElemTypes) - 1)) return false;
      s.type = static_cast<uint8_t>(kElemTypes[value]);
      break;
    case TmaField::kInterleave:
      if (!within(0, 2)) return false;
      s.interleave = static_cast<uint8_t>(value);
      break;
    case TmaField::kSwizzle:
      if (!within(0, 3)) return false;
      s.swizzle = static_cast<uint8_t>(value);
      break;
    case TmaField::kFill:
      if (!within(0, 1)) return false;
      s.fill = static_cast<uint8_t>(value);
      break;
  }
  s.set |= 1u << bit_of(field, ordinal);
  save(s, bytes);
  return true;
}

}  // namespace pagedkern::vgpu
