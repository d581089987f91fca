#include "vgpu/device.h"

#include <cstdlib>
#include <deque>
#include <list>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace pagedkern::vgpu {
namespace {

struct ThreadState {
  LaunchOptions options;
  bool keep_reports = false;
  std::vector<FinishedLaunch> reports;
  std::list<HostRange> grants;
};

// On the heap, and shared with every grant: a grant may be dropped after its thread's own objects are gone.
const std::shared_ptr<ThreadState>& thread_state() {
  thread_local const std::shared_ptr<ThreadState> state = std::make_shared<ThreadState>();
  return state;
}

// Never destroyed: device memory may be released by static destructors.
struct DeviceMemory {
  std::mutex mutex;  // held through a launch: launches share the tracking state of this memory
  GlobalMemory ranges;
  std::unordered_map<u64, u64> bytes_of;
  std::deque<std::pair<u64, u64>> freed;  // address and bytes of what was released, oldest first
  u64 freed_bytes = 0;
  u64 allocations = 0;
};

DeviceMemory& device_memory() {
  static DeviceMemory* memory = new DeviceMemory;
  return *memory;
}

constexpr u64 kAlignment = 256;
constexpr u64 kRedZone = kAlignment;  // before and behind every allocation: no access reaches a neighbour by little
constexpr u64 kQuarantineBytes =
    64 << 20;  // released memory is kept from new allocations while it is no more than this

u64 address_of(const void* pointer) {
  return reinterpret_cast<u64>(pointer);
}

void drop_oldest(DeviceMemory& memory) {
  const auto [address, bytes] = memory.freed.front();
  memory.freed.pop_front();
  memory.freed_bytes -= bytes;
  memory.ranges.forget(address);
  std::free(reinterpret_cast<void*>(address - kRedZone));
}

}  // namespace

void set_thread_options(const LaunchOptions* options) {
  ThreadState& state = *thread_state();
  state.options = options == nullptr ? LaunchOptions{} : *options;
  state.keep_reports = options != nullptr;
}

std::vector<FinishedLaunch> take_thread_reports() {
  return std::exchange(thread_state()->reports, {});
}

void* device_allocate(u64 bytes) {
  if (bytes > 1ull << 47) return nullptr;
  const u64 whole = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* room = std::aligned_alloc(kAlignment, kRedZone + whole + kRedZone);
  if (room == nullptr) return nullptr;
  void* pointer = static_cast<u8*>(room) + kRedZone;
  DeviceMemory& memory = device_memory();
  const std::lock_guard lock(memory.mutex);
  const std::string name = "allocation " + std::to_string(memory.allocations++);
  memory.ranges.add(address_of(pointer), bytes, name, /*initialized=*/false);
  memory.bytes_of[address_of(pointer)] = bytes;
  return pointer;
}

bool device_release(void* pointer) {
  DeviceMemory& memory = device_memory();
  const std::lock_guard lock(memory.mutex);
  const auto found = memory.bytes_of.find(address_of(pointer));
  if (found == memory.bytes_of.end()) return false;
  memory.ranges.remove(found->first);
  memory.freed.emplace_back(*found);
  memory.freed_bytes += found->second;
  memory.bytes_of.erase(found);
  while (memory.freed_bytes > kQuarantineBytes) drop_oldest(memory);
  return true;
}

bool device_owns(const void* pointer) {
  for (const HostRange& range : thread_state()->grants) {
    if (address_of(pointer) - range.base < range.bytes) return true;
  }
  DeviceMemory& memory = device_memory();
  const std::lock_guard lock(memory.mutex);
  const Allocation* allocation = memory.ranges.find(address_of(pointer));
  return allocation != nullptr && !allocation->freed;
}

void device_written(void* pointer, u64 bytes) {
  DeviceMemory& memory = device_memory();
  const std::lock_guard lock(memory.mutex);
  memory.ranges.mark_written(address_of(pointer), bytes);
}

MemoryGrant grant_memory(const void* pointer, u64 bytes, const std::string& name) {
  if (bytes == 0) return nullptr;
  std::shared_ptr<ThreadState> state = thread_state();
  state->grants.push_back({address_of(pointer), bytes, name});
  const auto place = std::prev(state->grants.end());
  return MemoryGrant(&*place, [state, place](void*) { state->grants.erase(place); });
}

std::vector<HostRange> granted_memory() {
  const std::list<HostRange>& grants = thread_state()->grants;
  return {grants.begin(), grants.end()};
}

void device_launch(const std::shared_ptr<const Program>& program, const Kernel& kernel, const LaunchConfig& config,
                   const std::vector<u8>& params) {
  ThreadState& state = *thread_state();
  DeviceMemory& device = device_memory();
  const std::lock_guard lock(device.mutex);
  GlobalMemory memory = device.ranges;
  for (const HostRange& range : state.grants) memory.add(range.base, range.bytes, range.name);
  LaunchReport report = launch(kernel, config, params, memory, state.options);
  if (state.keep_reports) state.reports.push_back({program, &kernel, std::move(report)});
}

std::string make_tensor_map(const TensorMap& map, u8* bytes) {
  std::string problem = tensor_map_problem(map);
  if (problem.empty()) tensor_map_encode(map, bytes);
  return problem;
}

}  // namespace pagedkern::vgpu
