#include "backend/plan/shadow_memory.h"

#include <algorithm>

#include "backend/layout/hash.h"

namespace tide {

void join_clocks(Clocks* clocks, const Clocks& other) {
  if (clocks->size() < other.size()) clocks->resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) (*clocks)[i] = std::max((*clocks)[i], other[i]);
}

int ShadowMemory::add_region(std::string name, int64_t bytes) {
  regions_.push_back({std::move(name), std::vector<Cell>(static_cast<size_t>((bytes + granule_ - 1) / granule_))});
  return static_cast<int>(regions_.size()) - 1;
}

std::string ShadowMemory::check_range(const Range& range) const {
  if (range.region < 0 || range.region >= static_cast<int>(regions_.size())) return "touches memory that does not exist";
  const Region& region = regions_[range.region];
  const int64_t region_bytes = static_cast<int64_t>(region.cells.size()) * granule_;
  if (range.begin_bytes < 0 || range.bytes < 0 || range.begin_bytes > region_bytes - range.bytes) {
    return "touches bytes [" + std::to_string(range.begin_bytes) + ", " +
           std::to_string(range.begin_bytes + range.bytes) + ") of " + region.name + ", which has " +
           std::to_string(region_bytes);
  }
  return "";
}

bool ShadowMemory::ordered(const Actor& actor, Epoch earlier) {
  return earlier.thread < 0 || (*actor.clocks)[earlier.thread] >= earlier.time;
}

std::string ShadowMemory::race(const char* what, const Range& range, int64_t cell, const Actor& actor,
                               Epoch earlier) const {
  return std::string(what) + " byte " + std::to_string(range.begin_bytes + cell * granule_) + " of " +
         regions_[range.region].name + " (thread " + std::to_string(actor.thread) + ") with nothing that orders it behind " +
         "thread " + std::to_string(earlier.thread);
}

std::string ShadowMemory::read_cell(const Actor& actor, const Range& range, int64_t index, Cell* cell) {
  if (!ordered(actor, cell->written)) return race("reads", range, index, actor, cell->written);
  if (cell->content == 0) {
    return "reads byte " + std::to_string(range.begin_bytes + index * granule_) + " of " + regions_[range.region].name +
           " before anything was written there";
  }
  const Epoch now{actor.thread, (*actor.clocks)[actor.thread]};
  if (cell->read.thread < 0 || cell->read.thread == actor.thread) {
    cell->read = now;
  } else {
    const auto same = std::find_if(cell->other_reads.begin(), cell->other_reads.end(),
                                   [&](const Epoch& read) { return read.thread == actor.thread; });
    if (same != cell->other_reads.end()) {
      *same = now;
    } else {
      cell->other_reads.push_back(now);
    }
  }
  cell->reads_sum += hash_combine(kHashSeed, actor.tag);
  return "";
}

std::string ShadowMemory::write_cell(const Actor& actor, const Range& range, int64_t index, Cell* cell,
                                     uint64_t content) {
  if (!ordered(actor, cell->written)) return race("writes", range, index, actor, cell->written);
  if (!ordered(actor, cell->read)) return race("overwrites, while it is read,", range, index, actor, cell->read);
  for (const Epoch& read : cell->other_reads) {
    if (!ordered(actor, read)) return race("overwrites, while it is read,", range, index, actor, read);
  }
  cell->history = hash_combine(hash_combine(hash_combine(cell->history, cell->reads_sum), actor.tag), content);
  cell->reads_sum = 0;
  cell->content = content;
  cell->written = {actor.thread, (*actor.clocks)[actor.thread]};
  cell->read = {};
  cell->other_reads.clear();
  return "";
}

std::string ShadowMemory::read_expecting(const Actor& actor, const Range& range, uint64_t content) {
  if (std::string error = check_range(range); !error.empty()) return error;
  Cell* cell = first_cell(range);
  for (int64_t i = 0; i < range.bytes / granule_; ++i, ++cell) {
    if (std::string error = read_cell(actor, range, i, cell); !error.empty()) return error;
    if (cell->content != content + static_cast<uint64_t>(i)) {
      return "finds something else than it needs at byte " + std::to_string(range.begin_bytes + i * granule_) + " of " +
             regions_[range.region].name;
    }
  }
  return "";
}

std::string ShadowMemory::write(const Actor& actor, const Range& range, uint64_t content) {
  if (std::string error = check_range(range); !error.empty()) return error;
  Cell* cell = first_cell(range);
  for (int64_t i = 0; i < range.bytes / granule_; ++i, ++cell) {
    std::string error = write_cell(actor, range, i, cell, content + static_cast<uint64_t>(i));
    if (!error.empty()) return error;
  }
  return "";
}

std::string ShadowMemory::copy(const Actor& actor, const Range& from, const Range& to) {
  if (std::string error = check_range(from); !error.empty()) return error;
  if (std::string error = check_range(to); !error.empty()) return error;
  Cell* source = first_cell(from);
  Cell* target = first_cell(to);
  for (int64_t i = 0; i < from.bytes / granule_; ++i, ++source, ++target) {
    if (std::string error = read_cell(actor, from, i, source); !error.empty()) return error;
    if (std::string error = write_cell(actor, to, i, target, source->content); !error.empty()) return error;
  }
  return "";
}

void ShadowMemory::preset(const Range& range, uint64_t content) {
  Cell* cell = first_cell(range);
  for (int64_t i = 0; i < range.bytes / granule_; ++i, ++cell) cell->content = content + static_cast<uint64_t>(i);
}

uint64_t ShadowMemory::canonical() const {
  uint64_t hash = kHashSeed;
  for (const Region& region : regions_) {
    hash = hash_combine(hash, region.cells.size());
    for (const Cell& cell : region.cells) {
      hash = hash_combine(hash_combine(hash, cell.history), cell.reads_sum);
    }
  }
  return hash;
}

}  // namespace tide
