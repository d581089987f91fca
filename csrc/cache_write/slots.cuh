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
    const int mask = p.table_size - 1;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    for (int i = thread; i < p.table_size; i += threads) {
      key_[i] = -1;
      last_[i] = -1;
      if (i < range.count) overruled_[i] = 0;
    }
    team.sync();  // no block may mark a token of another that has not begun
    // Lanes begin on multiples of kRun, where pages of slots usually begin.
    for (int t = thread - static_cast<int>(range.first % kRun); t < range.count; t += threads) {
      if (t < 0) continue;
      const int64_t slot = load_slot(p, range.first + t);
      const bool inside = slot >= 0 && slot < num_cache_slots;
      block_[t] = inside ? slot : -1;  // the slot, until the end
      if (inside) insert(slot, t, mask);
    }
    __syncthreads();
    const int64_t end = range.first + range.count;
    for (int64_t j = end / kRun * kRun + team.thread(); j < p.num_slots; j += team.num_threads()) {
      const int64_t slot = j < end ? -1 : load_slot(p, j);
      const int place = slot < 0 ? -1 : find(slot, mask);
      if (place >= 0) overrule(last_[place], team);
    }
    team.sync();
    for (int t = thread; t < range.count; t += threads) {
      const int64_t slot = block_[t];
      if (slot < 0) continue;
      const bool written = last_[find(slot, mask)] == t && overruled_[t] == 0;
      block_[t] = written ? slot / p.cache.block_size : -1;
      offset_[t] = slot % p.cache.block_size;
    }
    __syncthreads();
  }

 private:
  static constexpr int kTokens = CacheWriteConfig::kMaxTeamTokens;
  static constexpr int kSize = CacheWriteConfig::kTableSize;
  static constexpr int kRun = 16;

  // Neighbouring slots stay neighbours, so that lanes with neighbouring tokens meet no bank conflict; runs of kRun mix.
  static __device__ __forceinline__ int hash(int64_t slot, int mask) {
    const int64_t run = slot / kRun;
    const uint32_t folded = static_cast<uint32_t>(run) ^ static_cast<uint32_t>(run >> 32) * 0x85EBCA6Bu;
    return static_cast<int>((folded * 0x9E3779B1u >> 16) + static_cast<uint32_t>(slot % kRun)) & mask;
  }

  __device__ __forceinline__ void insert(int64_t slot, int t, int mask) {
    for (int place = hash(slot, mask);; place = (place + 1) & mask) {
      const auto old = static_cast<int64_t>(
          atomicCAS(reinterpret_cast<unsigned long long*>(&key_[place]), ~0ull, static_cast<unsigned long long>(slot)));
      if (old != -1 && old != slot) continue;
      atomicMax(&last_[place], t);
      return;
    }
  }

  // Its place in the table, or -1.
  __device__ __forceinline__ int find(int64_t slot, int mask) const {
    int place = hash(slot, mask);
    while (key_[place] != slot) {
      if (key_[place] == -1) return -1;
      place = (place + 1) & mask;
    }
    return place;
  }

  // A token of another team has the slot of t and comes later.
  __device__ __forceinline__ void overrule(int t, const Team& team) {
    for (int block = 0; block < team.num_blocks; ++block) atomicExch(team.of_block(&overruled_[t], block), 1);
  }

  int64_t key_[kSize];      // slot, -1: free
  int last_[kSize];         // the last of the team's tokens with it
  int64_t block_[kTokens];  // -1: not written
  int64_t offset_[kTokens];
  int overruled_[kTokens];  // by a token behind the team's
};

}  // namespace pagedkern
