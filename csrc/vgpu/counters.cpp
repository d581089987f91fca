#include "vgpu/counters.h"

#include <algorithm>
#include <bit>

namespace pagedkern::vgpu {
namespace {

// Words of one group of lanes that are served together: the busiest bank decides.
u32 group_wavefronts(const u32* offsets, u32 mask, u32 words_each) {
  u32 words[kLanes * 4];
  u32 count = 0;
  for (u32 m = mask; m; m &= m - 1) {
    u32 word = offsets[std::countr_zero(m)] / 4;
    for (u32 k = 0; k < words_each; ++k) words[count++] = word + k;
  }
  if (count == 0) return 0;
  bool ordered = true;
  for (u32 k = 1; k < count; ++k) ordered &= words[k - 1] <= words[k];
  if (!ordered) std::sort(words, words + count);
  count = u32(std::unique(words, words + count) - words);
  if (words[count - 1] - words[0] < 32) return 1;
  u8 per_bank[32] = {};
  u32 most = 0;
  for (u32 k = 0; k < count; ++k) most = std::max<u32>(most, ++per_bank[words[k] & 31]);
  return most;
}

}  // namespace

u32 shared_wavefronts(const u32* offsets, u32 mask, u32 bytes, u32* fewest) {
  u32 lanes = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
  u32 words_each = bytes <= 4 ? 1 : bytes / 4;
  u32 total = 0, best = 0;
  for (u32 first = 0; first < 32; first += lanes) {
    u32 group = lanes == 32 ? mask : mask & (((1u << lanes) - 1) << first);
    if (!group) continue;
    total += group_wavefronts(offsets, group, words_each);
    ++best;
  }
  *fewest = best;
  return total;
}

u32 distinct_sectors(const u64* addresses, u32 mask, u32 bytes, u64* sectors) {
  u64 local[kLanes * 2];
  u64* out = sectors ? sectors : local;
  u32 count = 0;
  bool ordered = true;
  for (u32 m = mask; m; m &= m - 1) {
    u64 address = addresses[std::countr_zero(m)];
    u64 first = address / 32, last = (address + bytes - 1) / 32;
    for (u64 s = first; s <= last && count < kLanes * 2; ++s) {
      if (count && out[count - 1] == s) continue;
      ordered &= count == 0 || out[count - 1] < s;
      out[count++] = s;
    }
  }
  if (ordered) return count;
  std::sort(out, out + count);
  return u32(std::unique(out, out + count) - out);
}

}  // namespace pagedkern::vgpu
