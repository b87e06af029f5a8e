// Cuts shards into pieces and chunks: what bounced gathers and reduces push at a time.
//
// Worked example, chunks of 128 bytes, two fp32 parameters of 40 and 10 elements (160 and 40 bytes,
// packed 192 + 64):
//   chunk 0: [p0: 0..32 at 0]                 128 bytes
//   chunk 1: [p0: 32..40 at 0] [p1: 0..10 at 64]  104 bytes
// Every piece starts at a multiple of 64 bytes in its chunk's slice; a parameter is cut only at
// such a multiple, so cutting never adds padding.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/plan/program.h"

namespace tide {

inline constexpr int64_t kPieceAlignment = 64;  // bytes

inline int64_t align_piece(int64_t bytes) {
  return (bytes + kPieceAlignment - 1) & ~(kPieceAlignment - 1);
}

// One parameter's whole padded shard, in the type in which it travels.
struct CutItem {
  int parameter = 0;
  int64_t numel = 0;
  int64_t element_bytes = 1;  // divides 64
};

struct Cut {
  std::vector<Piece> pieces;
  std::vector<int> ends;  // chunk c holds pieces [c == 0 ? 0 : ends[c - 1], ends[c])

  int chunks() const { return static_cast<int>(ends.size()); }
  int first(int chunk) const { return chunk == 0 ? 0 : ends[chunk - 1]; }
};

// Packed bytes of all items in one slice.
int64_t packed_bytes(const std::vector<CutItem>& items);

// Nearly equal chunks of at most largest_bytes (rounded down to a multiple of 64, at least 64), at
// least `wanted_chunks` of them when each still has smallest_bytes. Offsets start anew in each
// chunk, unless `one_slice`: then all chunks lie behind each other. No chunk without items.
struct CutLimits {
  int64_t largest_bytes = 0;
  int64_t smallest_bytes = 1;
  int64_t wanted_chunks = 1;
  bool one_slice = false;
};
Cut cut_chunks(const std::vector<CutItem>& items, const CutLimits& limits);

// One piece per item that has elements; no packed offsets.
std::vector<Piece> whole_pieces(const std::vector<CutItem>& items);

}  // namespace tide
