// Launch numbers of the cache-write kernels.
#pragma once

namespace pagedkern {

struct CacheWriteConfig {
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kMaxBlocks = 132 * 4;  // four blocks of an SM hide its latency; beyond it blocks get more tokens
  static constexpr int kTeamBlocks = 8;       // blocks of a cluster that look through the slots together
  static constexpr int kManyTokens = 1024;    // from here on blocks work in teams
  static constexpr int kMaxTeamTokens = 512;  // tokens of a team at a time
  static constexpr int kTableSize = 2048;     // hash table of their slots, a quarter full at most
  static_assert(kThreads % 32 == 0 && kThreads <= 1024);
  static_assert(kMaxBlocks % kTeamBlocks == 0);
  static_assert((kTableSize & (kTableSize - 1)) == 0 && kTableSize >= 4 * kMaxTeamTokens);
};

}  // namespace pagedkern
