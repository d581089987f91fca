// Checks a launch as hardware would, and spreads its clusters over worker threads.
#include "vgpu/launch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>

#include "vgpu/block.h"

namespace pagedkern::vgpu {
namespace {

constexpr u64 kSlice = 200000;         // warp instructions of a cluster before others get a turn (grid-wide barriers)
constexpr size_t kMaxResident = 1024;  // clusters a worker keeps started at once

std::mutex g_forms_mutex;
std::vector<u64> g_forms;

std::string text_of(const Dim3& d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

void check_launch(const Kernel& k, const LaunchConfig& c, u32 shared_bytes, size_t param_bytes) {
  auto refuse = [&](const std::string& why) { throw LaunchError("kernel " + k.name + ": " + why); };
  if (!c.grid.count() || !c.block.count() || !c.cluster.count()) refuse("empty grid, block or cluster");
  if (c.block.count() > DeviceLimits::kMaxThreads || c.block.x > 1024 || c.block.y > 1024 || c.block.z > 64) {
    refuse("block " + text_of(c.block) + " is more than 1024 threads (z at most 64)");
  }
  if (c.grid.x > DeviceLimits::kMaxGridX || c.grid.y > DeviceLimits::kMaxGridYZ ||
      c.grid.z > DeviceLimits::kMaxGridYZ) {
    refuse("grid " + text_of(c.grid) + " is too large");
  }
  if (k.reqntid.x && (k.reqntid.x != c.block.x || k.reqntid.y != c.block.y || k.reqntid.z != c.block.z)) {
    refuse("block " + text_of(c.block) + ", the kernel requires " + text_of(k.reqntid));
  }
  if (k.maxntid.x && c.block.count() > k.maxntid.count()) {
    refuse("block " + text_of(c.block) + " is more than the kernel's bound of " + std::to_string(k.maxntid.count()) +
           " threads");
  }
  if (c.cluster.count() > DeviceLimits::kMaxClusterBlocks)
    refuse("cluster " + text_of(c.cluster) + " is more than 16 blocks");
  if (c.grid.x % c.cluster.x || c.grid.y % c.cluster.y || c.grid.z % c.cluster.z) {
    refuse("cluster " + text_of(c.cluster) + " does not divide the grid " + text_of(c.grid));
  }
  if (k.max_cluster_rank && c.cluster.count() > k.max_cluster_rank)
    refuse("cluster is larger than the kernel's .maxclusterrank");
  if (k.reqnctapercluster.x && k.reqnctapercluster.count() != c.cluster.count()) {
    refuse("cluster " + text_of(c.cluster) + ", the kernel requires " + text_of(k.reqnctapercluster));
  }
  if (shared_bytes > DeviceLimits::kMaxSharedBytes) {
    refuse(std::to_string(shared_bytes) + " bytes of shared memory, a block has at most " +
           std::to_string(DeviceLimits::kMaxSharedBytes));
  }
  if (k.maxnreg && u64(k.maxnreg) * c.block.count() > 65536)
    refuse(".maxnreg times the block's threads is more than 65536 registers");
  if (param_bytes != k.param_bytes) {
    refuse("parameters of " + std::to_string(param_bytes) + " bytes, the kernel takes " +
           std::to_string(k.param_bytes));
  }
}

class Runner {
 public:
  Runner(const LaunchContext& context, u64 clusters) : context_(context), clusters_(clusters) {
    if (context.options.seed != 0 && clusters <= (1u << 22)) {
      order_.resize(clusters);
      std::iota(order_.begin(), order_.end(), 0u);
      u64 rng = context.options.seed * 0x9e3779b97f4a7c15ull | 1;
      for (size_t k = clusters; k > 1; --k) {
        rng ^= rng << 13;
        rng ^= rng >> 7;
        rng ^= rng << 17;
        std::swap(order_[k - 1], order_[rng % k]);
      }
    }
  }

  void run(std::vector<WorkerContext>& workers) {
    std::vector<std::thread> threads;
    for (size_t k = 1; k < workers.size(); ++k) threads.emplace_back([this, &workers, k] { guarded(workers[k]); });
    guarded(workers[0]);
    for (auto& t : threads) t.join();
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void guarded(WorkerContext& worker) {
    try {
      work(worker);
    } catch (...) {
      std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
      stop_ = true;
    }
  }

  void work(WorkerContext& worker) {
    std::deque<std::unique_ptr<Cluster>> resident;
    std::vector<std::unique_ptr<Cluster>> idle;
    auto start_next = [&] {
      u64 next = next_.fetch_add(1);
      if (next >= clusters_) return false;
      if (idle.empty()) idle.push_back(std::make_unique<Cluster>(context_, worker));
      resident.push_front(std::move(idle.back()));
      idle.pop_back();
      resident.front()->start(order_.empty() ? next : order_[next]);
      return true;
    };
    while (!stop_) {
      if (resident.empty() && !start_next()) return;
      std::unique_ptr<Cluster> cluster = std::move(resident.front());
      resident.pop_front();
      if (cluster->run(kSlice)) {
        idle.push_back(std::move(cluster));
      } else {
        resident.push_back(std::move(cluster));
        if (resident.size() < kMaxResident) start_next();
      }
    }
  }

  const LaunchContext& context_;
  u64 clusters_;
  std::vector<u32> order_;
  std::atomic<u64> next_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::exception_ptr error_;
};

void sum_up(const Kernel& kernel, const std::vector<WorkerContext>& workers, LaunchReport& report) {
  report.executed.assign(kernel.code.size(), 0);
  for (const WorkerContext& w : workers) {
    report.counters.add(w.counters);
    for (size_t pc = 0; pc < kernel.code.size(); ++pc) report.executed[pc] += w.executed[pc];
  }
  const auto& forms = Registry::instance().forms();
  std::lock_guard lock(g_forms_mutex);
  g_forms.resize(forms.size(), 0);
  for (size_t pc = 0; pc < kernel.code.size(); ++pc) {
    u32 form = kernel.code[pc].form;
    g_forms[form] += report.executed[pc];
    report.counters.by_class[size_t(forms[form].cls)] += report.executed[pc];
  }
}

}  // namespace

LaunchReport launch(const Kernel& kernel, const LaunchConfig& config, const std::vector<u8>& params,
                    GlobalMemory& memory, const LaunchOptions& options) {
  auto begin = std::chrono::steady_clock::now();
  LaunchContext context;
  context.kernel = &kernel;
  context.config = config;
  context.options = options;
  context.memory = &memory;
  context.params = params.data();
  u64 shared = u64(kernel.shared_dynamic_offset - kSharedBase) + config.dynamic_shared_bytes;
  context.shared_bytes = u32(std::min<u64>(shared, UINT32_MAX));
  check_launch(kernel, config, context.shared_bytes, params.size());
  for (const auto& v : kernel.program->variables) {
    if (v->bytes) memory.add(reinterpret_cast<u64>(v->data), v->bytes, v->name, true, v->is_const);
  }
  GlobalOrder order;
  context.order = &order;
  memory.begin_launch(options.counters, options.check_global_races);

  u64 clusters = config.grid.count() / config.cluster.count();
  u64 threads = options.threads > 0 ? u64(options.threads) : std::max(1u, std::thread::hardware_concurrency());
  std::vector<WorkerContext> workers(std::min<u64>(threads, clusters));
  for (WorkerContext& w : workers) {
    w.executed.assign(kernel.code.size(), 0);
    w.budget = options.max_warp_instructions / workers.size() + 1;
  }
  Runner(context, clusters).run(workers);

  LaunchReport report;
  report.kernel = kernel.name;
  report.config = config;
  sum_up(kernel, workers, report);
  report.counters.unique_global_read_bytes = memory.unique_bytes(false);
  report.counters.unique_global_write_bytes = memory.unique_bytes(true);
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

std::vector<u64> executed_forms() {
  std::lock_guard lock(g_forms_mutex);
  std::vector<u64> counts = g_forms;
  counts.resize(Registry::instance().forms().size(), 0);
  return counts;
}

}  // namespace pagedkern::vgpu
