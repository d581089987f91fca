// Launch numbers of the cache-write kernels.
#pragma once

namespace pagedkern {

struct CacheWriteConfig {
  static constexpr int kThreads = 256;
  static constexpr int kMaxBlocks = 132 * 4;  // 1024 threads hide an SM's latency; beyond it blocks get more tokens
  // From kManyTokens on blocks are larger and work in teams, which look through the slots together.
  static constexpr int kManyTokens = 1024;
  static constexpr int kTeamThreads = 512;
  static constexpr int kMaxTeamBlocks = 132 * 2;
  static constexpr int kTeamBlocks = 8;        // of a cluster
  static constexpr int kMaxTeamTokens = 1024;  // tokens of a team at a time
  static constexpr int kTableSize = 2048;      // hash table of their slots, half full at most
  static_assert(kThreads % 32 == 0 && kTeamThreads % 32 == 0 && kTeamThreads <= 1024 && kThreads <= kTeamThreads);
  static_assert(kMaxTeamBlocks % kTeamBlocks == 0);
  static_assert((kTableSize & (kTableSize - 1)) == 0 && kTableSize >= 2 * kMaxTeamTokens);
};

}  // namespace pagedkern
