// One warp: registers, divergence, and what instruction handlers may ask for.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "vgpu/counters.h"
#include "vgpu/launch.h"
#include "vgpu/memory.h"
#include "vgpu/program.h"
#include "vgpu/shadow.h"

namespace pagedkern::vgpu {

class Block;
class Cluster;

// What all blocks of a launch share.
struct LaunchContext {
  const Kernel* kernel = nullptr;
  LaunchConfig config;
  LaunchOptions options;
  GlobalMemory* memory = nullptr;
  GlobalOrder* order = nullptr;
  const u8* params = nullptr;
  u32 shared_bytes = 0;  // per block, without the invalid first kSharedBase bytes
};

// What one worker thread owns.
struct WorkerContext {
  Counters counters;
  std::vector<u64> executed;  // by pc
  u64 budget = 0;             // warp instructions left, when limited
};

// Writes of the value that already lies there are no race, whoever wrote it: a store hands this to resolve(), which
// leaves its conflicts with other writes here, and compares before it stores.
struct SameValue {
  u32 lanes = 0;
  std::string conflict;
};

enum class WarpState : u8 { kReady, kBlocked, kPolling, kDone };
// Strong accesses (volatile, relaxed, acquire, release, atomics) do not race.
enum class Access : u8 { kRead, kWrite, kAtomic, kStrongRead, kStrongWrite };
constexpr bool reads(Access a) {
  return a == Access::kRead || a == Access::kAtomic || a == Access::kStrongRead;
}
constexpr bool writes(Access a) {
  return a == Access::kWrite || a == Access::kAtomic || a == Access::kStrongWrite;
}
// What a strong access or a fence orders beyond itself; kNarrow: only within its block or cluster.
constexpr u32 kAcquire = 1u << 16, kRelease = 1u << 17, kNarrow = 1u << 18;
constexpr u32 kNonCoherent = 1u << 19;  // ld.global.nc: of memory that nothing writes during the launch
constexpr bool strong(Access a) {
  return a != Access::kRead && a != Access::kWrite;
}

class Warp {
 public:
  // Hot state first.
  u8* regs = nullptr;
  const u8* consts = nullptr;
  const Inst* code = nullptr;
  u32 pc = 0;      // of the running lanes; already past the instruction while a handler runs
  u32 limit = 0;   // the run loop leaves its fast path when pc >= limit
  u32 active = 0;  // running lanes
  u32 live = 0;    // lanes that have not exited
  u32 born = 0;    // lanes the warp began with
  WarpState state = WarpState::kReady;

  Block* block = nullptr;
  const LaunchContext* launch = nullptr;
  WorkerContext* worker = nullptr;
  u32 index = 0;            // in the block
  u32 actor = 0;            // in the cluster: its entry in vector clocks
  std::string waiting_for;  // for deadlock reports, set with state
  Knowledge knowledge;
  u64 wgmma_issued = 0;             // wgmmas so far: the k-th of a warpgroup's four warps are one operation
  SameValue* same_value = nullptr;  // of the running store
  std::array<std::array<u32, kLanes>, 3> async_groups{};  // committed groups by AsyncGroup and lane (AsyncEngine)

  template <class T>
  T* lanes(OperandRef ref) const {
    const u8* base = ref >= 0 ? regs : consts;
    return reinterpret_cast<T*>(const_cast<u8*>(base) + (ref >= 0 ? ref : ~ref));
  }
  u32& pred(OperandRef ref) const { return *lanes<u32>(ref); }

  void start(Block& owner, u32 warp_index, u32 thread_count);
  // Runs up to `quantum` instructions; returns how many were executed. Stops early when blocked, polling or done.
  u64 run(u64 quantum);

  // ---- for handlers: control ----
  void branch(u32 target, u32 mask);           // lanes of mask go to target, the other active lanes fall through
  void scatter(const u32* targets, u32 mask);  // one target per lane (ret, brx)
  void exit(u32 mask);
  // A .sync instruction needs the lanes of `required` that are still alive to execute it together. True: go on. False:
  // the instruction will be executed again when more lanes have arrived; return at once. `rendezvous` (bar.warp.sync):
  // groups of lanes waiting at different instructions release each other.
  bool converge(u32 mask, u32 required, bool rendezvous = false);
  void block_on(const std::string& what);  // stops this warp until wake(); the instruction counts as done
  void wake();
  void retry(const std::string& what);  // the instruction cannot go on yet: let others run, execute it again
  void poll(const std::string& what);   // the instruction failed to make progress: let others run
  bool polling_again() const { return state == WarpState::kPolling; }

  // ---- for handlers: memory (access.cpp) ----
  // Host pointers for `bytes` bytes at each lane's address, after every check (bounds, alignment to `align`, unwritten
  // bytes, races, unfinished asynchronous operations) and with the counters moved on. Lanes outside mask get no
  // pointer.
  void resolve(Space space, const u64* addresses, u32 mask, u32 bytes, u32 align, Access access, u8** pointers);
  // A shared address (32-bit form, own block or mapa's) to block and offset; faults when it is out of bounds.
  Block& shared_target(u32 lane, u64 address, u32 bytes, u32* offset);

  // ---- for handlers: synchronisation knowledge ----
  void release(Knowledge& into);  // what this warp did so far is known to whoever acquires `into`; its clock moves on
  void acquire(const Knowledge& from) {
    if (tracks_races()) knowledge.join(from);
  }
  bool tracks_races() const { return !knowledge.seen.at.empty(); }
  // A fence at GPU scope, and strong accesses: what they hand on between clusters (global_order.h). `ordering`:
  // kAcquire, kRelease, kNarrow.
  void fence_gpu(u32 ordering);
  void before_strong_write(const u64* addresses, u32 mask, u32 ordering);
  void check_non_coherent(const u64* addresses, u32 mask, u32 bytes) const;
  void after_strong_read(const u64* addresses, u32 mask, u32 ordering);

  // ---- faults ----
  [[noreturn]] void fault(const std::string& kind, const std::string& detail,
                          u32 mask) const;  // at the running instruction
  [[noreturn]] void fault_at(u32 at_pc, const std::string& kind, const std::string& detail, u32 lane) const;
  Dim3 thread_of(u32 lane) const;
  u32 special_value(SpecialRegister which, u32 lane) const;
  std::string describe() const;  // "warp 3 (threads 96..127), PTX line 40: bar.sync 0;"
  const Kernel& kernel() const { return *launch->kernel; }

 private:
  struct Group {
    u32 pc = 0, mask = 0;
    bool waiting = false;  // in converge()
    u32 rendezvous = 0;    // waiting at bar.warp.sync: the lanes it wants
    u64 stamp = 0;         // when it last ran
  };
  void check_registers(const Inst& inst, u32 mask) const;
  void track_registers(const Inst& inst, u32 mask);
  void reschedule();  // chooses the lanes that run next
  void merge_here();
  bool release_rendezvous();
  void set_limit();
  void resolve_global(const u64* addresses, u32 mask, u32 bytes, u32 align, Access access, u8** pointers);
  bool resolve_global_stretch(u64 address, u32 total, u32 bytes, u32 align, Access access);
  void count_global(Access access, u32 lanes, u32 bytes, u32 sectors) const;
  bool ordered_after(Stamp stamp) const;
  bool global_order_of_stretch(Allocation& a, u64 address, u32 bytes, Access access) const;
  void check_global_order(Allocation& a, u64 address, u32 bytes, u32 lane, Access access);
  bool resolve_shared_stretch(u64 address, u32 total, u32 bytes, u32 align, Access access);
  void check_shared_lane(Block& target, u32 lane, u32 offset, u32 bytes, Access access);
  void resolve_shared(const u64* addresses, u32 mask, u32 bytes, u32 align, Access access, u8** pointers);
  void resolve_small(Space space, u64 address, u32 lane, u32 bytes, u32 align, Access access, u8** pointer);
  [[noreturn]] void fault_global(u64 address, u32 bytes, u32 lane, Access access) const;

  ForeignClocks fenced_;   // what the last fence at GPU scope published, if a strong write follows
  ForeignClocks pending_;  // what strong reads have met, if a fence at GPU scope follows
  std::vector<u64> register_file_;
  std::vector<u8> local_, local_written_;
  std::vector<Group> groups_;  // all but the running one
  bool waiting_here_ = false;  // the running group called converge() in vain
  u32 rendezvous_here_ = 0;
  u64 stamp_ = 0;
  u64 diverged_since_ = 0;                         // instructions run by the lowest group since others last had a turn
  u32 hold_ = 0;                                   // instructions left of an out-of-order turn
  std::array<Allocation*, 8> near_allocations_{};  // by pc: where an instruction found its last one
};

}  // namespace pagedkern::vgpu
