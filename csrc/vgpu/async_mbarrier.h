// The mbarrier object: a pure state machine on the 64-bit word that lies in shared memory.
#pragma once

#include <cstdint>

#include "vgpu/shadow.h"

namespace pagedkern::vgpu {

enum class MbarrierError : uint8_t {
  kNone,
  kNotInitialized,   // the word was never initialised, was invalidated, or was overwritten
  kCountRange,       // a count outside 1 .. 2^20 - 1
  kTooManyArrivals,  // more arrivals than the phase still expects
  kTxRange,          // the transaction count left -(2^20 - 1) .. 2^20 - 1
};

const char* mbarrier_error_text(MbarrierError error);

struct Mbarrier {
  static constexpr uint32_t kMaxCount = (1u << 20) - 1;

  uint32_t expected = 0;  // arrivals of the next phase
  uint32_t pending = 0;   // arrivals the current phase still waits for
  int32_t tx = 0;         // bytes (or other units) the current phase still waits for
  bool phase = false;     // parity of the current, incomplete phase

  static MbarrierError init(uint32_t count, uint64_t& word);
  static MbarrierError load(uint64_t word, Mbarrier& out);
  uint64_t store() const;

  MbarrierError expect_tx(uint32_t bytes);
  MbarrierError complete_tx(uint32_t bytes);
  MbarrierError arrive(uint32_t count);
  MbarrierError arrive_drop(uint32_t count);
  // cp.async.mbarrier.arrive without .noinc: one arrival more is expected of this phase.
  MbarrierError expect_one_more();

  // What mbarrier.arrive returns, taken before the arrival; the wait forms only need its parity.
  uint64_t state() const { return store(); }
  static bool state_parity(uint64_t state);
  static uint32_t state_pending(uint64_t state);
  // True once the phase of that parity has completed: the current phase is the other one.
  bool completed(bool parity) const { return parity != phase; }

 private:
  void complete_if_due();
};

// What the word cannot hold; the engine keeps one per object.
struct MbarrierRecord {
  bool live = false;      // initialised and not invalidated
  uint64_t word = 0;      // as last stored: anything else in memory is an overwrite
  uint64_t phase = 0;     // how many phases have completed
  uint64_t observed = 0;  // phases whose completion a wait has seen
  Knowledge gathering;    // of the arrivals so far
  Knowledge released;     // of the arrivals of completed phases
};

}  // namespace pagedkern::vgpu
