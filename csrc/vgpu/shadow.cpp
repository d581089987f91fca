#include "vgpu/shadow.h"

#include <algorithm>

namespace pagedkern::vgpu {
namespace {

bool known(Epoch e, const VectorClock& clock) {
  return epoch_clock(e) <= clock.at[epoch_actor(e)];
}

}  // namespace

void SharedShadow::reset(u32 bytes, u32 actors, bool races) {
  bytes_ = bytes;
  actors_ = actors;
  races_ = races && actors <= kMaxActors;
  written_.assign((bytes + 63) / 64, 0);
  cells_.clear();
  split_.clear();
  readers_.clear();
  free_readers_.clear();
  if (races_) cells_.resize((bytes + 3) / 4);
}

bool SharedShadow::written(u32 offset, u32 bytes) const {
  u32 shift = offset & 63;
  if (bytes + shift <= 64) {
    u64 mask = (bytes == 64 ? ~0ull : (1ull << bytes) - 1) << shift;
    return (written_[offset >> 6] & mask) == mask;
  }
  for (u32 k = offset; k < offset + bytes; ++k) {
    if (!(written_[k >> 6] >> (k & 63) & 1)) return false;
  }
  return true;
}

void SharedShadow::mark_written(u32 offset, u32 bytes) {
  u32 end = offset + bytes;
  for (u32 k = offset; k < end;) {
    u32 shift = k & 63, take = std::min(64 - shift, end - k);
    written_[k >> 6] |= (take == 64 ? ~0ull : (1ull << take) - 1) << shift;
    k += take;
  }
}

void SharedShadow::mark_unwritten(u32 offset, u32 bytes) {
  u32 end = offset + bytes;
  for (u32 k = offset; k < end;) {
    u32 shift = k & 63, take = std::min(64 - shift, end - k);
    written_[k >> 6] &= ~((take == 64 ? ~0ull : (1ull << take) - 1) << shift);
    k += take;
  }
}

void SharedShadow::add_reader(Cell& cell, Epoch self) {
  if (!(cell.read & kManyReaders)) {
    u32 slot;
    if (free_readers_.empty()) {
      slot = u32(readers_.size() / actors_);
      readers_.resize(readers_.size() + actors_, 0);
    } else {
      slot = free_readers_.back();
      free_readers_.pop_back();
      std::fill_n(readers_.begin() + std::ptrdiff_t(size_t(slot) * actors_), actors_, 0u);
    }
    readers_[size_t(slot) * actors_ + epoch_actor(cell.read)] = epoch_clock(cell.read);
    cell.read = kManyReaders | slot;
  }
  readers_[size_t(cell.read & ~kManyReaders) * actors_ + epoch_actor(self)] = epoch_clock(self);
}

void SharedShadow::drop_readers(Cell& cell) {
  if (cell.read & kManyReaders) free_readers_.push_back(cell.read & ~kManyReaders);
  cell.read = 0;
}

bool SharedShadow::touch(Cell& cell, bool write, Epoch self, const VectorClock& clock, RaceReport& report) {
  if (cell.write && cell.write != self && !known(cell.write, clock)) {
    report = {true, cell.write, true, 0};
    return false;
  }
  if (!write) {
    if (cell.read == self) return true;
    if (cell.read == 0 || (!(cell.read & kManyReaders) && known(cell.read, clock))) {
      cell.read = self;
    } else {
      add_reader(cell, self);
    }
    return true;
  }
  if (cell.read & kManyReaders) {
    const u32* clocks = &readers_[size_t(cell.read & ~kManyReaders) * actors_];
    for (u32 k = 0; k < actors_; ++k) {
      if (clocks[k] > clock.at[k]) {
        report = {true, make_epoch(k, clocks[k]), false, 0};
        return false;
      }
    }
    drop_readers(cell);
  } else if (cell.read && !known(cell.read, clock)) {
    report = {true, cell.read, false, 0};
    return false;
  }
  cell.read = 0;
  cell.write = self;
  return true;
}

RaceReport SharedShadow::access(u32 offset, u32 bytes, bool write, u32 actor, const VectorClock& clock) {
  RaceReport report;
  Epoch self = make_epoch(actor, clock.at[actor]);
  u32 end = offset + bytes;
  while (offset < end) {
    Cell& cell = cells_[offset >> 2];
    bool whole = (offset & 3) == 0 && end - offset >= 4;
    if (whole && cell.write != kSplit) {
      if (!touch(cell, write, self, clock, report)) break;
      offset += 4;
      continue;
    }
    if (cell.write != kSplit) {
      Cell old = cell;
      std::array<Cell, 4> parts;
      parts.fill(Cell{old.write, old.read & kManyReaders ? 0 : old.read});
      if (old.read & kManyReaders) {  // every byte gets its own copy of the readers
        for (auto& part : parts) {
          for (u32 k = 0; k < actors_; ++k) {
            u32 c = readers_[size_t(old.read & ~kManyReaders) * actors_ + k];
            if (c) {
              if (part.read == 0)
                part.read = make_epoch(k, c);
              else
                add_reader(part, make_epoch(k, c));
            }
          }
        }
        drop_readers(old);
      }
      cells_[offset >> 2] = Cell{kSplit, u32(split_.size())};
      split_.push_back(parts);
    }
    Cell& part = split_[cells_[offset >> 2].read][offset & 3];
    if (!touch(part, write, self, clock, report)) break;
    ++offset;
  }
  report.offset = offset;
  return report;
}

RaceReport SharedShadow::proxy_read(u32 offset, u32 bytes, const VectorClock& clock) const {
  RaceReport report;
  if (!races_) return report;
  for (u32 k = offset; k < offset + bytes;) {
    const Cell& cell = cells_[k >> 2];
    Epoch write = cell.write == kSplit ? split_[cell.read][k & 3].write : cell.write;
    if (write && !known(write, clock)) return {true, write, true, k};
    k = cell.write == kSplit ? k + 1 : (k & ~3u) + 4;
  }
  return report;
}

}  // namespace pagedkern::vgpu
