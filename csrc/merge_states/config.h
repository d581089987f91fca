// Launch numbers of merge_attention_states.
#pragma once

namespace pagedkern {

struct MergeStatesConfig {
  static constexpr int kThreads = 256;
  static constexpr int kMaxBlocks = 132 * 8;
};

}  // namespace pagedkern
