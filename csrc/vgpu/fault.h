// The two errors of the virtual GPU: text it refuses, and a kernel that does wrong.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "vgpu/export.h"
#include "vgpu/types.h"

namespace pagedkern::vgpu {

// PTX that cannot be executed exactly: every reason found, one per line, each with its PTX line.
class PAGEDKERN_VGPU_API ParseError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A launch that real hardware would refuse, or arguments that do not fit the kernel.
class PAGEDKERN_VGPU_API LaunchError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct FaultSite {
  std::string kernel;
  Dim3 block{0, 0, 0};
  Dim3 thread{0, 0, 0};
  u32 ptx_line = 0;
  std::string instruction;  // the PTX text of the instruction
  std::string source;       // "file.cu:12", empty without .loc
};

// kind: "out_of_bounds", "misaligned", "uninitialized", "race", "divergent_barrier", "deadlock", "async", "trap",
// "budget", "invalid" (an operand value the instruction does not allow).
class PAGEDKERN_VGPU_API KernelFault : public std::runtime_error {
 public:
  KernelFault(std::string kind, std::string detail, FaultSite site)
      : std::runtime_error(describe(kind, detail, site)),
        kind(std::move(kind)),
        detail(std::move(detail)),
        site(std::move(site)) {}
  std::string kind;
  std::string detail;
  FaultSite site;

 private:
  static std::string describe(const std::string& kind, const std::string& detail, const FaultSite& s) {
    auto dim = [](const Dim3& d) {
      return "(" + std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z) + ")";
    };
    std::string text =
        kind + ": " + detail + "\n  kernel " + s.kernel + ", block " + dim(s.block) + ", thread " + dim(s.thread);
    if (s.ptx_line) text += "\n  PTX line " + std::to_string(s.ptx_line) + ": " + s.instruction;
    if (!s.source.empty()) text += "\n  source " + s.source;
    return text;
  }
};

}  // namespace pagedkern::vgpu
