#include "backend/plan/own_shard.h"

#include <algorithm>

namespace tide {
namespace {

bool is_cast(const Parameter& parameter) { return parameter.shard_dtype != parameter.dtype; }

}  // namespace

std::vector<CutItem> gather_items(const GroupLayout& layout) {
  std::vector<CutItem> items;
  items.reserve(static_cast<size_t>(layout.size()));
  for (int p = 0; p < layout.size(); ++p) {
    items.push_back({p, layout.parameter(p).shard_numel, dtype_bytes(layout.parameter(p).dtype)});
  }
  return items;
}

bool needs_cast(const GroupLayout& layout, const std::vector<Piece>& pieces) {
  return std::any_of(pieces.begin(), pieces.end(), [&](const Piece& piece) {
    return is_cast(layout.parameter(piece.parameter));
  });
}

void copy_own(StepWriter& steps, int last_piece, Space to) {
  Step& step = steps.move(Op::kCopy, Queue::kOwn, kSelf, 0, last_piece);
  step.shard = steps.rank();
  step.from = Space::kShard;
  step.to = to;
}

void cast_own(StepWriter& steps, const GroupLayout& layout, const std::vector<Piece>& pieces) {
  const int count = static_cast<int>(pieces.size());
  for (int first = 0, last = 0; first < count; first = last) {
    const bool cast = is_cast(layout.parameter(pieces[first].parameter));
    for (last = first; last < count && is_cast(layout.parameter(pieces[last].parameter)) == cast;)
      ++last;
    Step& step = steps.move(cast ? Op::kCast : Op::kCopy, Queue::kOwn, kSelf, first, last);
    step.shard = steps.rank();
    step.from = Space::kShard;
    step.to = Space::kSlot;
  }
}

}  // namespace tide
