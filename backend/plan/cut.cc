#include "backend/plan/cut.h"

#include <algorithm>

namespace tide {

int64_t packed_bytes(const std::vector<CutItem>& items) {
  int64_t bytes = 0;
  for (const CutItem& item : items) bytes += align_piece(item.numel * item.element_bytes);
  return bytes;
}

Cut cut_chunks(const std::vector<CutItem>& items, const CutLimits& limits) {
  Cut cut;
  const int64_t total_bytes = packed_bytes(items);
  if (total_bytes == 0) return cut;
  const int64_t largest_bytes =
      std::max(kPieceAlignment, limits.largest_bytes & ~(kPieceAlignment - 1));
  const int64_t worthwhile = total_bytes / std::max<int64_t>(1, limits.smallest_bytes);
  const int64_t count = std::max({int64_t{1}, (total_bytes - 1) / largest_bytes + 1,
                                  std::min(limits.wanted_chunks, worthwhile)});
  // Rounding up cannot pass largest_bytes, itself a multiple of the alignment.
  const int64_t chunk_bytes = align_piece((total_bytes - 1) / count + 1);

  cut.pieces.reserve(items.size() + static_cast<size_t>(count));
  cut.ends.reserve(static_cast<size_t>(count));
  int64_t used_bytes = 0;   // of the current chunk
  int64_t slice_start = 0;  // of the current chunk, when all lie in one slice
  for (const CutItem& item : items) {
    for (int64_t begin = 0; begin < item.numel;) {
      const int64_t room_numel = (chunk_bytes - used_bytes) / item.element_bytes;
      const int64_t numel = std::min(item.numel - begin, room_numel);
      cut.pieces.push_back(Piece{item.parameter, begin, numel, slice_start + used_bytes});
      used_bytes += align_piece(numel * item.element_bytes);
      begin += numel;
      if (used_bytes == chunk_bytes) {
        cut.ends.push_back(static_cast<int>(cut.pieces.size()));
        if (limits.one_slice) slice_start += used_bytes;
        used_bytes = 0;
      }
    }
  }
  if (used_bytes > 0) cut.ends.push_back(static_cast<int>(cut.pieces.size()));
  return cut;
}

std::vector<Piece> whole_pieces(const std::vector<CutItem>& items) {
  std::vector<Piece> pieces;
  pieces.reserve(items.size());
  for (const CutItem& item : items) {
    if (item.numel > 0) pieces.push_back(Piece{item.parameter, 0, item.numel, 0});
  }
  return pieces;
}

}  // namespace tide
