// What the asynchronous families share: operand packing, checked ranges of memory, and the async proxy's knowledge.
#pragma once

#include <string>
#include <vector>

#include "vgpu/async.h"
#include "vgpu/async_mbarrier.h"
#include "vgpu/block.h"
#include "vgpu/decode.h"
#include "vgpu/tma_box.h"
#include "vgpu/warp.h"

namespace pagedkern::vgpu {

// ---- operands in Kernel::pool ----

constexpr int kAddressWords = 4;
void push_address(std::vector<i32>& pool, const Address& address);
void lane_addresses(const Warp& warp, const i32* slot, u32 mask, u64* out);
inline u64 lane_address(const Warp& warp, const i32* slot, u32 lane) {
  const u64 offset = u64(u32(slot[2])) | u64(u32(slot[3])) << 32;
  const OperandRef base = slot[0];
  if (base == kNoOperand) return offset;
  return slot[1] ? warp.lanes<u64>(base)[lane] + offset : u64(u32(warp.lanes<u32>(base)[lane] + u32(offset)));
}
inline const i32* pool_of(const Warp& warp, const Inst& inst) {
  return warp.kernel().pool.data() + inst.ext;
}

// An address operand of a form that names its space, or (`generic`) of one that does not, in a 64-bit register.
Address address_operand(DecodeContext& ctx, const Operand& operand, bool generic);

// ---- shared memory ----

struct SharedSpot {
  Block* block = nullptr;
  u32 offset = 0;
};
// Bounds and alignment; a generic address must lie in the shared window.
SharedSpot shared_spot(Warp& warp, u32 lane, u64 address, u32 bytes, u32 align, bool generic);

// A read through the async proxy of bytes of shared memory: all checks a thread's read gets, and the proxy fence.
void async_proxy_read(Warp& warp, u32 lane, const SharedSpot& spot, u32 bytes);
// The same by an actor other than the warp: `clock` is its time, later accesses must know of it (wgmma).
void async_proxy_read_as(Warp& warp, u32 actor, u32 clock, const SharedSpot& spot, u32 bytes);
// A write by the async proxy, to begin some time after now. `stamp` comes from async_proxy_stamp().
void async_proxy_write(Warp& warp, u32 lane, const SharedSpot& spot, u32 bytes, const VectorClock& stamp);
// The issuer's clock with a new tick of the async proxy; empty where races are not tracked.
VectorClock async_proxy_stamp(Warp& warp);
// What a waiter learns from the completion of an operation with that stamp.
void async_proxy_publish(Cluster& cluster, const VectorClock& stamp, Knowledge& into);

// ---- global memory ----

// The host pointer of a range of global memory, checked as an access of the instruction at `pc`; sectors are counted.
u8* global_range(Warp& warp, u32 pc, u32 lane, u64 address, u64 bytes, u32 align, Access access);

// A bulk reduction into global memory, element by element atomic: blocks of one launch run in parallel.
void atomic_bulk_reduce(ReduceOp op, ReduceType type, u8* memory, const u8* operand, u32 count);

// ---- mbarrier objects ----

// Loads the object for an operation of `warp`; faults (at `pc`) where there is none.
Mbarrier mbarrier_load(Warp& warp, u32 pc, u32 lane, const SharedSpot& spot, MbarrierRecord** record);
// Stores it back; where the phase flipped, waiters may go on and learn what the arrivals knew.
void mbarrier_store(Cluster& cluster, const SharedSpot& spot, MbarrierRecord& record, const Mbarrier& before,
                    const Mbarrier& after);
void mbarrier_gather(MbarrierRecord& record, const Knowledge& knowledge);
// The identity of the object's current phase, never 0.
u64 mbarrier_token(const SharedSpot& spot, const MbarrierRecord& record);
// An arrival on behalf of lanes of `warp` at `pc`, which hands on `knowledge` (where races are tracked).
void mbarrier_arrive(Warp& warp, u32 pc, u32 lane, const SharedSpot& spot, u32 count, const Knowledge* knowledge);
// complete_tx by the async proxy.
void mbarrier_complete(const AsyncOperation& op, const SharedSpot& spot, u32 bytes, const VectorClock& stamp);

// Destination and mbarrier of a multicast copy: the same offsets in every block of `mask`.
struct MulticastTarget {
  SharedSpot to, barrier;
};
std::vector<MulticastTarget> multicast_targets(Warp& warp, u32 lane, u32 mask, const SharedSpot& to,
                                               const SharedSpot& barrier);

}  // namespace pagedkern::vgpu
