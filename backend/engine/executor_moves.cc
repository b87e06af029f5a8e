// The steps that move and add: ranges of pieces become blocks of memory, in batches.
#include <algorithm>
#include <utility>

#include "backend/engine/executor.h"
#include "backend/engine/executor_places.h"

namespace tide {
Side Executor::side(const Binding& binding, const Program& program, const Step& step, bool is_to,
                    const Piece& piece) const {
  const Space space = is_to ? step.to : step.from;
  const int rank = is_to && step.peer != kSelf ? step.peer : context_->rank();
  const int p = piece.parameter;
  switch (space) {
    case Space::kShard:
      return {static_cast<char*>(const_cast<void*>(binding.shards[p])), false, 0};
    case Space::kSlot:
      return {(rank == kAllRanks ? binding.slot.at_all() : binding.slot.at(rank)) +
                  binding.layout->slot_offset(p),
              true, 0};
    case Space::kGradient:
      return {static_cast<char*>(const_cast<void*>(binding.gradients[p])), true, 0};
    case Space::kOutput: {
      char* base = rank == context_->rank()
                       ? static_cast<char*>(binding.outputs[p])
                       : peer_outputs_[static_cast<size_t>(rank) * binding.layout->size() + p];
      return {base, program.direction == Direction::kGather, 0};
    }
    case Space::kStaging:
    case Space::kLanding:
      return slice_side(binding, program, space, rank, step.area, step.slice, piece);
    case Space::kPartial:
    case Space::kSeat:
    case Space::kBlock:
    case Space::kTotal:
      return slice_side(binding, program, space, rank, step.area,
                        is_to ? step.to_slice : step.slice, piece);
  }
  return {};
}

Status Executor::copy(const Binding& binding, const Program& program, const Step& step) {
  const GroupLayout& layout = *binding.layout;
  if (step.peer == kAllRanks && !binding.slot.is_open_to_all())
    return Status(ErrorKind::kInternal, "a copy to all ranks, of a slot that is not open to all");
  const int owner = step.peer == kSelf ? context_->rank() : step.peer;
  const int queue = static_cast<int>(step.queue);
  uint64_t moved = 0;
  copies_.clear();
  for (int i = step.first_piece; i < step.last_piece; ++i) {
    const Piece& piece = program.pieces[i];
    Block blocks[3];
    const int count = piece_blocks(layout, piece, step.shard, blocks);
    if (count == 0) continue;
    const Side from = side(binding, program, step, false, piece);
    const Side to = side(binding, program, step, true, piece);
    const int64_t bytes = element_bytes(binding, program, step.from, piece.parameter);
    for (int b = 0; b < count; ++b) {
      const Block& block = blocks[b];
      copies_.push_back({to.at(block, bytes), from.at(block, bytes), block.rows,
                         block.row_numel * bytes, to.pitch(block, bytes),
                         from.pitch(block, bytes)});
      moved += static_cast<uint64_t>(block.rows * block.row_numel * bytes);
    }
    if (copies_.size() + 3 > batch_) {
      TIDE_RETURN_IF_ERROR(fabric_->copy(queue, copies_.data(), static_cast<int>(copies_.size())));
      copies_.clear();
    }
  }
  if (!copies_.empty()) {
    TIDE_RETURN_IF_ERROR(fabric_->copy(queue, copies_.data(), static_cast<int>(copies_.size())));
  }
  if (step.peer == kAllRanks) ++context_->copies_to_all;
  (owner == context_->rank() ? context_->bytes_copied : context_->bytes_pushed) += moved;
  return Status::ok();
}

Status Executor::cast(const Binding& binding, const Program& program, const Step& step) {
  const GroupLayout& layout = *binding.layout;
  const int queue = static_cast<int>(step.queue);
  uint64_t written = 0;
  casts_.clear();
  for (int i = step.first_piece; i < step.last_piece; ++i) {
    const Piece& piece = program.pieces[i];
    const Parameter& parameter = layout.parameter(piece.parameter);
    const int64_t to_bytes = dtype_bytes(parameter.dtype);
    const int64_t from_bytes = dtype_bytes(parameter.shard_dtype);
    char* slot = binding.slot.at(context_->rank()) + layout.slot_offset(piece.parameter);
    const char* shard = static_cast<const char*>(binding.shards[piece.parameter]);
    Block blocks[3];
    const int count = piece_blocks(layout, piece, step.shard, blocks);
    for (int b = 0; b < count; ++b) {
      const Block& block = blocks[b];
      for (int64_t row = 0; row < block.rows; ++row) {
        casts_.push_back({slot + (block.place_begin + row * block.place_pitch) * to_bytes,
                          shard + (block.shard_begin + row * block.shard_pitch) * from_bytes,
                          block.row_numel, parameter.dtype, parameter.shard_dtype});
        if (casts_.size() < batch_) continue;
        TIDE_RETURN_IF_ERROR(fabric_->cast(queue, casts_.data(), static_cast<int>(casts_.size())));
        casts_.clear();
      }
      written += static_cast<uint64_t>(block.rows * block.row_numel * to_bytes);
    }
  }
  if (!casts_.empty()) {
    TIDE_RETURN_IF_ERROR(fabric_->cast(queue, casts_.data(), static_cast<int>(casts_.size())));
  }
  context_->bytes_copied += written;
  return Status::ok();
}

// The sources' slices in their order, the own one straight from the gradient. Between nodes this is
// the first of two levels: the sources are the node's ranks, and scale, output type and padding
// come with the second (combine).
Status Executor::accumulate(const Binding& binding, const Program& program, const Step& step) {
  const GroupLayout& layout = *binding.layout;
  const int own = context_->rank();
  const bool is_partial = step.to != Space::kOutput;
  const int sources = program.locals();
  const int own_source = is_partial ? context_->topology().local(own) : own;
  const AccumulateOptions options = is_partial ? without_scale(binding.options) : binding.options;
  size_t used = 0;  // of sums_, whose blocks keep their slices' memory
  uint64_t summed = 0;
  const auto flush = [&] {
    const size_t count = std::exchange(used, 0);
    if (count == 0) return Status::ok();
    return fabric_->accumulate(static_cast<int>(step.queue), sums_.data(), static_cast<int>(count),
                               options);
  };
  for (int i = step.first_piece; i < step.last_piece; ++i) {
    const Piece& piece = program.pieces[i];
    const int p = piece.parameter;
    const int64_t moved = moved_numel(layout, piece, step.shard);
    const int64_t padding = is_partial ? 0 : piece.numel - moved;
    const DType slice_dtype = binding.gradient_dtypes[p];
    const int64_t slice_bytes = dtype_bytes(slice_dtype);
    const int64_t output_bytes = is_partial ? element_bytes(binding, program, step.to, p)
                                            : dtype_bytes(binding.output_dtype);
    const char* gradient = static_cast<const char*>(binding.gradients[p]);
    const Side output = side(binding, program, step, true, piece);
    Block blocks[3];
    int count = piece_blocks(layout, piece, step.shard, blocks);
    if (count == 0 && padding > 0) blocks[count++] = Block{piece.begin, 0, 1, 0, 0, 0};
    for (int b = 0; b < count; ++b) {
      for (int64_t row = 0; row < blocks[b].rows; ++row) {
        if (used == sums_.size()) sums_.emplace_back();
        AccumulateBlock& sum = sums_[used++];
        const int64_t shard_begin = blocks[b].shard_begin + row * blocks[b].shard_pitch;
        const int64_t place_begin = blocks[b].place_begin + row * blocks[b].place_pitch;
        sum.slices.resize(static_cast<size_t>(sources));
        for (int source = 0; source < sources; ++source) {
          sum.slices[static_cast<size_t>(source)] =
              source == own_source ? gradient + place_begin * slice_bytes
                                   : slice_side(binding, program, Space::kStaging, own, step.area,
                                                step.slice + source, piece)
                                             .base +
                                         (shard_begin - piece.begin) * slice_bytes;
        }
        sum.output = output.base + (shard_begin - output.origin) * output_bytes;
        sum.numel = blocks[b].row_numel;
        sum.pad_numel = b + 1 == count && row + 1 == blocks[b].rows ? padding : 0;
        sum.slice_dtype = slice_dtype;
        sum.output_dtype = is_partial ? partial_dtype(slice_dtype) : binding.output_dtype;
        if (used == batch_) TIDE_RETURN_IF_ERROR(flush());
      }
    }
    summed += static_cast<uint64_t>(moved * slice_bytes * sources);
  }
  TIDE_RETURN_IF_ERROR(flush());
  context_->bytes_summed += summed;
  return Status::ok();
}

}  // namespace tide
