// Plain types and address-space constants of the virtual GPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagedkern::vgpu {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int kLanes = 32;
constexpr u32 kFullMask = 0xffffffffu;

enum class Space : u8 { kGeneric, kGlobal, kShared, kSharedCluster, kLocal, kParam, kConst };

// Generic addresses: the top four bits name the window, everything below 2^60 is a host address (global, const).
// Shared addresses are 32 bit: bits 24.. hold 0 for the own block or rank + 1 in the cluster (mapa), bits 0..23 the
// offset. The first kSharedBase bytes are never valid, so that a null shared pointer faults (and dynamic shared memory
// keeps the 1024-byte alignment that 128-byte swizzles need).
constexpr int kWindowShift = 60;
constexpr u64 kSharedWindow = 1ull << kWindowShift;
constexpr u64 kLocalWindow = 2ull << kWindowShift;
constexpr u64 kParamWindow = 3ull << kWindowShift;
constexpr u64 kWindowMask = (1ull << kWindowShift) - 1;
constexpr u32 kSharedBase = 1024;
constexpr u32 kSharedRankShift = 24;
constexpr u32 kSharedOffsetMask = (1u << kSharedRankShift) - 1;
constexpr u32 kLocalBase = 256;  // local addresses start here, so that null faults

struct Dim3 {
  u32 x = 1, y = 1, z = 1;
  u64 count() const { return u64(x) * y * z; }
};

}  // namespace pagedkern::vgpu
