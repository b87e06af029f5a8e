// The checker's memory: cells that know what they hold, who wrote it, who read it since, and when.
//
// "When" is a vector clock. Thread t's clock vector says, for every thread, how far that thread had
// come at the latest point that is known to lie before t's present. A write is safe when the last
// write and all reads since lie before it; a read is safe when the last write does. This finds a
// race even when the explored order happens to hide it.
//
// Worked example, threads 0 and 1: thread 0 writes a cell at its time 3, so the cell remembers (0,
// 3). Thread 1 reads it with clocks [2, 7]: it knows thread 0 only up to time 2, so nothing orders
// the two: a race. Had it waited for a signal that thread 0 sent at time 3, its clocks would be [3,
// 7].
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tide {

using Clocks = std::vector<uint32_t>;

// Raises every entry of `clocks` to at least that of `other`; an empty vector is all zeros.
void join_clocks(Clocks* clocks, const Clocks& other);

// Who touches memory: a thread, its clocks, and a tag that names it in canonical forms (process,
// operation).
struct Actor {
  int thread = 0;
  const Clocks* clocks = nullptr;
  uint64_t tag = 0;
};

class ShadowMemory {
 public:
  // Cells of `granule` bytes; every offset and size given to the calls below is a multiple of it.
  explicit ShadowMemory(int64_t granule) : granule_(granule) {}

  // For messages.
  void name_threads(std::vector<std::string> names) { thread_names_ = std::move(names); }

  // A region of memory, all cells unwritten (content 0). Returns its index. `in_transit`: memory
  // that bytes only pass through, so that writing a cell again before it was read is a mistake,
  // except over zeros.
  int add_region(std::string name, int64_t bytes, bool in_transit = false);

  struct Range {
    int region = -1;
    int64_t begin_bytes = 0;
    int64_t bytes = 0;
  };

  // Each returns an empty string, or what is wrong. A content is the value of the range's first
  // cell; every following cell holds one more.
  std::string read_expecting(const Actor& actor, const Range& range, uint64_t content);
  std::string write(const Actor& actor, const Range& range, uint64_t content);
  std::string copy(const Actor& actor, const Range& from, const Range& to);
  // Zeros are the same in every cell.
  std::string read_zeros(const Actor& actor, const Range& range);
  std::string write_zeros(const Actor& actor, const Range& range);

  // Contents that stand there before anything runs, ordered before everything.
  void preset(const Range& range, uint64_t content);

  // Equal for two runs in which every cell saw the same writes in the same order, with the same
  // reads between them.
  uint64_t canonical() const;

 private:
  struct Epoch {
    int thread = -1;
    uint32_t time = 0;
  };
  struct Cell {
    uint64_t content = 0;
    uint64_t history = 0;    // of everything up to the last write
    uint64_t reads_sum = 0;  // of the readers since, in any order
    Epoch written;
    Epoch read;            // the only reader since the last write, or the first of several
    int other_reads = -1;  // index into other_reads_, once there were several
  };
  struct Region {
    std::string name;
    std::vector<Cell> cells;
    bool in_transit = false;
  };

  std::string check_range(const Range& range) const;
  std::string race(const char* what, const Range& range, const Cell* cell, const Actor& actor,
                   Epoch earlier) const;
  std::string explain_read(const Actor& actor, const Range& range, const Cell* cell) const;
  std::string explain_write(const Actor& actor, const Range& range, const Cell* cell) const;
  std::string at(const Range& range, const Cell* cell) const;
  // False when it is not safe; explain_... says why.
  bool read_cell(const Actor& actor, uint64_t reader, Cell* cell);
  bool write_cell(const Actor& actor, const Range& range, Cell* cell, uint64_t content);
  bool is_lost(const Range& range, const Cell& cell) const;
  static bool ordered(const Actor& actor, Epoch earlier) {
    return earlier.thread < 0 || (*actor.clocks)[earlier.thread] >= earlier.time;
  }
  Cell* first_cell(const Range& range) {
    return regions_[range.region].cells.data() + range.begin_bytes / granule_;
  }
  std::string thread_name(int thread) const;

  int64_t granule_;
  std::vector<std::string> thread_names_;
  std::vector<Region> regions_;
  std::vector<std::vector<Epoch>> other_reads_;
};

}  // namespace tide
