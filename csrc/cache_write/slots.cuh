// Which tokens are written, and where: of tokens with one slot the last one alone, so that its row is whole.
#pragma once

#include "cache_write/config.h"
#include "cache_write/kernel_params.h"
#include "common/team.cuh"

namespace pagedkern {

// The tokens [first, first + count) of slot_mapping that a team writes.
struct TokenRange {
  int64_t first;
  int count;
};

static __device__ __forceinline__ int64_t load_slot(const CacheWriteParams& p, int64_t token) {
  const int64_t offset = token * p.slot_stride;
  return p.slot_is_int32 ? static_cast<const int32_t*>(p.slot_mapping)[offset]
                         : static_cast<const int64_t*>(p.slot_mapping)[offset];
}

// In shared memory. Every block of a team holds all of the team's tokens; the later part of slot_mapping, where one of
// their slots may come again, is shared out among the blocks.
class SlotTable {
 public:
  // Of token `first + t`, after build().
  __device__ __forceinline__ bool live(int t) const { return block_[t] >= 0; }
  __device__ __forceinline__ int64_t block(int t) const { return block_[t]; }
  __device__ __forceinline__ int64_t offset(int t) const { return offset_[t]; }

  __device__ __forceinline__ void build(const CacheWriteKernelParams& p, const TokenRange& range, const Team& team) {
    const int64_t num_cache_slots = p.cache.num_blocks * p.cache.block_size;
    const uint32_t groups = static_cast<uint32_t>(p.table_size) / kColumns;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    for (int i = thread; i < p.table_size; i += threads) entry_[i] = kFree;
    for (int i = thread; i < range.count; i += threads) overruled_[i] = 0;
    // The team reads each of its slots once; slots stand in block_ until the end.
    for (int t = team.thread(); t < range.count; t += team.num_threads()) {
      const int64_t slot = load_slot(p, range.first + t);
      block_[t] = slot < num_cache_slots ? slot : -1;
    }
    team.sync();  // now a block may read the slots of another, and mark its tokens
    for (int t = thread; t < range.count; t += threads) {
      const int reader = t / threads % team.num_blocks;
      const int64_t slot = *team.of_block(&block_[t], reader);
      if (reader != team.block) block_[t] = slot;
      if (slot >= 0) insert(slot, t, groups);
    }
    __syncthreads();
    const int64_t end = range.first + range.count;
    for (int64_t j = end / kSectorSlots * kSectorSlots + team.thread(); j < p.num_slots; j += team.num_threads()) {
      const int64_t slot = j < end ? -1 : load_slot(p, j);
      const int t = slot < 0 ? -1 : find(slot, groups);
      if (t >= 0) overrule(t, team);
    }
    team.sync();
    for (int t = thread; t < range.count; t += threads) {
      const int64_t slot = block_[t];
      if (slot < 0) continue;
      const bool written = find(slot, groups) == t && overruled_[t] == 0;
      const int64_t block = slot / p.cache.block_size;
      block_[t] = written ? block : -1;
      offset_[t] = slot - block * p.cache.block_size;
    }
    __syncthreads();
  }

 private:
  static constexpr int kTokens = CacheWriteConfig::kMaxTeamTokens;
  static constexpr int kSize = CacheWriteConfig::kTableSize;
  static constexpr int kColumns = 16;      // entries of a group, which lie in all banks
  static constexpr int kSectorSlots = 16;  // lanes that look through slots begin on whole sectors
  static constexpr int kTokenBits = 10;
  static constexpr uint64_t kFree = ~uint64_t{0};
  static_assert(kTokens <= 1 << kTokenBits && kSize % kColumns == 0);

  // The places where a slot may be, one after the other: which column is a matter of the slot's last digit alone, so
  // that 16 lanes with neighbouring slots never meet in a bank, and which group one of all others. After a round of all
  // groups the column moves once more, so that no place is left out.
  struct Probe {
    uint32_t group, step, column, round = 0;

    __device__ __forceinline__ explicit Probe(int64_t slot) : column(static_cast<uint32_t>(slot)) {
      const uint64_t run = static_cast<uint64_t>(slot) / kColumns;
      const uint32_t folded = static_cast<uint32_t>(run) ^ static_cast<uint32_t>(run >> 32) * 0x85EBCA6Bu;
      const uint32_t mixed = folded * 0x9E3779B1u;
      group = mixed >> 16;
      step = mixed >> 8 | 1;  // odd: meets every group, of which there are a power of two
    }
    __device__ __forceinline__ uint32_t place(uint32_t groups) const {
      return (group & (groups - 1)) * kColumns + column % kColumns;
    }
    __device__ __forceinline__ void next(uint32_t groups) {
      group += step;
      column += (++round & (groups - 1)) == 0 ? 2 : 1;
    }
  };

  // An entry is a slot and the last of the team's tokens with it. Memory has fewer slots than 2^(63 - kTokenBits).
  __device__ __forceinline__ void insert(int64_t slot, int t, uint32_t groups) {
    const auto mine = static_cast<unsigned long long>(slot << kTokenBits | t);
    for (Probe probe(slot);; probe.next(groups)) {
      auto* entry = reinterpret_cast<unsigned long long*>(&entry_[probe.place(groups)]);
      const unsigned long long old = atomicCAS(entry, static_cast<unsigned long long>(kFree), mine);
      if (old == kFree) return;
      if (old >> kTokenBits != static_cast<unsigned long long>(slot)) continue;
      atomicMax(entry, mine);
      return;
    }
  }

  // The last of the team's tokens with the slot, or -1.
  __device__ __forceinline__ int find(int64_t slot, uint32_t groups) const {
    for (Probe probe(slot);; probe.next(groups)) {
      const uint64_t entry = entry_[probe.place(groups)];
      if (entry >> kTokenBits == static_cast<uint64_t>(slot)) return static_cast<int>(entry & ((1 << kTokenBits) - 1));
      if (entry == kFree) return -1;
    }
  }

  // A token of another team has the slot of t and comes later.
  __device__ __forceinline__ void overrule(int t, const Team& team) {
    for (int block = 0; block < team.num_blocks; ++block) atomicExch(team.of_block(&overruled_[t], block), 1);
  }

  uint64_t entry_[kSize];
  int64_t block_[kTokens];  // -1: not written
  int64_t offset_[kTokens];
  int overruled_[kTokens];  // by a token behind the team's
};

}  // namespace pagedkern
