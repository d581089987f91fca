// Where a warp is: in the grid, for special registers, and in the PTX text, for reports and faults.
#include <bit>

#include "vgpu/block.h"
#include "vgpu/warp.h"

namespace pagedkern::vgpu {

u32 Warp::special_value(SpecialRegister r, u32 lane) const {
  const LaunchConfig& c = launch->config;
  const Block& b = *block;
  const Dim3 t = thread_of(lane);
  const Dim3 cid = b.cluster.cluster_id;
  const Dim3 in_cluster{b.ctaid.x - cid.x * c.cluster.x, b.ctaid.y - cid.y * c.cluster.y,
                        b.ctaid.z - cid.z * c.cluster.z};
  switch (r) {
    case SpecialRegister::kTidX: return t.x;
    case SpecialRegister::kTidY: return t.y;
    case SpecialRegister::kTidZ: return t.z;
    case SpecialRegister::kNtidX: return c.block.x;
    case SpecialRegister::kNtidY: return c.block.y;
    case SpecialRegister::kNtidZ: return c.block.z;
    case SpecialRegister::kCtaidX: return b.ctaid.x;
    case SpecialRegister::kCtaidY: return b.ctaid.y;
    case SpecialRegister::kCtaidZ: return b.ctaid.z;
    case SpecialRegister::kNctaidX: return c.grid.x;
    case SpecialRegister::kNctaidY: return c.grid.y;
    case SpecialRegister::kNctaidZ: return c.grid.z;
    case SpecialRegister::kLaneid: return lane;
    case SpecialRegister::kWarpid: return index;
    case SpecialRegister::kNwarpid: return 64;
    case SpecialRegister::kSmid: {
      u64 linear = b.ctaid.x + u64(c.grid.x) * (b.ctaid.y + u64(c.grid.y) * b.ctaid.z);
      return u32(linear % DeviceLimits::kMultiprocessors);
    }
    case SpecialRegister::kNsmid: return DeviceLimits::kMultiprocessors;
    case SpecialRegister::kGridid: return 0;
    case SpecialRegister::kClusteridX: return cid.x;
    case SpecialRegister::kClusteridY: return cid.y;
    case SpecialRegister::kClusteridZ: return cid.z;
    case SpecialRegister::kNclusteridX: return c.grid.x / c.cluster.x;
    case SpecialRegister::kNclusteridY: return c.grid.y / c.cluster.y;
    case SpecialRegister::kNclusteridZ: return c.grid.z / c.cluster.z;
    case SpecialRegister::kClusterCtaidX: return in_cluster.x;
    case SpecialRegister::kClusterCtaidY: return in_cluster.y;
    case SpecialRegister::kClusterCtaidZ: return in_cluster.z;
    case SpecialRegister::kClusterNctaidX: return c.cluster.x;
    case SpecialRegister::kClusterNctaidY: return c.cluster.y;
    case SpecialRegister::kClusterNctaidZ: return c.cluster.z;
    case SpecialRegister::kClusterCtarank: return b.rank;
    case SpecialRegister::kClusterNctarank: return u32(c.cluster.count());
    case SpecialRegister::kIsExplicitCluster: return c.cluster.count() > 1;
    case SpecialRegister::kLanemaskEq: return 1u << lane;
    case SpecialRegister::kLanemaskLt: return (1u << lane) - 1;
    case SpecialRegister::kLanemaskLe: return ((1u << lane) - 1) | 1u << lane;
    case SpecialRegister::kLanemaskGt: return ~(((1u << lane) - 1) | 1u << lane);
    case SpecialRegister::kLanemaskGe: return ~((1u << lane) - 1);
    case SpecialRegister::kDynamicSmemSize: return c.dynamic_shared_bytes;
    case SpecialRegister::kTotalSmemSize: return launch->shared_bytes + kSharedBase;
    case SpecialRegister::kReservedSmemOffset: return 0;
    case SpecialRegister::kCount: break;
  }
  return 0;
}

Dim3 Warp::thread_of(u32 lane) const {
  u32 t = index * kLanes + lane;
  const Dim3& b = launch->config.block;
  return {t % b.x, t / b.x % b.y, t / b.x / b.y};
}

std::string Warp::describe() const {
  u32 at = pc ? pc - 1 : 0;
  const Kernel& k = kernel();
  u32 line = at < k.where.size() ? k.where[at].line : 0;
  std::string text = "warp " + std::to_string(index) + " of block (" + std::to_string(block->ctaid.x) + "," +
                     std::to_string(block->ctaid.y) + "," + std::to_string(block->ctaid.z) + ")";
  if (!waiting_for.empty()) text += " waits for " + waiting_for;
  return text + " at PTX line " + std::to_string(line) + ": " + k.program->text_of(line);
}

void Warp::fault(const std::string& kind, const std::string& detail, u32 mask) const {
  fault_at(pc - 1, kind, detail, mask ? u32(std::countr_zero(mask)) : 0);
}

void Warp::fault_at(u32 at_pc, const std::string& kind, const std::string& detail, u32 lane) const {
  const Kernel& k = kernel();
  FaultSite site;
  site.kernel = k.name;
  site.block = block->ctaid;
  site.thread = thread_of(lane);
  if (at_pc < k.where.size()) {
    site.ptx_line = k.where[at_pc].line;
    site.instruction = k.program->text_of(site.ptx_line);
    site.source = k.program->source_of(k.where[at_pc]);
  }
  throw KernelFault(kind, detail, std::move(site));
}

}  // namespace pagedkern::vgpu
