// What a launch did; one instance per worker thread, summed at the end.
#pragma once

#include <array>

#include "vgpu/registry.h"
#include "vgpu/types.h"

namespace pagedkern::vgpu {

struct Counters {
  u64 warp_instructions = 0, thread_instructions = 0;
  std::array<u64, size_t(InstClass::kCount)> by_class{};
  u64 global_load_bytes = 0, global_load_requests = 0, global_load_sectors = 0;
  u64 global_store_bytes = 0, global_store_requests = 0, global_store_sectors = 0;
  u64 global_vector_bytes = 0, global_vector_requests = 0;  // of loads and stores of 16 bytes a lane
  u64 unique_global_read_bytes = 0, unique_global_write_bytes = 0;
  u64 bulk_bytes = 0;
  u64 shared_load_wavefronts = 0, shared_store_wavefronts = 0, shared_bank_conflicts = 0;
  u64 tensor_flops = 0, barriers = 0, atomics = 0;

  void add(const Counters& o) {
    warp_instructions += o.warp_instructions;
    thread_instructions += o.thread_instructions;
    for (size_t k = 0; k < by_class.size(); ++k) by_class[k] += o.by_class[k];
    global_load_bytes += o.global_load_bytes;
    global_load_requests += o.global_load_requests;
    global_load_sectors += o.global_load_sectors;
    global_store_bytes += o.global_store_bytes;
    global_store_requests += o.global_store_requests;
    global_store_sectors += o.global_store_sectors;
    global_vector_bytes += o.global_vector_bytes;
    global_vector_requests += o.global_vector_requests;
    bulk_bytes += o.bulk_bytes;
    shared_load_wavefronts += o.shared_load_wavefronts;
    shared_store_wavefronts += o.shared_store_wavefronts;
    shared_bank_conflicts += o.shared_bank_conflicts;
    tensor_flops += o.tensor_flops;
    barriers += o.barriers;
    atomics += o.atomics;
  }
};

// Wavefronts that `mask`'s accesses of `bytes` each at these shared offsets take: 32 banks of 4 bytes; 8-byte accesses
// go by half warps, 16-byte ones by quarter warps. `*fewest` is what an access without conflicts would take.
u32 shared_wavefronts(const u32* offsets, u32 mask, u32 bytes, u32* fewest);

// Distinct 32-byte sectors; appends them to `sectors` (room for 32 * ((bytes + 62) / 32)) when not null.
u32 distinct_sectors(const u64* addresses, u32 mask, u32 bytes, u64* sectors);

}  // namespace pagedkern::vgpu
