// The asynchronous engine: cp.async, bulk and tensor copies, reductions, st.async, wgmma.
//
// CONTRACT. A family's handler builds one AsyncOperation per issued operation (for cp.async: per warp, with the lanes
// that take part; otherwise one lane bit stands for the issuer) and hands it to AsyncEngine::issue together with how
// its completion can be observed (a group of the issuing thread, or an mbarrier through `perform`, which must do the
// complete_tx itself). The engine decides WHEN perform() runs:
//   early   inside issue();
//   late    at the last moment at which a right program could not tell: in the wait that covers it, or, for operations
//   that
//           signal an mbarrier, when no warp of the cluster can move otherwise (all blocked or polling), or at the
//           cluster's end;
//   random  any time between, by the cluster's seeded generator.
// perform() reads its source when it runs, not before: a source overwritten too early shows as wrong data or as a
// fault. From issue until observed completion the engine guards `writes` (any access by a thread is a fault) and
// `reads` (a write by a thread is a fault, until capture() or perform() ran), in every mode. issue() fills guarded
// shared destinations with kPoison bytes, so that they are wrong even with the checks off. The engine never touches
// global memory itself. "Observed": for groups the wait by the thread; for mbarriers the phase's completion: the
// mbarrier family calls observed(token). An operation whose perform() faults must throw through AsyncOperation::fault,
// which points at the issuing instruction.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "vgpu/async_mbarrier.h"
#include "vgpu/launch.h"
#include "vgpu/shadow.h"
#include "vgpu/types.h"

namespace pagedkern::vgpu {

class Warp;
class Block;
class Cluster;

constexpr u8 kPoison = 0xFF;  // NaN in every float format

struct SharedRange {
  Block* block = nullptr;
  u32 offset = 0, bytes = 0;  // offset from the start of the block's shared memory (kSharedBase already taken off)
  u32 lane = 0;               // the lane of the operation it belongs to
};

class AsyncOperation {
 public:
  explicit AsyncOperation(Warp& warp, u32 lanes);
  virtual ~AsyncOperation() = default;
  virtual const char* name() const = 0;  // "cp.async", for messages
  virtual void capture(Cluster&, u32 /*lanes*/) {
  }  // read the source into a buffer of the operation's own (wait_group.read)
  virtual void perform(Cluster& cluster, u32 lanes) = 0;  // subset of lanes not performed yet
  // False while warps that share the operation have not issued it; performing one warp's part performs all (wgmma).
  virtual bool ready() const { return true; }
  [[noreturn]] void fault(const std::string& kind, const std::string& detail) const;

  Warp& warp;           // issuer
  u32 lanes;            // lanes that have not performed yet
  u32 unobserved;       // lanes whose completion no wait has covered yet
  u32 pc;               // of the issuing instruction
  Knowledge knowledge;  // of the issuer at issue; empty when races are not checked
  std::vector<SharedRange> writes, reads;
  bool captured = false;
  u64 token = 0;      // mbarrier operations: identifies the mbarrier phase for observed()
  u64 sequence = 0;   // kWgmma: its number among the warp's
  u64 issued_at = 0;  // engine tick
};

enum class AsyncGroup : u8 { kCpAsync, kBulk, kWgmma, kNone /* completion through an mbarrier */ };

class AsyncEngine {
 public:
  AsyncEngine(Cluster& cluster) : cluster_(cluster) {}
  void reset(AsyncCompletion policy, bool checks, u64 seed);

  void issue(std::unique_ptr<AsyncOperation> op, AsyncGroup group);
  void commit(AsyncGroup group, Warp& warp, u32 mask);  // closes the threads' open groups
  void wait(AsyncGroup group, Warp& warp, u32 mask, u32 allowed,
            bool read_only);  // all but the `allowed` youngest groups
  bool ready_to_wait(AsyncGroup group, const Warp& warp, u32 mask, u32 allowed) const;  // wait() may be called
  void wait_all(AsyncGroup group, Warp& warp, u32 mask);  // cp.async.wait_all: open ones too
  // cp.async.mbarrier.arrive: runs `action` when all earlier cp.async of these lanes have performed (now or later).
  void after_prior(AsyncGroup group, Warp& warp, u32 mask, std::function<void(u32 lanes)> action, u64 token);
  void observed(u64 token);  // an mbarrier phase completed

  // f(operation) for the operations of one warp that no wait has covered yet, oldest first.
  template <class F>
  void each(AsyncGroup group, const Warp& warp, F&& f) const {
    for (auto& [id, live] : live_) {
      if (live.group == group && &live.op->warp == &warp && live.op->unobserved) f(*live.op);
    }
  }
  MbarrierRecord& mbarrier(const Block& block, u32 offset);  // created where there is none
  u32 next_proxy_clock() { return ++proxy_clock_; }

  bool idle() const { return live_.empty(); }
  // Nothing else can move: perform one pending operation. False when there is none.
  bool advance();
  void tick();    // once per scheduler round: random completion, and a bound on lateness
  void finish();  // end of the cluster: everything left performs
  void block_exit(Block& block);

  // Faults when a thread touches bytes that an unobserved operation owns.
  void check_shared(Warp& warp, u32 lane, Block& block, u32 offset, u32 bytes, bool write) const;

 private:
  struct Live {
    std::unique_ptr<AsyncOperation> op;
    AsyncGroup group;
    std::array<u32, kLanes> sequence;  // group number of each lane; kOpen before its commit
  };
  struct Deferred {
    AsyncGroup group;
    Warp* warp;
    u32 lanes;
    u64 before;  // operations with a smaller id must be done
    std::function<void(u32)> action;
    u64 token;
  };
  static constexpr u32 kOpen = 0xffffffffu;
  static constexpr u64 kLatest = 20000;  // ticks

  static u32 due_lanes(const Live& live, const Warp& warp, u32 mask, u32 allowed);
  void perform(Live& live, u32 lanes);
  void perform_wgmmas(const AsyncOperation& last);
  void retire();
  static void guard(const std::vector<SharedRange>& ranges, bool write, int change);
  u64 random();

  Cluster& cluster_;
  AsyncCompletion policy_ = AsyncCompletion::kLate;
  bool guarded_ = true;
  u64 rng_ = 1;
  u64 ticks_ = 0;
  u64 next_id_ = 0;
  u32 proxy_clock_ = 0;
  std::unordered_map<u64, MbarrierRecord> mbarriers_;  // by block rank and offset
  std::vector<std::pair<u64, Live>> live_;             // by id, oldest first
  std::vector<Deferred> deferred_;
};

}  // namespace pagedkern::vgpu
