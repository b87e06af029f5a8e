// What each step and each script item does to shadow memory; checker_memory.cc says where things
// lie.
#include <algorithm>

#include "backend/plan/checker_memory.h"

namespace tide {

CheckerMemory::Place CheckerMemory::place(const Run& run, Space space, int rank) const {
  const CheckedOperation& checked = operation(run.operation);
  const Binding& binding = bindings_[run.operation];
  const int p = run.piece->parameter;
  const int process = process_of(run.operation, rank);
  const int64_t bytes = binding.element_bytes[p];
  const bool reduce = is_reduce(run.operation);
  switch (space) {
    case Space::kShard: {
      const int64_t shard_bytes = dtype_bytes(checked.layout->parameter(p).shard_dtype);
      return {region(Kind::kShards, process, checked.group, checked.shards),
              binding.shard_offsets[p] + run.block.shard_begin * shard_bytes,
              run.block.shard_pitch * shard_bytes};
    }
    case Space::kStaging:
    case Space::kLanding: {
      const int64_t slice = int64_t{run.step->area} * run.program->slices(space) + run.step->slice;
      const int64_t begin = slice * run.program->slice_bytes + run.piece->packed_offset +
                            (run.block.shard_begin - run.piece->begin) * bytes;
      const int memory =
          space == Space::kLanding ? region(Kind::kLanding, process, checked.group, 0)
          : leased(run.operation)  ? region(Kind::kSlot, process, checked.group, checked.slot)
                                   : region(Kind::kStaging, process, checked.group, 0);
      return {memory, begin, run.block.shard_pitch * bytes};
    }
    case Space::kPartial:
    case Space::kSeat:
    case Space::kBlock:
    case Space::kTotal:
      return is_node_reduce(run.operation) ? partial_place(run, space, process) : Place{};
    case Space::kOutput:
      if (reduce) {
        return {region(Kind::kOutputs, process, checked.group, checked.outputs),
                binding.summed_offsets[p] + run.block.shard_begin * bytes,
                run.block.shard_pitch * bytes};
      }
      break;
    case Space::kSlot:
      if (checked.slot < 0 || reduce) return {};
      break;
    case Space::kGradient:
      if (!reduce) return {};
      break;
  }
  Place found = unsharded_place(run.operation, rank, p);
  found.begin_bytes += run.block.place_begin * bytes;
  found.pitch_bytes = run.block.place_pitch * bytes;
  return found;
}

std::string CheckerMemory::copy_block(const Actor& actor, const Run& run, int rank,
                                      int target_rank) {
  const Step& step = *run.step;
  const int64_t row_bytes = run.block.row_numel * moved_element_bytes(run);
  const Place from = place(run, step.from, rank);
  const Place to = place(run, step.to, target_rank);
  if (step.peer == kAllRanks && step.to != Space::kSlot) return "stores to all, but not in slots";
  // A store to all, of what lies in the own slot: there it is a read.
  if (step.peer == kAllRanks && from.region == to.region && from.begin_bytes == to.begin_bytes)
    return "";
  for (int64_t row = 0; row < run.block.rows; ++row) {
    std::string error =
        shadow_.copy(actor, {from.region, from.begin_bytes + row * from.pitch_bytes, row_bytes},
                     {to.region, to.begin_bytes + row * to.pitch_bytes, row_bytes});
    if (!error.empty()) return error;
  }
  const int64_t bytes = run.block.rows * row_bytes;
  if (target_rank != rank) {
    pushed_bytes_[process_of(run.operation, rank)] += bytes;
    amounts_[run.operation][target_rank].arrived_bytes += bytes;
  }
  if (step.from == Space::kGradient) amounts_[run.operation][rank].gradient_bytes += bytes;
  if (step.to == Space::kSlot || step.to == Space::kOutput) {
    amounts_[run.operation][target_rank].result_bytes += bytes;
  }
  return "";
}

std::string CheckerMemory::cast_block(const Actor& actor, const Run& run, int rank) {
  const int p = run.piece->parameter;
  const Parameter& parameter = operation(run.operation).layout->parameter(p);
  if (parameter.dtype == parameter.shard_dtype) return "casts a parameter that needs no cast";
  const int64_t bytes = dtype_bytes(parameter.dtype);
  const int64_t shard_bytes = dtype_bytes(parameter.shard_dtype);
  const Place from = place(run, Space::kShard, rank);
  const Place to = place(run, run.step->to, rank);
  const uint64_t resident =
      shard_content(run.operation, rank, p, bindings_[run.operation].shard_version);
  const uint64_t cast = gathered_content(run.operation, rank, p);
  for (int64_t row = 0; row < run.block.rows; ++row) {
    const int64_t element = run.block.shard_begin + row * run.block.shard_pitch;
    std::string error = shadow_.read_expecting(
        actor,
        {from.region, from.begin_bytes + row * from.pitch_bytes, run.block.row_numel * shard_bytes},
        resident + cells(element * shard_bytes));
    if (error.empty()) {
      error = shadow_.write(
          actor, {to.region, to.begin_bytes + row * to.pitch_bytes, run.block.row_numel * bytes},
          cast + cells(element * bytes));
    }
    if (!error.empty()) return error;
  }
  amounts_[run.operation][rank].result_bytes += run.block.rows * run.block.row_numel * bytes;
  return "";
}

std::string CheckerMemory::accumulate_block(const Actor& actor, const Run& run, int rank) {
  const int p = run.piece->parameter;
  const int64_t bytes = bindings_[run.operation].element_bytes[p];
  const int64_t row_bytes = run.block.row_numel * bytes;
  const Place own = place(run, Space::kGradient, rank);
  const Place output = place(run, Space::kOutput, rank);
  Step slice_of_source = *run.step;
  Run source = run;
  source.step = &slice_of_source;
  for (int r = 0; r < run.program->ranks; ++r) {
    slice_of_source.slice = r;
    const Place slice = r == rank ? own : place(source, Space::kStaging, rank);
    for (int64_t row = 0; row < run.block.rows; ++row) {
      const int64_t place_bytes = (run.block.place_begin + row * run.block.place_pitch) * bytes;
      std::string error = shadow_.read_expecting(
          actor, {slice.region, slice.begin_bytes + row * slice.pitch_bytes, row_bytes},
          gradient_content(run.operation, r, p) + cells(place_bytes));
      if (!error.empty()) return "slice of rank " + std::to_string(r) + ": " + error;
    }
  }
  for (int64_t row = 0; row < run.block.rows; ++row) {
    const int64_t shard_bytes = (run.block.shard_begin + row * run.block.shard_pitch) * bytes;
    std::string error = shadow_.write(
        actor, {output.region, output.begin_bytes + row * output.pitch_bytes, row_bytes},
        summed_content(run.operation, rank, p) + cells(shard_bytes));
    if (!error.empty()) return error;
  }
  amounts_[run.operation][rank].gradient_bytes += run.block.rows * row_bytes;
  amounts_[run.operation][rank].result_bytes += run.block.rows * row_bytes;
  return "";
}

std::string CheckerMemory::zero_padding(const Actor& actor, const Run& run, int rank) {
  const int p = run.piece->parameter;
  const int64_t bytes = bindings_[run.operation].element_bytes[p];
  const int64_t valid = operation(run.operation).layout->valid_numel(p, rank);
  const int64_t begin = std::max(run.piece->begin, valid);
  const int64_t numel = run.piece->begin + run.piece->numel - begin;
  if (numel <= 0) return "";
  Run padding = run;
  padding.block = {begin, 0, 1, numel, numel, numel};
  const Place output = place(padding, Space::kOutput, rank);
  amounts_[run.operation][rank].result_bytes += numel * bytes;
  return shadow_.write(actor, {output.region, output.begin_bytes, numel * bytes},
                       padding_content(run.operation, rank, p) + cells(begin * bytes));
}

std::string CheckerMemory::run_piece(const Actor& actor, Run run, int rank,
                                     const std::vector<int>& targets) {
  const CheckedOperation& checked = operation(run.operation);
  const Step& step = *run.step;
  const Parameter& parameter = checked.layout->parameter(run.piece->parameter);
  if (run.piece->begin < 0 || run.piece->numel < 0 ||
      run.piece->begin + run.piece->numel > parameter.shard_numel) {
    return "names elements outside the shard";
  }
  if (step.op == Op::kCopy && step.from == Space::kShard &&
      parameter.dtype != parameter.shard_dtype) {
    return "copies a shard that needs a cast";
  }
  Block blocks[3];
  const int count = piece_blocks(*checked.layout, *run.piece, step.shard, blocks);
  for (int b = 0; b < count; ++b) {
    run.block = blocks[b];
    std::string error;
    if (step.op == Op::kCast) error = cast_block(actor, run, rank);
    if (step.op == Op::kCombine || step.op == Op::kReadAdd) error = combine_block(actor, run, rank);
    if (step.op == Op::kAccumulate) {
      error = step.to == Space::kOutput ? accumulate_block(actor, run, rank)
                                        : accumulate_partial(actor, run, rank);
    }
    for (size_t t = 0; t < targets.size() && error.empty() && step.op == Op::kCopy; ++t) {
      error = copy_block(actor, run, rank, targets[t]);
    }
    if (!error.empty()) return error;
  }
  const bool sums =
      step.op == Op::kAccumulate || step.op == Op::kCombine || step.op == Op::kReadAdd;
  return sums && step.to == Space::kOutput ? zero_padding(actor, run, rank) : "";
}

std::string CheckerMemory::run(const Actor& actor, int index, int rank, const Step& step) {
  const Program& program = *operation(index).programs[rank];
  if (step.op == Op::kZero) return zero_slices(actor, index, rank, step);
  const int pieces = static_cast<int>(program.pieces.size());
  if (step.first_piece < 0 || step.last_piece > pieces) return "names pieces that do not exist";
  if (step.shard < 0 || step.shard >= program.ranks) return "names a shard that does not exist";
  const bool keeps = step.op == Op::kCombine || step.op == Op::kReadAdd ||
                     (step.op == Op::kAccumulate && step.to == Space::kOutput);
  if ((step.from == Space::kShard || keeps) && step.shard != rank) {
    return "takes another rank's shard from its own memory";
  }
  const std::vector<int> targets = targets_of(program, step.peer);
  for (int i = step.first_piece; i < step.last_piece; ++i) {
    std::string error =
        run_piece(actor, {index, &program, &step, &program.pieces[i], {}}, rank, targets);
    if (!error.empty()) return error;
  }
  return "";
}

std::string CheckerMemory::use_gathered(const Actor& actor, int index, int rank) {
  const GroupLayout& layout = *operation(index).layout;
  for (int p = 0; p < layout.size(); ++p) {
    const int64_t bytes = bindings_[index].element_bytes[p];
    const Place found = unsharded_place(index, rank, p);
    for (int r = 0; r < layout.ranks(); ++r) {
      Block blocks[3];
      const int count = layout.blocks(p, r, 0, layout.valid_numel(p, r), blocks);
      for (int b = 0; b < count; ++b) {
        for (int64_t row = 0; row < blocks[b].rows; ++row) {
          const int64_t at = (blocks[b].place_begin + row * blocks[b].place_pitch) * bytes;
          const int64_t element = blocks[b].shard_begin + row * blocks[b].shard_pitch;
          std::string error = shadow_.read_expecting(
              actor, {found.region, found.begin_bytes + at, blocks[b].row_numel * bytes},
              gathered_content(index, r, p) + cells(element * bytes));
          if (!error.empty()) return error;
        }
      }
    }
  }
  return "";
}

std::string CheckerMemory::write_gradients(const Actor& actor, int index, int rank) {
  const CheckedOperation& checked = operation(index);
  const int memory = region(Kind::kGradients, process_of(index, rank), 0, checked.gradients);
  for (int p : checked.subset) {
    const int64_t bytes =
        checked.layout->parameter(p).unsharded_numel * bindings_[index].element_bytes[p];
    std::string error = shadow_.write(actor, {memory, bindings_[index].gradient_offsets[p], bytes},
                                      gradient_content(index, rank, p));
    if (!error.empty()) return error;
  }
  return "";
}

std::string CheckerMemory::move_gradients(const Actor& actor, int index, int rank) {
  const CheckedOperation& checked = operation(index);
  const int memory = region(Kind::kGradients, process_of(index, rank), 0, checked.gradients);
  for (int p : checked.subset) {
    const int64_t bytes =
        checked.layout->parameter(p).unsharded_numel * bindings_[index].element_bytes[p];
    const Place to = unsharded_place(index, rank, p);
    std::string error = shadow_.copy(actor, {memory, bindings_[index].gradient_offsets[p], bytes},
                                     {to.region, to.begin_bytes, bytes});
    if (!error.empty()) return error;
  }
  return "";
}

std::string CheckerMemory::read_summed(const Actor& actor, int index, int rank) {
  const CheckedOperation& checked = operation(index);
  const int memory =
      region(Kind::kOutputs, process_of(index, rank), checked.group, checked.outputs);
  for (int p : checked.subset) {
    const int64_t bytes = bindings_[index].element_bytes[p];
    const int64_t begin = bindings_[index].summed_offsets[p];
    const int64_t valid = checked.layout->valid_numel(p, rank);
    const int64_t padding = checked.layout->parameter(p).shard_numel - valid;
    std::string error = shadow_.read_expecting(actor, {memory, begin, valid * bytes},
                                               summed_content(index, rank, p));
    if (error.empty()) {
      error = shadow_.read_expecting(actor, {memory, begin + valid * bytes, padding * bytes},
                                     padding_content(index, rank, p) + cells(valid * bytes));
    }
    if (!error.empty()) return error;
  }
  return "";
}

std::string CheckerMemory::update_shards(const Actor& actor, int index, int rank) {
  const CheckedOperation& checked = operation(index);
  const int memory = region(Kind::kShards, process_of(index, rank), checked.group, checked.shards);
  for (int p = 0; p < checked.layout->size(); ++p) {
    const Parameter& parameter = checked.layout->parameter(p);
    std::string error =
        shadow_.write(actor,
                      {memory, bindings_[index].shard_offsets[p],
                       parameter.shard_numel * dtype_bytes(parameter.shard_dtype)},
                      shard_content(index, rank, p, bindings_[index].shard_version + 1));
    if (!error.empty()) return error;
  }
  return "";
}

}  // namespace tide
