// The steps that only programs between nodes have: puts and arrivals of a rail, and sums on two
// levels.
#include <algorithm>
#include <utility>

#include "backend/engine/executor.h"
#include "transports/event_board.h"

namespace tide {
namespace {

// Behind the last segment, or a part of it where both sides go on without a gap.
void add_segment(const char* from, int64_t to_offset, int64_t bytes, std::vector<Segment>* out) {
  if (bytes == 0) return;
  if (!out->empty()) {
    Segment& last = out->back();
    if (static_cast<const char*>(last.from) + last.bytes == from &&
        last.to_offset + last.bytes == to_offset) {
      last.bytes += bytes;
      return;
    }
  }
  out->push_back({from, to_offset, bytes});
}

EventKind event_kind_of(RailEvent event) {
  switch (event) {
    case RailEvent::kHead:
      return EventKind::kHead;
    case RailEvent::kArrival:
      return EventKind::kArrival;
    case RailEvent::kConfirm:
      return EventKind::kConfirm;
    case RailEvent::kGrant:
      return EventKind::kGrant;
  }
  return EventKind::kArrival;
}

}  // namespace

Status Executor::put(const Binding& binding, const Program& program, const Step& step) {
  Put put;
  put.node = step.node;
  put.operation = rail_operation();
  put.round = step.round;
  put.part = step.part;
  put.head_bytes = step.head_bytes;
  if (step.from == Space::kLanding) {
    put.region = binding.landing.memory->region();
    add_landed(binding, program, step, &put);
  } else if (program.direction == Direction::kGather) {
    put.region = binding.slot.memory->region();
    add_shards(binding, program, step, &put);
  } else {
    put.region = binding.staging.memory->region();
    add_partial_sums(binding, program, step, &put);
  }
  int64_t bytes = 0;
  for (const Segment& segment : put.segments) bytes += segment.bytes;
  if (bytes != step.bytes) {
    return Status(ErrorKind::kInternal, "a put of " + std::to_string(bytes) +
                                            " bytes where its program counts " +
                                            std::to_string(step.bytes));
  }
  context_->bytes_sent += static_cast<uint64_t>(bytes);
  const Status begun = context_->network().put(put);
  if (begun.is_ok()) return begun;
  return explain_rail(begun, "a put of round " + std::to_string(step.round) + " to " +
                                 context_->rail_peer(step.node));
}

Status Executor::tell(int node, const Event& event, int64_t amount) {
  const Status told = context_->network().signal(node, event, amount);
  if (told.is_ok()) return told;
  return explain_rail(
      told, std::string(event_kind_name(event.kind)) + " to " + context_->rail_peer(node));
}

// Slots of all ranks are laid out alike, so a shard's place here is its place there.
void Executor::add_shards(const Binding& binding, const Program& program, const Step& step,
                          Put* put) {
  const GroupLayout& layout = *binding.layout;
  char* const slot = binding.slot.at(context_->rank());
  for (int i = 0; i < step.shards; ++i) {
    const int shard =
        program.rail_ranks[static_cast<size_t>((step.first_node + i) % program.nodes())];
    for (int j = step.first_piece; j < step.last_piece; ++j) {
      const Piece& piece = program.pieces[j];
      const int p = piece.parameter;
      const int64_t bytes = dtype_bytes(layout.parameter(p).dtype);
      const Side to{slot + layout.slot_offset(p), true, 0};
      const bool is_resident = shard == program.rank && step.from == Space::kShard;
      const Side from = is_resident ? side(binding, program, step, false, piece) : to;
      Block blocks[3];
      const int count = piece_blocks(layout, piece, shard, blocks);
      for (int b = 0; b < count; ++b) {
        for (int64_t row = 0; row < blocks[b].rows; ++row) {
          const char* at = to.at(blocks[b], bytes) + row * to.pitch(blocks[b], bytes);
          add_segment(from.at(blocks[b], bytes) + row * from.pitch(blocks[b], bytes),
                      binding.slot.offset + (at - slot), blocks[b].row_numel * bytes,
                      &put->segments);
        }
      }
    }
  }
}

// Packed slices, one for each node's shard; at the same offset in every rank's landing.
void Executor::add_landed(const Binding& binding, const Program& program, const Step& step,
                          Put* put) {
  const GroupLayout& layout = *binding.layout;
  char* const own = binding.landing.at(context_->rank());
  for (int i = 0; i < step.shards; ++i) {
    const int node = (step.first_node + i) % program.nodes();
    const int shard = program.rail_ranks[static_cast<size_t>(node)];
    const int64_t slice = slice_offset(binding, program, Space::kLanding, step.area, node);
    for (int j = step.first_piece; j < step.last_piece; ++j) {
      const Piece& piece = program.pieces[j];
      const int64_t bytes =
          moved_numel(layout, piece, shard) * dtype_bytes(layout.parameter(piece.parameter).dtype);
      add_segment(own + slice + piece.packed_offset,
                  binding.landing.offset + slice + piece.packed_offset, bytes, &put->segments);
    }
  }
}

void Executor::add_partial_sums(const Binding& binding, const Program& program, const Step& step,
                                Put* put) {
  const GroupLayout& layout = *binding.layout;
  char* const own = binding.staging.at(context_->rank());
  for (int k = 0; k < step.shards; ++k) {
    const int shard = context_->topology().rank(step.first_node, k);
    const int64_t from = slice_offset(binding, program, Space::kPartial, step.area, step.slice + k);
    const int64_t to = slice_offset(binding, program, Space::kSeat, step.area, step.to_slice + k);
    for (int j = step.first_piece; j < step.last_piece; ++j) {
      const Piece& piece = program.pieces[j];
      const int64_t bytes = moved_numel(layout, piece, shard) *
                            element_bytes(binding, program, Space::kPartial, piece.parameter);
      add_segment(own + from + piece.partial_offset,
                  binding.staging.offset + to + piece.partial_offset, bytes, &put->segments);
    }
  }
}

Status Executor::arrive(const Step& step) {
  const Event event{event_kind_of(step.event), rail_operation(), step.round, step.part};
  const bool counts_bytes = event.kind == EventKind::kHead || event.kind == EventKind::kArrival;
  return arrive(step.node, event, counts_bytes ? step.bytes : 1);
}

Status Executor::arrive(int node, const Event& event, int64_t amount) {
  Network& network = context_->network();
  if (network.count(node, event) >= amount) return Status::ok();
  OperationState* const operation = call_.operation;
  if (operation != nullptr) operation->set_rail_wait(RailWait{node, event, amount});
  const Clock::time_point begin = Clock::now();
  const Status status = network.wait(node, event, amount, rail_guard_);
  if (operation != nullptr) {
    const int local = context_->topology().local(context_->rank());
    context_->note_wait(*operation, event_kind_name(event.kind),
                        context_->topology().rank(node, local), begin);
  }
  if (!status.is_ok()) return explain_rail(status, context_->describe_event(node, event, amount));
  if (operation != nullptr) operation->set_rail_wait(std::nullopt);
  return Status::ok();
}

Result<std::vector<int64_t>> Executor::meet_nodes(const CallRecord& record, int64_t word) {
  begin({&record, nullptr, nullptr});
  Network& network = context_->network();
  const Event event{EventKind::kConfirm, rail_operation(), 0, 0};
  std::vector<int64_t> words(static_cast<size_t>(network.nodes()), word);
  for (int node = 0; node < network.nodes(); ++node) {
    if (node != network.node()) TIDE_RETURN_IF_ERROR(tell(node, event, word));
  }
  for (int node = 0; node < network.nodes(); ++node) {
    if (node == network.node()) continue;
    TIDE_RETURN_IF_ERROR(arrive(node, event, 1));
    words[static_cast<size_t>(node)] = network.count(node, event);
  }
  TIDE_RETURN_IF_ERROR(drain());
  network.end(rail_operation());
  return words;
}

Status Executor::drain() {
  const Status status = context_->network().drain(rail_operation(), rail_guard_);
  return status.is_ok() ? status : explain_rail(status, "the end of its own puts");
}

Status Executor::explain_rail(const Status& status, const std::string& what) const {
  const Status broken = context_->failure.status();
  if (!broken.is_ok()) return broken;
  const std::string call = call_.operation != nullptr
                               ? call_.operation->name()
                               : context_->agreement->describe(*call_.record);
  std::string text = context_->where() + ": " + call + ": ";
  if (status.kind() == ErrorKind::kTimeout) {
    text += "waited " + std::to_string(rail_guard_.timeout.count()) + " ms for " + what +
            "; that node is stopped, slow or has left this call out";
  } else {
    text += what + ": " + status.message();
  }
  return Status(status.kind(), std::move(text));
}

// The sources' blocks behind the total of earlier batches. Scale, output type and padding come with
// the last batch.
Status Executor::combine(const Binding& binding, const Program& program, const Step& step) {
  const GroupLayout& layout = *binding.layout;
  const int own = context_->rank();
  const bool is_last = step.to == Space::kOutput;
  const AccumulateOptions options = is_last ? binding.options : without_scale(binding.options);
  combines_.resize(static_cast<size_t>(step.last_piece - step.first_piece));
  for (int i = step.first_piece; i < step.last_piece; ++i) {
    const Piece& piece = program.pieces[i];
    const int p = piece.parameter;
    AccumulateBlock& sum = combines_[static_cast<size_t>(i - step.first_piece)];
    const auto at = [&](Space space, int area, int slice) {
      return slice_side(binding, program, space, own, area, slice, piece).base;
    };
    sum.slices.clear();
    if (step.first_number > 0) sum.slices.push_back(at(Space::kTotal, 0, step.to_slice));
    for (int source = 0; source < step.shards; ++source) {
      sum.slices.push_back(at(Space::kBlock, step.area, step.slice + source * program.locals()));
    }
    sum.numel = moved_numel(layout, piece, own);
    sum.slice_dtype = partial_dtype(binding.gradient_dtypes[p]);
    sum.output_dtype = is_last ? binding.output_dtype : sum.slice_dtype;
    sum.pad_numel = is_last ? piece.numel - sum.numel : 0;
    sum.output = is_last ? static_cast<char*>(binding.outputs[p]) +
                               piece.begin * dtype_bytes(sum.output_dtype)
                         : at(Space::kTotal, 0, step.to_slice);
    context_->bytes_summed += static_cast<uint64_t>(sum.numel * dtype_bytes(sum.slice_dtype) *
                                                    static_cast<int64_t>(sum.slices.size()));
  }
  return send_sums(step, options);
}

Status Executor::send_sums(const Step& step, const AccumulateOptions& options) {
  for (size_t first = 0; first < combines_.size(); first += batch_) {
    const size_t count = std::min(batch_, combines_.size() - first);
    TIDE_RETURN_IF_ERROR(fabric_->accumulate(static_cast<int>(step.queue), &combines_[first],
                                             static_cast<int>(count), options));
  }
  return Status::ok();
}

// Straight to the output where one batch holds all sources; else into the total, and from there
// with the last batch. Padding is written by a sum of nothing.
Status Executor::read_add(const Binding& binding, const Program& program, const Step& step) {
  if (!binding.staging.is_open_to_all())
    return Status(ErrorKind::kInternal, "a read-add, of seats that are not open to all");
  const bool is_last = step.to == Space::kOutput;
  const bool is_direct = is_last && step.first_number == 0;
  AccumulateOptions options = is_direct ? binding.options : without_scale(binding.options);
  if (!is_direct) options.add_to_output = step.first_number > 0;
  read_adds_.clear();
  combines_.clear();
  for (int i = step.first_piece; i < step.last_piece; ++i) {
    const Piece& piece = program.pieces[i];
    const int64_t numel = moved_numel(*binding.layout, piece, context_->rank());
    const int64_t output_bytes = dtype_bytes(binding.output_dtype);
    char* const output =
        static_cast<char*>(binding.outputs[piece.parameter]) + piece.begin * output_bytes;
    char* const total =
        slice_side(binding, program, Space::kTotal, context_->rank(), 0, step.to_slice, piece).base;
    const char* const seats =
        slice_side(binding, program, Space::kSeat, kAllRanks, step.area, step.slice, piece).base;
    read_adds_.push_back({is_direct ? output : total, seats, numel,
                          is_direct ? binding.output_dtype : DType::kFloat32});
    context_->bytes_summed += static_cast<uint64_t>(numel * dtype_bytes(DType::kFloat32));
    if (!is_last) continue;
    AccumulateBlock& rest = combines_.emplace_back();
    rest.slices = {total};
    rest.output = is_direct ? output + numel * output_bytes : output;
    rest.numel = is_direct ? 0 : numel;
    rest.pad_numel = piece.numel - numel;
    rest.output_dtype = binding.output_dtype;
    if (is_direct && rest.pad_numel == 0) combines_.pop_back();
  }
  ++context_->read_adds;
  for (size_t first = 0; first < read_adds_.size(); first += batch_) {
    const size_t count = std::min(batch_, read_adds_.size() - first);
    TIDE_RETURN_IF_ERROR(fabric_->read_add(static_cast<int>(step.queue), &read_adds_[first],
                                           static_cast<int>(count), options));
  }
  return send_sums(step, binding.options);
}

// Whole slices, as the zeros behind a sum of nothing.
Status Executor::zero(const Binding& binding, const Program& program, const Step& step) {
  AccumulateBlock zeros;
  zeros.output = binding.staging.at(context_->rank()) +
                 slice_offset(binding, program, step.to, step.area, step.to_slice);
  zeros.slices = {zeros.output};
  zeros.pad_numel = step.shards * program.partial_bytes / dtype_bytes(DType::kFloat32);
  return fabric_->accumulate(static_cast<int>(step.queue), &zeros, 1, {});
}

}  // namespace tide
