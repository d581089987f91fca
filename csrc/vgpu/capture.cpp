#include "vgpu/capture.h"

#include <optional>
#include <utility>

namespace pagedkern::vgpu {
namespace {

std::optional<Capture>& thread_capture() {
  thread_local std::optional<Capture> capture;
  return capture;
}

}  // namespace

void Graph::add(std::function<void()> work) {
  nodes_.push_back({std::move(work), granted_memory()});
}

void Graph::launch() const {
  for (const Node& node : nodes_) {
    std::vector<MemoryGrant> grants;
    for (const HostRange& range : node.memory) {
      grants.push_back(grant_memory(reinterpret_cast<const void*>(range.base), range.bytes, range.name));
    }
    node.work();
  }
}

Capture* current_capture() {
  std::optional<Capture>& capture = thread_capture();
  return capture ? &*capture : nullptr;
}

bool begin_capture(const void* stream, bool every_stream, bool relaxed) {
  if (thread_capture()) return false;
  thread_capture() = {stream, every_stream, relaxed, false, std::make_shared<Graph>()};
  return true;
}

std::shared_ptr<Graph> end_capture() {
  const std::optional<Capture> ended = std::exchange(thread_capture(), std::nullopt);
  return ended && !ended->invalid ? ended->graph : nullptr;
}

}  // namespace pagedkern::vgpu
