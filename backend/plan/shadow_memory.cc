#include "backend/plan/shadow_memory.h"

#include <algorithm>

#include "backend/layout/hash.h"

namespace tide {
namespace {

constexpr uint64_t kZeroContent = 2;

}  // namespace

void join_clocks(Clocks* clocks, const Clocks& other) {
  if (clocks->size() < other.size()) clocks->resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) (*clocks)[i] = std::max((*clocks)[i], other[i]);
}

int ShadowMemory::add_region(std::string name, int64_t bytes, bool in_transit) {
  regions_.push_back({std::move(name),
                      std::vector<Cell>(static_cast<size_t>((bytes + granule_ - 1) / granule_)),
                      in_transit});
  return static_cast<int>(regions_.size()) - 1;
}

std::string ShadowMemory::thread_name(int thread) const {
  return thread < static_cast<int>(thread_names_.size()) ? thread_names_[thread]
                                                         : "thread " + std::to_string(thread);
}

std::string ShadowMemory::check_range(const Range& range) const {
  if (range.region < 0 || range.region >= static_cast<int>(regions_.size()))
    return "touches memory that does not exist";
  const Region& region = regions_[range.region];
  const int64_t region_bytes = static_cast<int64_t>(region.cells.size()) * granule_;
  if (range.begin_bytes < 0 || range.bytes < 0 || range.begin_bytes > region_bytes - range.bytes) {
    return "touches bytes [" + std::to_string(range.begin_bytes) + ", " +
           std::to_string(range.begin_bytes + range.bytes) + ") of " + region.name +
           ", which has " + std::to_string(region_bytes);
  }
  return "";
}

std::string ShadowMemory::at(const Range& range, const Cell* cell) const {
  const Region& region = regions_[range.region];
  return " byte " + std::to_string((cell - region.cells.data()) * granule_) + " of " + region.name;
}

std::string ShadowMemory::race(const char* what, const Range& range, const Cell* cell,
                               const Actor& actor, Epoch earlier) const {
  return what + at(range, cell) + " in " + thread_name(actor.thread) +
         " with nothing that orders it behind what " + thread_name(earlier.thread) + " did there";
}

std::string ShadowMemory::explain_read(const Actor& actor, const Range& range,
                                       const Cell* cell) const {
  if (!ordered(actor, cell->written)) return race("reads", range, cell, actor, cell->written);
  return "reads" + at(range, cell) + " before anything was written there";
}

std::string ShadowMemory::explain_write(const Actor& actor, const Range& range,
                                        const Cell* cell) const {
  if (!ordered(actor, cell->written)) return race("overwrites", range, cell, actor, cell->written);
  if (!ordered(actor, cell->read))
    return race("overwrites, while it is read,", range, cell, actor, cell->read);
  if (is_lost(range, *cell)) return "overwrites" + at(range, cell) + ", which nobody has read";
  for (const Epoch& read : other_reads_[cell->other_reads]) {
    if (!ordered(actor, read))
      return race("overwrites, while it is read,", range, cell, actor, read);
  }
  return "";
}

bool ShadowMemory::read_cell(const Actor& actor, uint64_t reader, Cell* cell) {
  if (!ordered(actor, cell->written) || cell->content == 0) return false;
  const Epoch now{actor.thread, (*actor.clocks)[actor.thread]};
  cell->reads_sum += reader;
  if (cell->read.thread < 0 || cell->read.thread == actor.thread) {
    cell->read = now;
    return true;
  }
  if (cell->other_reads < 0) {
    cell->other_reads = static_cast<int>(other_reads_.size());
    other_reads_.emplace_back();
  }
  for (Epoch& read : other_reads_[cell->other_reads]) {
    if (read.thread != actor.thread) continue;
    read = now;
    return true;
  }
  other_reads_[cell->other_reads].push_back(now);
  return true;
}

// Whether to write the cell would lose what nobody has read.
bool ShadowMemory::is_lost(const Range& range, const Cell& cell) const {
  return regions_[range.region].in_transit && cell.content != 0 && cell.content != kZeroContent &&
         cell.read.thread < 0;
}

bool ShadowMemory::write_cell(const Actor& actor, const Range& range, Cell* cell,
                              uint64_t content) {
  if (is_lost(range, *cell)) return false;
  if (!ordered(actor, cell->written) || !ordered(actor, cell->read)) return false;
  if (cell->other_reads >= 0) {
    std::vector<Epoch>& reads = other_reads_[cell->other_reads];
    for (const Epoch& read : reads) {
      if (!ordered(actor, read)) return false;
    }
    reads.clear();
  }
  cell->history = hash_combine(cell->history + cell->reads_sum, actor.tag + content);
  cell->reads_sum = 0;
  cell->content = content;
  cell->written = {actor.thread, (*actor.clocks)[actor.thread]};
  cell->read = {};
  return true;
}

std::string ShadowMemory::read_expecting(const Actor& actor, const Range& range, uint64_t content) {
  if (std::string error = check_range(range); !error.empty()) return error;
  const uint64_t reader = hash_combine(kHashSeed, actor.tag);
  Cell* cell = first_cell(range);
  for (int64_t i = 0; i < range.bytes / granule_; ++i, ++cell) {
    if (!read_cell(actor, reader, cell)) return explain_read(actor, range, cell);
    if (cell->content != content + static_cast<uint64_t>(i)) {
      return "finds something else than it needs at" + at(range, cell);
    }
  }
  return "";
}

std::string ShadowMemory::write(const Actor& actor, const Range& range, uint64_t content) {
  if (std::string error = check_range(range); !error.empty()) return error;
  Cell* cell = first_cell(range);
  for (int64_t i = 0; i < range.bytes / granule_; ++i, ++cell) {
    if (!write_cell(actor, range, cell, content + static_cast<uint64_t>(i)))
      return explain_write(actor, range, cell);
  }
  return "";
}

std::string ShadowMemory::copy(const Actor& actor, const Range& from, const Range& to) {
  if (std::string error = check_range(from); !error.empty()) return error;
  if (std::string error = check_range(to); !error.empty()) return error;
  const uint64_t reader = hash_combine(kHashSeed, actor.tag);
  Cell* source = first_cell(from);
  Cell* target = first_cell(to);
  for (int64_t i = 0; i < from.bytes / granule_; ++i, ++source, ++target) {
    if (!read_cell(actor, reader, source)) return explain_read(actor, from, source);
    if (!write_cell(actor, to, target, source->content)) return explain_write(actor, to, target);
  }
  return "";
}

std::string ShadowMemory::read_zeros(const Actor& actor, const Range& range) {
  if (std::string error = check_range(range); !error.empty()) return error;
  const uint64_t reader = hash_combine(kHashSeed, actor.tag);
  Cell* cell = first_cell(range);
  for (int64_t i = 0; i < range.bytes / granule_; ++i, ++cell) {
    if (!read_cell(actor, reader, cell)) return explain_read(actor, range, cell);
    if (cell->content != kZeroContent)
      return "needs zeros and finds something at" + at(range, cell);
  }
  return "";
}

std::string ShadowMemory::write_zeros(const Actor& actor, const Range& range) {
  if (std::string error = check_range(range); !error.empty()) return error;
  Cell* cell = first_cell(range);
  for (int64_t i = 0; i < range.bytes / granule_; ++i, ++cell) {
    if (!write_cell(actor, range, cell, kZeroContent)) return explain_write(actor, range, cell);
  }
  return "";
}

void ShadowMemory::preset(const Range& range, uint64_t content) {
  Cell* cell = first_cell(range);
  for (int64_t i = 0; i < range.bytes / granule_; ++i, ++cell)
    cell->content = content + static_cast<uint64_t>(i);
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
