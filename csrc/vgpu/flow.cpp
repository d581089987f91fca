// Which registers may be read before anything wrote them. Only those are tracked at run time: a register whose every
// read is preceded by an unconditional write on all paths costs nothing.
#include <algorithm>
#include <map>

#include "vgpu/builder.h"

namespace pagedkern::vgpu {
namespace {

class BitSet {
 public:
  explicit BitSet(size_t bits = 0, bool ones = false) : words_((bits + 63) / 64, ones ? ~0ull : 0) {}
  void set(u32 k) { words_[k >> 6] |= 1ull << (k & 63); }
  bool test(u32 k) const { return words_[k >> 6] >> (k & 63) & 1; }
  bool intersect(const BitSet& o) {
    bool changed = false;
    for (size_t k = 0; k < words_.size(); ++k) {
      u64 next = words_[k] & o.words_[k];
      changed |= next != words_[k];
      words_[k] = next;
    }
    return changed;
  }
  void unite(const BitSet& o) {
    for (size_t k = 0; k < words_.size(); ++k) words_[k] |= o.words_[k];
  }

 private:
  std::vector<u64> words_;
};

struct BasicBlock {
  u32 begin = 0, end = 0;
  std::vector<u32> next;
};

std::vector<BasicBlock> find_blocks(const std::vector<InstFlow>& flow, std::map<u32, u32>& block_of) {
  std::set<u32> leaders = {0};
  for (u32 pc = 0; pc < flow.size(); ++pc) {
    for (u32 t : flow[pc].targets) leaders.insert(t);
    if (!flow[pc].targets.empty() || !flow[pc].falls_through) leaders.insert(pc + 1);
    if (pc && flow[pc].function != flow[pc - 1].function) leaders.insert(pc);
  }
  std::vector<BasicBlock> blocks;
  for (u32 pc : leaders) {
    if (pc >= flow.size()) continue;
    if (!blocks.empty()) blocks.back().end = pc;
    block_of[pc] = u32(blocks.size());
    blocks.push_back({pc, u32(flow.size()), {}});
  }
  for (auto& b : blocks) {
    const InstFlow& last = flow[b.end - 1];
    for (u32 t : last.targets) b.next.push_back(block_of.at(t));
    if (last.falls_through && b.end < flow.size() && flow[b.end].function == last.function)
      b.next.push_back(block_of.at(b.end));
  }
  return blocks;
}

}  // namespace

void KernelBuilder::analyse_registers() {
  Kernel& kernel = *kernel_;
  std::map<u32, u32> block_of;
  std::vector<BasicBlock> blocks = find_blocks(flow_, block_of);
  size_t count = registers_.size();
  auto defines = [&](u32 pc) { return !(kernel.code[pc].special & kGuarded); };

  std::vector<BitSet> in(blocks.size(), BitSet(count, true)), gen(blocks.size(), BitSet(count));
  for (size_t b = 0; b < blocks.size(); ++b) {
    for (u32 pc = blocks[b].begin; pc < blocks[b].end; ++pc) {
      if (!defines(pc)) continue;
      for (u32 r : flow_[pc].writes) gen[b].set(r);
    }
  }
  std::vector<u32> work;
  for (u32 b = 0; b < blocks.size(); ++b) {
    u32 pc = blocks[b].begin;
    bool entry = pc == 0 || flow_[pc].function != flow_[pc - 1].function;
    if (entry) {
      in[b] = BitSet(count);
      work.push_back(b);
    }
  }
  std::vector<bool> reached(blocks.size());
  while (!work.empty()) {
    u32 b = work.back();
    work.pop_back();
    reached[b] = true;
    BitSet out = in[b];
    out.unite(gen[b]);
    for (u32 n : blocks[b].next) {
      if (in[n].intersect(out) || !reached[n]) work.push_back(n);
    }
  }

  std::vector<std::pair<u32, u32>> suspicious;  // pc, register
  for (size_t b = 0; b < blocks.size(); ++b) {
    BitSet known = in[b];
    for (u32 pc = blocks[b].begin; pc < blocks[b].end; ++pc) {
      for (u32 r : flow_[pc].reads) {
        if (!known.test(r)) {
          registers_[r].tracked = true;
          suspicious.emplace_back(pc, r);
        }
      }
      if (defines(pc)) {
        for (u32 r : flow_[pc].writes) known.set(r);
      }
    }
  }
  std::vector<CheckList> lists(kernel.code.size());
  for (auto [pc, r] : suspicious) lists[pc].reads.push_back({r, 0});
  for (u32 pc = 0; pc < kernel.code.size(); ++pc) {
    for (u32 r : flow_[pc].reads) {
      bool listed = std::any_of(lists[pc].reads.begin(), lists[pc].reads.end(), [&](auto& c) { return c.track == r; });
      if (registers_[r].async && !listed) {
        registers_[r].tracked = true;
        lists[pc].reads.push_back({r, 0});
      }
    }
    for (const auto* writes : {&flow_[pc].writes, &flow_[pc].partial_writes}) {
      for (u32 r : *writes) {
        if (registers_[r].tracked || registers_[r].async) lists[pc].writes.push_back({r, 0});
      }
    }
  }
  kernel.checks.assign(1, {});
  kernel.check_of.assign(kernel.code.size(), 0);
  for (u32 pc = 0; pc < kernel.code.size(); ++pc) {
    if (lists[pc].reads.empty() && lists[pc].writes.empty()) continue;
    bool async_write = std::any_of(lists[pc].writes.begin(), lists[pc].writes.end(),
                                   [&](auto& c) { return registers_[c.track].async; });
    lists[pc].ignore_pending = flow_[pc].ignore_pending;
    kernel.check_of[pc] = u32(kernel.checks.size());
    if (!lists[pc].reads.empty() || async_write) kernel.code[pc].special |= kChecked;
    if (!lists[pc].writes.empty()) kernel.code[pc].special |= kTracking;
    kernel.checks.push_back(std::move(lists[pc]));
  }
}

}  // namespace pagedkern::vgpu
