// What the steps between nodes do, and what is demanded of them.
//
// Worked example: rank 0 puts 8 bytes to node 1 with a head of 2 and goes on. The put's own thread
// takes over what rank 0 knew when it posted, reads and writes 2 bytes, and counts the head:
// whoever waits for the head may read these 2 bytes, and no others. At any later time it moves the
// other 6 and counts the arrival. Rank 0's drain waits for that; only behind it may rank 0's source
// change.
#include <algorithm>

#include "backend/plan/checker_runner.h"
#include "backend/plan/seats.h"

namespace tide {

std::vector<int> targets_of(const Program& program, int peer) {
  if (peer == kSelf) return {program.rank};
  if (peer >= 0 && peer < program.ranks && program.is_local(peer)) return {peer};
  std::vector<int> targets;
  if (peer != kAllPeers && peer != kAllRanks) return targets;
  const auto add = [&](int rank) {
    if (peer == kAllRanks || rank != program.rank) targets.push_back(rank);
  };
  for (int rank = 0; rank < program.ranks && program.node_ranks.empty(); ++rank) add(rank);
  for (int rank : program.node_ranks) add(rank);
  return targets;
}

// The rank whose shard the put's k-th shard (or block) is.
int CheckerMemory::put_shard(int index, int rank, const Step& step, int k) const {
  const Program& program = *operation(index).programs[rank];
  if (step.from != Space::kPartial)
    return program.rail_ranks[(step.first_node + k) % program.nodes()];
  return operation(index).programs[program.rail_ranks[step.node]]->node_ranks[k];
}

int64_t CheckerMemory::moved_element_bytes(const Run& run) const {
  const int p = run.piece->parameter;
  return run.step->from >= Space::kPartial ? partial_element_bytes(run.operation, p)
                                           : bindings_[run.operation].element_bytes[p];
}

int64_t CheckerMemory::put_bytes(int index, int rank, const Step& step) const {
  const Program& program = *operation(index).programs[rank];
  int64_t bytes = 0;
  for (int k = 0; k < step.shards; ++k) {
    const int shard = put_shard(index, rank, step, k);
    for (int i = step.first_piece; i < step.last_piece; ++i) {
      const Piece& piece = program.pieces[i];
      bytes += moved_numel(*operation(index).layout, piece, shard) *
               moved_element_bytes({index, &program, &step, &piece, {}});
    }
  }
  return bytes;
}

std::string CheckerMemory::land(const Actor& actor, int index, int rank, const Step& step,
                                int64_t begin, int64_t end) {
  const Program& program = *operation(index).programs[rank];
  const GroupLayout& layout = *operation(index).layout;
  const int target = program.rail_ranks[step.node];
  int64_t at = 0;  // of the current row, in the put
  for (int k = 0; k < step.shards; ++k) {
    const int shard = put_shard(index, rank, step, k);
    const bool partial = step.from == Space::kPartial;
    Step of_block = step;
    of_block.slice += k;
    of_block.to_slice += k;
    if (step.to == Space::kLanding) of_block.slice = (step.first_node + k) % program.nodes();
    for (int i = step.first_piece; i < step.last_piece; ++i) {
      Run run{index, &program, &of_block, &program.pieces[i], {}};
      const Parameter& parameter = layout.parameter(run.piece->parameter);
      const Space from_space = shard == rank || partial ? step.from : step.to;
      if (from_space == Space::kShard && parameter.dtype != parameter.shard_dtype)
        return "puts a shard that needs a cast";
      Block blocks[3];
      const int count = piece_blocks(layout, *run.piece, shard, blocks);
      for (int b = 0; b < count; ++b) {
        run.block = blocks[b];
        const Place from = place(run, from_space, rank);
        const Place to = place(run, step.to, target);
        const int64_t row_bytes = run.block.row_numel * moved_element_bytes(run);
        for (int64_t row = 0; row < run.block.rows; ++row, at += row_bytes) {
          const int64_t first = std::max<int64_t>(0, begin - at);
          const int64_t bytes = std::min(row_bytes, end - at) - first;
          if (bytes <= 0) continue;
          std::string error = shadow_.copy(
              actor, {from.region, from.begin_bytes + row * from.pitch_bytes + first, bytes},
              {to.region, to.begin_bytes + row * to.pitch_bytes + first, bytes});
          if (!error.empty()) return error;
        }
      }
    }
  }
  rail_bytes_[process_of(index, rank)] += end - begin;
  Amount& amount = amounts_[index][target];
  amount.arrived_bytes += end - begin;
  amount.rail_bytes += end - begin;
  if (step.to == Space::kSlot) amount.result_bytes += end - begin;
  return "";
}

CheckerMemory::Place CheckerMemory::partial_place(const Run& run, Space space, int process) const {
  const bool to = space == run.step->to || space == Space::kTotal;
  const int slices = run.program->slices(space);
  const int in_area = to ? run.step->to_slice : run.step->slice;
  if (in_area < 0 || in_area >= slices) return {};
  const int64_t area = space == Space::kTotal ? 0 : run.step->area;
  const int64_t bytes = partial_element_bytes(run.operation, run.piece->parameter);
  const Kind kind = space == Space::kPartial ? Kind::kPartial
                    : space == Space::kSeat  ? Kind::kSeats
                    : space == Space::kBlock ? Kind::kBlocks
                                             : Kind::kTotals;
  return {region(kind, process, operation(run.operation).group, 0),
          (area * slices + in_area) * run.program->partial_bytes + run.piece->partial_offset +
              (run.block.shard_begin - run.piece->begin) * bytes,
          run.block.shard_pitch * bytes};
}

// The slices of the node's ranks, local by local, and the own gradient in its turn.
std::string CheckerMemory::accumulate_partial(const Actor& actor, const Run& run, int rank) {
  const int p = run.piece->parameter;
  const int64_t bytes = bindings_[run.operation].element_bytes[p];
  const int64_t partial_bytes = partial_element_bytes(run.operation, p);
  Step of_source = *run.step;
  Run source = run;
  source.step = &of_source;
  for (int local = 0; local < run.program->locals(); ++local) {
    of_source.slice = run.step->slice + local;
    const int r = run.program->node_ranks[local];
    const Place slice = place(source, r == rank ? Space::kGradient : Space::kStaging, rank);
    for (int64_t row = 0; row < run.block.rows; ++row) {
      const int64_t place_bytes = (run.block.place_begin + row * run.block.place_pitch) * bytes;
      std::string error = shadow_.read_expecting(
          actor,
          {slice.region, slice.begin_bytes + row * slice.pitch_bytes, run.block.row_numel * bytes},
          gradient_content(run.operation, r, p) + cells(place_bytes));
      if (!error.empty()) return "slice of rank " + std::to_string(r) + ": " + error;
    }
  }
  const Place to = place(run, run.step->to, rank);
  for (int64_t row = 0; row < run.block.rows; ++row) {
    const int64_t element = run.block.shard_begin + row * run.block.shard_pitch;
    std::string error = shadow_.write(
        actor,
        {to.region, to.begin_bytes + row * to.pitch_bytes, run.block.row_numel * partial_bytes},
        partial_content(run.operation, run.program->node, run.step->shard, p) +
            cells(element * partial_bytes));
    if (!error.empty()) return error;
  }
  amounts_[run.operation][rank].gradient_bytes += run.block.rows * run.block.row_numel * bytes;
  return "";
}

// Whole slices, whatever lies in them.
std::string CheckerMemory::zero_slices(const Actor& actor, int index, int rank, const Step& step) {
  const Program& program = *operation(index).programs[rank];
  const int slices = program.slices(Space::kSeat);
  if (!is_node_reduce(index) || step.to != Space::kSeat || step.area < 0 ||
      step.area >= program.areas || step.to_slice < 0 || step.shards < 1 ||
      step.to_slice + step.shards > slices) {
    return "zeroes slices that do not exist";
  }
  return shadow_.write_zeros(
      actor, {region(Kind::kSeats, process_of(index, rank), operation(index).group, 0),
              (int64_t{step.area} * slices + step.to_slice) * program.partial_bytes,
              step.shards * program.partial_bytes});
}

// The run's block in total, block or seat memory of `owner`; without content: it must be zeros.
std::string CheckerMemory::read_partial(const Actor& actor, const Run& run, Space space, int owner,
                                        std::optional<uint64_t> content) {
  const int64_t bytes = partial_element_bytes(run.operation, run.piece->parameter);
  const Place found = place(run, space, owner);
  for (int64_t row = 0; row < run.block.rows; ++row) {
    const int64_t element = run.block.shard_begin + row * run.block.shard_pitch;
    const Range range{found.region, found.begin_bytes + row * found.pitch_bytes,
                      run.block.row_numel * bytes};
    std::string error =
        content ? shadow_.read_expecting(actor, range, *content + cells(element * bytes))
                : shadow_.read_zeros(actor, range);
    if (!error.empty()) return error;
  }
  return "";
}

// The batch's blocks, where the node's ranks have pushed them.
std::string CheckerMemory::read_blocks(const Actor& actor, const Run& run, int rank) {
  const int nodes = run.program->nodes();
  Step of_source = *run.step;
  Run source = run;
  source.step = &of_source;
  for (int i = 0; i < run.step->shards; ++i, of_source.slice += run.program->locals()) {
    const int node = (run.program->node - run.step->first_number - i + nodes) % nodes;
    std::string error =
        read_partial(actor, source, Space::kBlock, rank,
                     partial_content(run.operation, node, rank, run.piece->parameter));
    if (!error.empty()) return "block of node " + std::to_string(node) + ": " + error;
  }
  return "";
}

// The same seat of every rank of the node: each source's sum where the Latin square puts it, zeros
// on the other ranks.
std::string CheckerMemory::read_seats(const Actor& actor, const Run& run, int rank) {
  const Step& step = *run.step;
  const int nodes = run.program->nodes();
  const int locals = run.program->locals();
  int read = 0;
  for (int local = 0; local < locals; ++local) {
    std::optional<uint64_t> content;
    for (int number = step.first_number; number < step.first_number + step.shards; ++number) {
      if (seat_of_segment(locals, step.slice / locals, number) != local) continue;
      const int node = source_with_number(nodes, run.program->node, number);
      content = partial_content(run.operation, node, rank, run.piece->parameter);
      ++read;
    }
    const int owner = run.program->node_ranks[local];
    std::string error = read_partial(actor, run, Space::kSeat, owner, content);
    if (!error.empty()) return "seat of rank " + std::to_string(owner) + ": " + error;
  }
  return read == step.shards ? "" : "reads more sources than a seat has ranks";
}

// What the sources with numbers up to first_number + shards sum to.
std::string CheckerMemory::combine_block(const Actor& actor, const Run& run, int rank) {
  const Step& step = *run.step;
  const int p = run.piece->parameter;
  const int nodes = run.program->nodes();
  const int64_t partial_bytes = partial_element_bytes(run.operation, p);
  const int end = step.first_number + step.shards;
  const Space from = step.op == Op::kReadAdd ? Space::kSeat : Space::kBlock;
  if (step.from != from || step.shards < 1 || step.first_number < 0 || end > nodes ||
      step.to != (end == nodes ? Space::kOutput : Space::kTotal)) {
    return "combines sources that do not exist, or to the wrong memory";
  }
  if (step.first_number > 0) {
    std::string error = read_partial(actor, run, Space::kTotal, rank,
                                     total_content(run.operation, step.first_number, rank, p));
    if (!error.empty()) return "total: " + error;
  }
  std::string error =
      step.op == Op::kReadAdd ? read_seats(actor, run, rank) : read_blocks(actor, run, rank);
  if (!error.empty()) return error;
  const bool last = step.to == Space::kOutput;
  const int64_t bytes = last ? bindings_[run.operation].element_bytes[p] : partial_bytes;
  const uint64_t content =
      last ? summed_content(run.operation, rank, p) : total_content(run.operation, end, rank, p);
  const Place to = place(run, step.to, rank);
  for (int64_t row = 0; row < run.block.rows; ++row) {
    const int64_t element = run.block.shard_begin + row * run.block.shard_pitch;
    std::string error = shadow_.write(
        actor, {to.region, to.begin_bytes + row * to.pitch_bytes, run.block.row_numel * bytes},
        content + cells(element * bytes));
    if (!error.empty()) return error;
  }
  if (last)
    amounts_[run.operation][rank].result_bytes += run.block.rows * run.block.row_numel * bytes;
  return "";
}

// One partial sum an element and other node comes over a node's rails: no rank's own slices do.
std::string CheckerMemory::check_node_reduce(int index) const {
  const GroupLayout& layout = *operation(index).layout;
  for (const auto& program : operation(index).programs) {
    if (program->node_ranks.front() != program->rank) continue;
    int64_t wanted = 0;
    int64_t got = 0;
    for (int rank : program->node_ranks) {
      for (int p : operation(index).subset) {
        wanted +=
            layout.valid_numel(p, rank) * partial_element_bytes(index, p) * (program->nodes() - 1);
      }
      got += amounts_[index][rank].rail_bytes;
    }
    if (got != wanted) {
      return "operation " + std::to_string(index) + ": the rails of node " +
             std::to_string(program->node) + " brought " + std::to_string(got) + " bytes, wanted " +
             std::to_string(wanted);
    }
  }
  return "";
}

namespace checking {
namespace {

std::string check_step(const Program& program, const Step& step) {
  if (step.queue != rail_queue(program.direction))
    return "a network step outside its direction's rail queue";
  if (step.op == Op::kDrain) return "";
  if (step.node < 0 || step.node >= program.nodes() || step.node == program.node)
    return "names a node that does not exist, or its own";
  if (step.op != Op::kPut) return "";
  const int pieces = static_cast<int>(program.pieces.size());
  if (step.first_piece < 0 || step.last_piece > pieces || step.first_piece > step.last_piece)
    return "names pieces that do not exist";
  if (program.direction == Direction::kReduce) {
    return step.from == Space::kPartial && step.to == Space::kSeat &&
                   step.shards == program.locals()
               ? ""
               : "puts other than a segment's partial sums to their seat";
  }
  if (step.shards < 1 || step.shards > program.nodes() || step.first_node < 0 ||
      step.first_node >= program.nodes()) {
    return "names shards that do not exist";
  }
  if (step.to == Space::kLanding && step.from == Space::kLanding && step.area >= 0 &&
      step.area < program.areas && step.slice == step.first_node) {
    return "";
  }
  if (step.to != Space::kSlot || (step.from != Space::kSlot && step.from != Space::kShard))
    return "puts between spaces that a rail does not join";
  return "";
}

}  // namespace

bool CheckerRunner::run_network(Thread& thread, const Item& item, const Step& step) {
  const Program& program = *operation(item.operation).programs[item.rank];
  error_ = check_step(program, step);
  if (error_.empty() && progress_[item.operation][item.rank].drained)
    error_ = "a network step behind the drain";
  if (!error_.empty()) return true;
  switch (step.op) {
    case Op::kPut:
      post(thread, item, step);
      return true;
    case Op::kConfirm:
      send(thread, item, step, RailEvent::kConfirm, 1);
      return true;
    case Op::kGrant:
      send(thread, item, step, RailEvent::kGrant, 1);
      return true;
    case Op::kArrive:
      return arrive(thread, item, step);
    case Op::kDrain:
      return drain(thread, item);
    default:
      error_ = "is no network step";
      return true;
  }
}

void CheckerRunner::send(Thread& thread, const Item& item, const Step& step, RailEvent event,
                         int64_t amount) {
  if (amount == 0) return;
  const Program& program = *operation(item.operation).programs[item.rank];
  const int receiver = program.rail_ranks[step.node];
  const auto [message, fresh] = messages_.insert(
      {{item.operation, receiver, item.rank, event, step.round, step.part}, Message{}});
  if (!fresh) error_ = std::string("sends a second ") + rail_event_name(event) + " of one part";
  message->second.amount = amount;
  message->second.clocks = release(thread);
}

void CheckerRunner::post(Thread& thread, const Item& item, const Step& step) {
  Delivery& put = progress_[item.operation][item.rank].puts[item.index];
  const int64_t bytes = memory_.put_bytes(item.operation, item.rank, step);
  if (bytes != step.bytes || bytes == 0) {
    error_ = "puts " + std::to_string(bytes) + " bytes and says " + std::to_string(step.bytes);
    return;
  }
  if (step.head_bytes < 0 || step.head_bytes > bytes) {
    error_ = "has a head of other bytes than its own";
    return;
  }
  // The put's thread has ended what it did for earlier operations only if this rank knows that.
  const Thread& carrier = threads_[put.thread];
  const uint32_t behind = carrier.next == 0 ? 0 : carrier.clocks[put.thread] - 1;
  const bool busy = carrier.items[carrier.next].operation != item.operation;
  if (busy || thread.clocks[put.thread] < behind) {
    error_ = "puts while a put of an earlier operation is under way";
    return;
  }
  error_ = check_pacing(thread, item, step);
  put.posted = release(thread);
}

bool CheckerRunner::knows(const Thread& thread, const Delivery& put, bool whole) const {
  const std::optional<Clocks>& point = whole ? put.whole : put.head;
  return point && thread.clocks[put.thread] >= (*point)[put.thread];
}

std::string CheckerRunner::check_pacing(const Thread& thread, const Item& item,
                                        const Step& step) const {
  const CheckedOperation& checked = operation(item.operation);
  const Pacing pacing = checked.programs[item.rank]->pacing;
  if (pacing == Pacing::kOff) return "";
  // Confirms: what this rank put before. Grants: what its receiver got before.
  const int receiver = checked.programs[item.rank]->rail_ranks[step.node];
  for (int sender : checked.programs[item.rank]->rail_ranks) {
    if (pacing != Pacing::kGrant && sender != item.rank) continue;
    const Program& program = *checked.programs[sender];
    for (const auto& [index, put] : progress_[item.operation][sender].puts) {
      const Step& earlier = program.steps[index];
      const bool counts = pacing != Pacing::kGrant || program.rail_ranks[earlier.node] == receiver;
      const bool has_head = pacing == Pacing::kConfirmWhole || earlier.head_bytes > 0;
      if (counts && has_head && earlier.round < step.round &&
          !knows(thread, put, pacing == Pacing::kConfirmWhole)) {
        return "is sent before round " + std::to_string(earlier.round) + " of rank " +
               std::to_string(sender) + " is known to be there; pacing " + pacing_name(pacing);
      }
    }
  }
  return "";
}

bool CheckerRunner::arrive(Thread& thread, const Item& item, const Step& step) {
  const Program& program = *operation(item.operation).programs[item.rank];
  const bool in_bytes = step.event == RailEvent::kHead || step.event == RailEvent::kArrival;
  const auto found = messages_.find({item.operation, item.rank, program.rail_ranks[step.node],
                                     step.event, step.round, step.part});
  if (found == messages_.end()) return false;
  if (in_bytes && found->second.amount != step.bytes) {
    error_ = "waits for " + std::to_string(step.bytes) + " bytes of " +
             std::to_string(found->second.amount);
  }
  join_clocks(&thread.clocks, found->second.clocks);
  found->second.awaited = true;
  return true;
}

bool CheckerRunner::drain(Thread& thread, const Item& item) {
  Progress& progress = progress_[item.operation][item.rank];
  for (const auto& [index, put] : progress.puts) {
    if (!put.posted) error_ = "drains before step " + std::to_string(index) + " was posted";
    if (!put.whole) return !error_.empty();
  }
  for (const auto& [index, put] : progress.puts) join_clocks(&thread.clocks, *put.whole);
  progress.drained = true;
  return true;
}

bool CheckerRunner::land_head(Thread& thread, const Item& item) {
  Delivery& put = progress_[item.operation][item.rank].puts[item.index];
  if (!put.posted) return false;
  const Step& step = operation(item.operation).programs[item.rank]->steps[item.index];
  join_clocks(&thread.clocks, *put.posted);
  if (step.head_bytes == 0) return true;
  error_ = memory_.land(actor(thread, item), item.operation, item.rank, step, 0, step.head_bytes);
  put.head = thread.clocks;
  if (error_.empty()) send(thread, item, step, RailEvent::kHead, step.head_bytes);
  return true;
}

void CheckerRunner::land_tail(Thread& thread, const Item& item) {
  Delivery& put = progress_[item.operation][item.rank].puts[item.index];
  const Step& step = operation(item.operation).programs[item.rank]->steps[item.index];
  error_ = memory_.land(actor(thread, item), item.operation, item.rank, step, step.head_bytes,
                        step.bytes);
  put.whole = thread.clocks;
  if (error_.empty()) send(thread, item, step, RailEvent::kArrival, step.bytes);
}

std::string CheckerRunner::check_messages() const {
  for (const auto& [key, message] : messages_) {
    const auto& [index, receiver, sender, event, round, part] = key;
    if (message.awaited) continue;
    return "operation " + std::to_string(index) + ": rank " + std::to_string(receiver) +
           " never waits for the " + rail_event_name(event) + " " + std::to_string(round) + "." +
           std::to_string(part) + " of rank " + std::to_string(sender);
  }
  for (size_t o = 0; o < progress_.size(); ++o) {
    for (size_t rank = 0; rank < progress_[o].size(); ++rank) {
      if (!progress_[o][rank].puts.empty() && !progress_[o][rank].drained) {
        return "operation " + std::to_string(o) + ": rank " + std::to_string(rank) +
               " never drains its puts";
      }
    }
  }
  return "";
}

}  // namespace checking
}  // namespace tide
