// Global memory: the registered host ranges a kernel may touch, which bytes were written, and which sectors a launch
// used.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "vgpu/export.h"
#include "vgpu/global_order.h"
#include "vgpu/types.h"

namespace pagedkern::vgpu {

constexpr u64 kSectorBytes = 32;

// One bit per unit; set from several threads at once.
class Bitmap {
 public:
  explicit Bitmap(u64 bits) : words_(new std::atomic<u64>[(bits + 63) / 64]()), bits_(bits) {}
  void set(u64 begin, u64 count);
  bool all(u64 begin, u64 count) const;
  u64 population() const;
  void set_one(u64 k) {
    u64 bit = 1ull << (k & 63);
    if (!(words_[k >> 6].load(std::memory_order_relaxed) & bit))
      words_[k >> 6].fetch_or(bit, std::memory_order_relaxed);
  }

 private:
  std::unique_ptr<std::atomic<u64>[]> words_;
  u64 bits_;
};

struct Allocation {
  u64 base = 0, bytes = 0;
  std::string name;
  bool read_only = false;
  bool freed = false;
  std::unique_ptr<Bitmap> written;                      // null: every byte counts as written
  std::unique_ptr<Bitmap> read_sectors, write_sectors;  // of the running launch
  std::unique_ptr<Stamps> stamps;                       // of the running launch; null: races are not checked
  bool contains(u64 address, u64 count) const {
    return address >= base && count <= bytes && address - base <= bytes - count;
  }
  u64 first_sector() const { return base / kSectorBytes; }
};

class PAGEDKERN_VGPU_API GlobalMemory {
 public:
  // A host range; overlapping ranges become one. `initialized` false: reads before writes are faults.
  void add(u64 base, u64 bytes, const std::string& name, bool initialized = true, bool read_only = false);
  void remove(u64 base);                   // later accesses are "use after free" until the range is added again
  void forget(u64 base);                   // the range is unknown again
  void mark_written(u64 base, u64 bytes);  // by the host
  Allocation* find(u64 address) const;     // the allocation that holds the address, else nullptr
  Allocation* nearest(u64 address) const;  // for messages
  void begin_launch(bool count_sectors, bool check_global_races);
  u64 unique_bytes(bool write) const;

 private:
  std::vector<std::shared_ptr<Allocation>> ranges_;  // by base
};

}  // namespace pagedkern::vgpu
