// Launch numbers of the cache-write kernels.
#pragma once

namespace pagedkern {

struct CacheWriteConfig {
  static constexpr int kThreads = 256;
  static constexpr int kMaxBlocks = 132 * 4;  // four blocks of an SM hide its latency; beyond it blocks own more slots
  static constexpr int kFp8Elements = 8;      // elements a thread converts at once: 16 bytes in, 8 bytes out
  static_assert(kThreads % 32 == 0 && kThreads <= 1024);
};

}  // namespace pagedkern
