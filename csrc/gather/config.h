// Launch numbers of gather_cache.
#pragma once

namespace pagedkern {

struct GatherConfig {
  static constexpr int kThreads = 256;
  static constexpr int kMaxBlocks = 132 * 8;
  static constexpr int kMaxTokens = 256;  // of a block at a time: a thread finds the place of one
  static_assert(kMaxTokens <= kThreads);
};

}  // namespace pagedkern
