// Graphs: what a thread gives to a stream is kept in place of being done, and done as often as the graph is launched.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "vgpu/device.h"

namespace pagedkern::vgpu {

class Graph {
 public:
  // Work that may use, whenever it is done, the memory that this thread may use now.
  PAGEDKERN_VGPU_API void add(std::function<void()> work);
  // Does all of it, in order, with the settings of the calling thread. What it throws ends it.
  PAGEDKERN_VGPU_API void launch() const;
  size_t size() const { return nodes_.size(); }

 private:
  struct Node {
    std::function<void()> work;
    std::vector<HostRange> memory;
  };
  std::vector<Node> nodes_;
};

struct Capture {
  const void* stream;  // the one that is captured
  bool every_stream;   // or all of them
  bool relaxed;        // allocations are no fault meanwhile
  bool invalid;        // by a call that no capture allows
  std::shared_ptr<Graph> graph;
};

// That of the calling thread, who has one at a time; nullptr: none.
PAGEDKERN_VGPU_API Capture* current_capture();
PAGEDKERN_VGPU_API bool begin_capture(const void* stream, bool every_stream, bool relaxed);  // false: there is one
PAGEDKERN_VGPU_API std::shared_ptr<Graph> end_capture();  // nullptr: there was none, or it was invalid

}  // namespace pagedkern::vgpu
