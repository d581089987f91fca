#include "vgpu/memory.h"

#include <algorithm>
#include <bit>

namespace pagedkern::vgpu {

void Bitmap::set(u64 begin, u64 count) {
  u64 end = std::min(begin + count, bits_);
  for (u64 k = begin; k < end;) {
    u64 shift = k & 63, take = std::min<u64>(64 - shift, end - k);
    u64 mask = (take == 64 ? ~0ull : (1ull << take) - 1) << shift;
    if ((words_[k >> 6].load(std::memory_order_relaxed) & mask) != mask)
      words_[k >> 6].fetch_or(mask, std::memory_order_relaxed);
    k += take;
  }
}

bool Bitmap::all(u64 begin, u64 count) const {
  u64 end = begin + count;
  for (u64 k = begin; k < end;) {
    u64 shift = k & 63, take = std::min<u64>(64 - shift, end - k);
    u64 mask = (take == 64 ? ~0ull : (1ull << take) - 1) << shift;
    if ((words_[k >> 6].load(std::memory_order_relaxed) & mask) != mask) return false;
    k += take;
  }
  return true;
}

u64 Bitmap::population() const {
  u64 total = 0;
  for (u64 k = 0; k < (bits_ + 63) / 64; ++k) total += u64(std::popcount(words_[k].load(std::memory_order_relaxed)));
  return total;
}

void GlobalMemory::add(u64 base, u64 bytes, const std::string& name, bool initialized, bool read_only) {
  if (bytes == 0) return;
  auto fresh = std::make_shared<Allocation>();
  fresh->base = base;
  fresh->bytes = bytes;
  fresh->name = name;
  fresh->read_only = read_only;
  if (!initialized) fresh->written = std::make_unique<Bitmap>(bytes);
  for (size_t k = 0; k < ranges_.size();) {
    Allocation& old = *ranges_[k];
    bool apart = old.base + old.bytes <= base || base + bytes <= old.base;
    if (apart) {
      ++k;
      continue;
    }
    if (!old.freed) {  // one range for both; what is unwritten in a part only counts while that part stands alone
      u64 end = std::max(fresh->base + fresh->bytes, old.base + old.bytes);
      bool same = old.base == fresh->base && old.bytes == fresh->bytes;
      fresh->base = std::min(fresh->base, old.base);
      fresh->bytes = end - fresh->base;
      fresh->read_only = fresh->read_only && old.read_only;
      if (!same) fresh->written.reset();
      if (!same && old.name != name) fresh->name = old.name + "+" + name;
    }
    ranges_.erase(ranges_.begin() + std::ptrdiff_t(k));
  }
  auto at = std::lower_bound(ranges_.begin(), ranges_.end(), fresh->base, [](auto& r, u64 b) { return r->base < b; });
  ranges_.insert(at, std::move(fresh));
}

void GlobalMemory::remove(u64 base) {
  if (Allocation* a = find(base); a && a->base == base) a->freed = true;
}

void GlobalMemory::forget(u64 base) {
  std::erase_if(ranges_, [&](auto& r) { return r->base == base; });
}

void GlobalMemory::mark_written(u64 base, u64 bytes) {
  Allocation* a = find(base);
  if (a && a->written) a->written->set(base - a->base, bytes);
}

Allocation* GlobalMemory::find(u64 address) const {
  auto it = std::upper_bound(ranges_.begin(), ranges_.end(), address, [](u64 b, auto& r) { return b < r->base; });
  if (it == ranges_.begin()) return nullptr;
  Allocation* a = std::prev(it)->get();
  return a->contains(address, 1) ? a : nullptr;
}

Allocation* GlobalMemory::nearest(u64 address) const {
  Allocation* best = nullptr;
  u64 best_distance = ~0ull;
  for (auto& r : ranges_) {
    u64 distance = address < r->base              ? r->base - address
                   : address < r->base + r->bytes ? 0
                                                  : address - (r->base + r->bytes) + 1;
    if (distance < best_distance) {
      best = r.get();
      best_distance = distance;
    }
  }
  return best;
}

void GlobalMemory::begin_launch(bool count_sectors, bool check_global_races) {
  for (auto& r : ranges_) {
    r->stamps = check_global_races ? std::make_unique<Stamps>(r->base, r->bytes) : nullptr;
    r->read_sectors.reset();
    r->write_sectors.reset();
    if (!count_sectors) continue;
    u64 sectors = (r->base + r->bytes - 1) / kSectorBytes - r->first_sector() + 1;
    r->read_sectors = std::make_unique<Bitmap>(sectors);
    r->write_sectors = std::make_unique<Bitmap>(sectors);
  }
}

u64 GlobalMemory::unique_bytes(bool write) const {
  u64 total = 0;
  for (auto& r : ranges_) {
    auto& map = write ? r->write_sectors : r->read_sectors;
    if (map) total += map->population() * kSectorBytes;
  }
  return total;
}

}  // namespace pagedkern::vgpu
