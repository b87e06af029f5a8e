// Where the elements of a piece lie in memory, in each space of a program. Internal to the
// executor's sources.
#pragma once

#include <algorithm>

#include "backend/engine/operation_state.h"

namespace tide {

// One side of a copy for one piece: block addresses are base + (place or shard offset - origin) *
// element bytes.
struct Side {
  char* base = nullptr;
  bool places = false;
  int64_t origin = 0;

  char* at(const Block& block, int64_t bytes) const {
    return base + ((places ? block.place_begin : block.shard_begin) - origin) * bytes;
  }
  int64_t pitch(const Block& block, int64_t bytes) const {
    return (places ? block.place_pitch : block.shard_pitch) * bytes;
  }
};

inline bool holds_partial_sums(Space space) { return space >= Space::kPartial; }

// Partial sums are fp32; of fp64 and of integers they have the gradients' own type.
inline DType partial_dtype(DType gradient) {
  const bool is_half = gradient == DType::kFloat16 || gradient == DType::kBFloat16;
  return is_half ? DType::kFloat32 : gradient;
}

// What the first of two levels does of a sum.
inline AccumulateOptions without_scale(const AccumulateOptions& options) {
  AccumulateOptions partial;
  partial.op = options.op;
  return partial;
}

inline int64_t element_bytes(const Binding& binding, const Program& program, Space space, int p) {
  if (program.direction == Direction::kGather)
    return dtype_bytes(binding.layout->parameter(p).dtype);
  const int64_t bytes = dtype_bytes(binding.gradient_dtypes[p]);
  return holds_partial_sums(space) ? std::max<int64_t>(4, bytes) : bytes;
}

// A slice of an arena space, as an offset in its range.
inline int64_t slice_offset(const Binding& binding, const Program& program, Space space, int area,
                            int slice) {
  const int64_t bytes = holds_partial_sums(space) ? program.partial_bytes : program.slice_bytes;
  return binding.space_offset[static_cast<size_t>(space)] +
         (static_cast<int64_t>(area) * program.slices(space) + slice) * bytes;
}

// A piece of a slice at `owner` (kAllRanks: of all of them): elements in shard order, from the
// piece's first one on.
inline Side slice_side(const Binding& binding, const Program& program, Space space, int owner,
                       int area, int slice, const Piece& piece) {
  const ArenaRange& range = space == Space::kLanding ? binding.landing : binding.staging;
  char* const base = owner == kAllRanks ? range.at_all() : range.at(owner);
  const int64_t in_slice = holds_partial_sums(space) ? piece.partial_offset : piece.packed_offset;
  return {base + slice_offset(binding, program, space, area, slice) + in_slice, false, piece.begin};
}

}  // namespace tide
