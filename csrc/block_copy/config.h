// Launch numbers of copy_blocks.
#pragma once

namespace pagedkern {

struct BlockCopyConfig {
  static constexpr int kThreads = 256;
  static constexpr int kMaxBlocks = 132 * 8;
  static constexpr int kBlocksPerSm = 5;    // at once, at least: 1280 threads with 64 bytes each under way
  static constexpr int kUnroll = 4;         // independent loads of a thread
  static constexpr int64_t kMaxRounds = 4;  // of kThreads * kUnroll accesses for one look at the mapping
  static constexpr int kInlinePairs = 128;  // pairs of a host mapping that travel in the kernel's parameters
  // Layers of one launch: their pointers travel in the parameters too, of which a launch may have 32,764 bytes.
  static constexpr int kFewLayers = 64;
  static constexpr int kMaxLayers = 384;
};

}  // namespace pagedkern
