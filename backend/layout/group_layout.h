// What lies where in one group: its parameters, their shards, and the place of every shard in the
// unsharded parameter. Pure arithmetic on element counts; knows no memory, no ranks' processes and
// no torch.
//
// Three orders of the same elements:
//   shard order   the rank's shards one after another, parameter by parameter (what a reduce
//                 produces, what stock's flat reduce-scatter output holds). Offsets in elements:
//                 shard_offset(p) + i.
//   place         where shard r of parameter p lies inside the unsharded parameter p. Dimension 0:
//                 one run that starts at r * shard_numel. Dimension k: `rows` runs of row_numel
//                 elements, run j at j * ranks * row_numel + r * row_numel.
//   slot          the unsharded parameters of the group one after another, each at a multiple of
//                 512 bytes.
//
// Worked example (the paper's): 3 parameters whose shards are 2, 1 and 3 MB on each of 4 ranks.
// Rank 1's shard of parameter 2 lies at 1 * 6 + 2 = 8 MB in an output ordered by rank, and at
// 2 * 4 + 1 * 1 = 9 MB in the slot.
//
// Immutable after construction; safe to share between threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/base/dtype.h"

namespace tide {

inline constexpr int64_t kPlaceAlignment = 512;  // bytes; what torch's allocator gives

inline int64_t aligned_place_bytes(int64_t bytes) {
  return (bytes + kPlaceAlignment - 1) / kPlaceAlignment * kPlaceAlignment;
}

// One parameter of a group, or one (output, input) pair of a coalesced call.
struct Parameter {
  std::string name;             // for messages
  DType dtype = DType::kBytes;  // of the unsharded parameter
  int64_t shard_numel = 0;      // padded: equal on all ranks
  int64_t unsharded_numel = 0;  // without padding; at most ranks * shard_numel
  int64_t rows = 1;             // runs of one shard in the unsharded parameter; 1 for dimension 0
  DType shard_dtype = DType::kBytes;  // of the resident shard; not dtype where a gather casts
};

// A rectangle of elements that a copy between shard order and place moves: `rows` runs of row_numel
// elements. shard_begin counts from the shard's first element, place_begin from the unsharded
// parameter's.
struct Block {
  int64_t shard_begin = 0;
  int64_t place_begin = 0;
  int64_t rows = 0;
  int64_t row_numel = 0;
  int64_t shard_pitch = 0;  // elements between runs in shard order
  int64_t place_pitch = 0;  // elements between runs in the unsharded parameter
};

class GroupLayout {
 public:
  // Checks its arguments: empty string when they describe a layout, else one sentence that names
  // the parameter, wanted and got. ranks >= 1; numels >= 0; rows >= 1 divides shard_numel; rows > 1
  // only without padding; every product fits 63 bits.
  static std::string check(const std::vector<Parameter>& parameters, int ranks);

  // check() must have returned an empty string.
  GroupLayout(std::vector<Parameter> parameters, int ranks);

  int ranks() const { return ranks_; }
  int size() const { return static_cast<int>(parameters_.size()); }
  const Parameter& parameter(int p) const { return parameters_[p]; }
  const std::vector<Parameter>& parameters() const { return parameters_; }

  // Elements of parameter p's shard before its padding on `rank`; 0..shard_numel.
  int64_t valid_numel(int p, int rank) const;

  // Elements before parameter p in shard order; shard_offset(size()) = shard_numel().
  int64_t shard_offset(int p) const { return shard_offsets_[p]; }
  int64_t shard_numel() const { return shard_offsets_.back(); }

  // Byte offset of unsharded parameter p in the slot (a multiple of kPlaceAlignment), and the
  // slot's bytes.
  int64_t slot_offset(int p) const { return slot_offsets_[p]; }
  int64_t slot_bytes() const { return slot_offsets_.back(); }

  // Sum over parameters of padded shard bytes in dtype; times (ranks - 1) is the most a gather
  // moves into each rank (padding is never moved).
  int64_t shard_bytes() const { return shard_bytes_; }

  // Elements [begin, begin + numel) of rank's shard of p, as at most three rectangles (a head that
  // starts inside a run, whole runs, a tail that ends inside one), in shard order. Writes them to
  // `blocks`, returns how many (0..3).
  int blocks(int p, int rank, int64_t begin, int64_t numel, Block blocks[3]) const;

  // Equal layouts, equal hashes, on every machine: covers numels, rows, dtypes, ranks and order,
  // not names.
  uint64_t hash() const { return hash_; }

 private:
  std::vector<Parameter> parameters_;
  int ranks_;
  std::vector<int64_t> shard_offsets_;
  std::vector<int64_t> slot_offsets_;
  int64_t shard_bytes_ = 0;
  uint64_t hash_ = 0;
};

}  // namespace tide
