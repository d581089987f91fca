// Who wrote each word of global memory in the running launch, and which writes a warp may read.
//
// A write is ordered before an access of the same cluster as in shared memory (shadow.h). Between clusters it takes a
// release pattern on one side and an acquire pattern on the other (PTX ISA, memory consistency model): the writer's
// side knows of the write, executes a fence at GPU scope and then a strong write or atomic; the reader's side reads
// that location with a strong read or atomic, and then executes such a fence. Release and acquire modifiers count as
// the fence. Barriers carry what a warp has acquired to the others of its cluster.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "vgpu/shadow.h"

namespace pagedkern::vgpu {

// The last plain write to a word in this launch: cluster + 1, the bytes written (a mask of 4), the warp's epoch; 0:
// none.
using Stamp = u64;
constexpr u32 kMaxStampCluster = (1u << 29) - 2;
inline Stamp make_stamp(u32 cluster, u32 byte_mask, Epoch epoch) {
  return u64(cluster + 1) << 35 | u64(byte_mask) << 31 | epoch;
}
inline u32 stamp_cluster(Stamp s) {
  return u32(s >> 35) - 1;
}
inline u32 stamp_bytes(Stamp s) {
  return u32(s >> 31) & 15;
}
inline Epoch stamp_epoch(Stamp s) {
  return u32(s) & 0x7fffffffu;
}

// The stamps of one allocation, made when a launch first writes to it.
class Stamps {
 public:
  explicit Stamps(u64 base, u64 bytes) : first_(base / 4), words_((base + bytes - 1) / 4 - first_ + 1) {}
  ~Stamps() { clear(); }
  bool any() const { return cells_.load(std::memory_order_acquire) != nullptr; }
  // Of the word that holds the address; any() must hold.
  std::atomic<Stamp>& at(u64 address) { return cells_.load(std::memory_order_relaxed)[address / 4 - first_]; }
  void make();
  void clear();

 private:
  u64 first_, words_;
  std::atomic<std::atomic<Stamp>*> cells_{nullptr};
};

// What the launch knows of strong accesses: at each location, what has been released there.
class GlobalOrder {
 public:
  void publish(u64 address, const ForeignClocks& clocks);
  void collect(u64 address, ForeignClocks& into);

 private:
  std::atomic<bool> empty_{true};
  std::mutex mutex_;
  std::unordered_map<u64, ForeignClocks> released_;
};

}  // namespace pagedkern::vgpu
