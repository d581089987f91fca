#include "vgpu/async_mbarrier.h"

#include <cstdint>

namespace pagedkern::vgpu {
namespace {

// Word: bits 0-19 pending, 20-39 expected, 40-60 tx (two's complement), 61 phase, 62-63 the mark 10, which neither
// zeros nor all ones carry.
constexpr uint64_t kCountMask = (1ull << 20) - 1;
constexpr uint64_t kTxMask = (1ull << 21) - 1;
constexpr uint64_t kMark = 2;
constexpr int32_t kMaxTx = (1 << 20) - 1;

}  // namespace

const char* mbarrier_error_text(MbarrierError error) {
  switch (error) {
    case MbarrierError::kNone: return "";
    case MbarrierError::kNotInitialized:
      return "no mbarrier object lies there (never initialised, invalidated or overwritten)";
    case MbarrierError::kCountRange: return "the count is outside 1 to 2^20 - 1";
    case MbarrierError::kTooManyArrivals: return "more arrivals than the phase still expects";
    default: return "the transaction count leaves its range of 2^20 - 1";
  }
}

MbarrierError Mbarrier::init(uint32_t count, uint64_t& word) {
  if (count < 1 || count > kMaxCount) return MbarrierError::kCountRange;
  Mbarrier m;
  m.expected = m.pending = count;
  word = m.store();
  return MbarrierError::kNone;
}

MbarrierError Mbarrier::load(uint64_t word, Mbarrier& m) {
  if (word >> 62 != kMark) return MbarrierError::kNotInitialized;
  m.pending = static_cast<uint32_t>(word & kCountMask);
  m.expected = static_cast<uint32_t>((word >> 20) & kCountMask);
  const int32_t tx = static_cast<int32_t>((word >> 40) & kTxMask);
  m.tx = tx > kMaxTx ? tx - (1 << 21) : tx;
  m.phase = (word >> 61) & 1;
  return MbarrierError::kNone;
}

uint64_t Mbarrier::store() const {
  return static_cast<uint64_t>(pending) | static_cast<uint64_t>(expected) << 20 |
         (static_cast<uint64_t>(static_cast<uint32_t>(tx)) & kTxMask) << 40 | static_cast<uint64_t>(phase) << 61 |
         kMark << 62;
}

void Mbarrier::complete_if_due() {
  if (pending != 0 || tx != 0) return;
  phase = !phase;
  pending = expected;
}

MbarrierError Mbarrier::expect_tx(uint32_t bytes) {
  if (bytes > static_cast<uint32_t>(kMaxTx) || tx + static_cast<int32_t>(bytes) > kMaxTx) {
    return MbarrierError::kTxRange;
  }
  tx += static_cast<int32_t>(bytes);
  return MbarrierError::kNone;
}

MbarrierError Mbarrier::complete_tx(uint32_t bytes) {
  if (bytes > static_cast<uint32_t>(kMaxTx) || tx - static_cast<int32_t>(bytes) < -kMaxTx) {
    return MbarrierError::kTxRange;
  }
  tx -= static_cast<int32_t>(bytes);
  complete_if_due();
  return MbarrierError::kNone;
}

MbarrierError Mbarrier::arrive(uint32_t count) {
  if (count < 1 || count > kMaxCount) return MbarrierError::kCountRange;
  if (count > pending) return MbarrierError::kTooManyArrivals;
  pending -= count;
  complete_if_due();
  return MbarrierError::kNone;
}

MbarrierError Mbarrier::arrive_drop(uint32_t count) {
  if (count < 1 || count > kMaxCount) return MbarrierError::kCountRange;
  if (count > pending || count > expected) return MbarrierError::kTooManyArrivals;
  expected -= count;
  return arrive(count);
}

MbarrierError Mbarrier::expect_one_more() {
  if (pending >= kMaxCount) return MbarrierError::kCountRange;
  ++pending;
  return MbarrierError::kNone;
}

bool Mbarrier::state_parity(uint64_t state) {
  return (state >> 61) & 1;
}
uint32_t Mbarrier::state_pending(uint64_t state) {
  return static_cast<uint32_t>(state & kCountMask);
}

}  // namespace pagedkern::vgpu
