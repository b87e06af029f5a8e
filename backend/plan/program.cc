// Worked example of the text: step {kWait, kGatherPush, peer 1, kGatherCredit, value 1} reads
//   gather_push  wait gather_credit from 1 >= 1
#include "backend/plan/program.h"

#include <algorithm>

namespace tide {
namespace {

constexpr size_t kQueueColumn = 13;

std::string peer_text(int peer) {
  if (peer == kSelf) return "self";
  if (peer == kAllPeers) return "all";
  if (peer == kAllRanks) return "all ranks";
  return std::to_string(peer);
}

std::string pieces_text(const Step& step) {
  return "pieces [" + std::to_string(step.first_piece) + ", " + std::to_string(step.last_piece) +
         ")";
}

std::string area_text(const Step& step) { return "[" + std::to_string(step.area) + "]"; }

// "slot", "staging[0][1]"
std::string space_text(const Step& step, Space space) {
  std::string text = space_name(space);
  const bool in_area = space == Space::kStaging || space == Space::kLanding;
  const bool partial = space >= Space::kPartial;
  const bool to = partial && space == step.to;
  if (in_area || partial) {
    text += area_text(step) + "[" + std::to_string(to ? step.to_slice : step.slice) + "]";
  }
  return text;
}

// "2.0": round 2, part 0
std::string round_text(const Step& step) {
  return std::to_string(step.round) + "." + std::to_string(step.part);
}

std::string action_text(const Step& step) {
  switch (step.op) {
    case Op::kCopy:
      return "copy " + pieces_text(step) + " of shard " + std::to_string(step.shard) + ": " +
             space_text(step, step.from) + " -> " + space_text(step, step.to) +
             (step.peer == kSelf ? "" : " of " + peer_text(step.peer));
    case Op::kCast:
      return "cast " + pieces_text(step) + " of shard " + std::to_string(step.shard) + ": " +
             space_text(step, step.from) + " -> " + space_text(step, step.to);
    case Op::kSignal:
      return std::string("signal ") + counter_name(step.counter) + " to " + peer_text(step.peer) +
             " = " + std::to_string(step.value);
    case Op::kWait:
      return std::string("wait ") + counter_name(step.counter) + " from " + peer_text(step.peer) +
             " >= " + std::to_string(step.value);
    case Op::kAccumulate:
      if (step.to != Space::kOutput) {
        return "accumulate " + pieces_text(step) + " of shard " + std::to_string(step.shard) +
               ": " + space_text(step, step.from) + " + gradient -> " + space_text(step, step.to);
      }
      return "accumulate " + pieces_text(step) + " of shard " + std::to_string(step.shard) + ": " +
             space_name(step.from) + area_text(step) + " + gradient -> " + space_name(step.to);
    case Op::kCombine:
      return "combine " + pieces_text(step) + " of shard " + std::to_string(step.shard) + ": " +
             std::to_string(step.shards) + " sources from number " +
             std::to_string(step.first_number) + ", " + space_text(step, step.from) +
             (step.first_number > 0 ? " + total[" + std::to_string(step.to_slice) + "]" : "") +
             " -> " + space_name(step.to) +
             (step.to == Space::kTotal ? "[" + std::to_string(step.to_slice) + "]" : "");
    case Op::kReadAdd:
      return "read and add " + pieces_text(step) + " of shard " + std::to_string(step.shard) +
             ": " + std::to_string(step.shards) + " sources from number " +
             std::to_string(step.first_number) + ", " + space_text(step, step.from) + " of all" +
             (step.first_number > 0 ? " + total[" + std::to_string(step.to_slice) + "]" : "") +
             " -> " + space_name(step.to) +
             (step.to == Space::kTotal ? "[" + std::to_string(step.to_slice) + "]" : "");
    case Op::kZero:
      return "zero " + std::to_string(step.shards) + " slices: " + space_text(step, step.to);
    case Op::kPut:
      if (step.from == Space::kPartial) {
        return "put " + round_text(step) + ", pieces [" + std::to_string(step.first_piece) + ", " +
               std::to_string(step.last_piece) + ") of " + std::to_string(step.shards) +
               " blocks: " + space_text(step, step.from) + " -> " + space_text(step, step.to) +
               " of node " + std::to_string(step.node) + ", " + std::to_string(step.bytes) +
               " bytes";
      }
      return "put " + round_text(step) + ", pieces [" + std::to_string(step.first_piece) + ", " +
             std::to_string(step.last_piece) + ") of " + std::to_string(step.shards) +
             " shards from node " + std::to_string(step.first_node) +
             " on: " + space_text(step, step.from) + " -> " + space_text(step, step.to) +
             " of node " + std::to_string(step.node) + ", " + std::to_string(step.bytes) +
             " bytes, head " + std::to_string(step.head_bytes);
    case Op::kConfirm:
      return "confirm " + round_text(step) + " to node " + std::to_string(step.node);
    case Op::kGrant:
      return "grant " + round_text(step) + " to node " + std::to_string(step.node);
    case Op::kArrive:
      return std::string("arrive ") + rail_event_name(step.event) + " " + round_text(step) +
             " from node " + std::to_string(step.node) +
             (step.event == RailEvent::kHead || step.event == RailEvent::kArrival
                  ? ", " + std::to_string(step.bytes) + " bytes"
                  : "");
    case Op::kDrain:
      return "drain";
  }
  return "unknown step";
}

}  // namespace

const char* queue_name(Queue queue) {
  switch (queue) {
    case Queue::kOwn:
      return "own";
    case Queue::kGatherPush:
      return "gather_push";
    case Queue::kReducePush:
      return "reduce_push";
    case Queue::kSum:
      return "sum";
    case Queue::kUnpack:
      return "unpack";
    case Queue::kArrive:
      return "arrive";
    case Queue::kRail:
      return "rail";
    case Queue::kReduceRail:
      return "reduce_rail";
    case Queue::kCombine:
      return "combine";
  }
  return "unknown";
}

const char* counter_name(Counter counter) {
  switch (counter) {
    case Counter::kGatherCredit:
      return "gather_credit";
    case Counter::kLandingCredit:
      return "landing_credit";
    case Counter::kGatherArrival:
      return "gather_arrival";
    case Counter::kLeaseCredit:
      return "lease_credit";
    case Counter::kReduceCredit:
      return "reduce_credit";
    case Counter::kReduceArrival:
      return "reduce_arrival";
    case Counter::kCast:
      return "cast";
    case Counter::kRailArrival:
      return "rail_arrival";
    case Counter::kPacked:
      return "packed";
    case Counter::kPlaced:
      return "placed";
    case Counter::kLeft:
      return "left";
    case Counter::kPartialReady:
      return "partial_ready";
    case Counter::kPartialFree:
      return "partial_free";
    case Counter::kSeatArrival:
      return "seat_arrival";
    case Counter::kSeatFree:
      return "seat_free";
    case Counter::kBlockArrival:
      return "block_arrival";
    case Counter::kBlockCredit:
      return "block_credit";
  }
  return "unknown";
}

const char* space_name(Space space) {
  switch (space) {
    case Space::kShard:
      return "shard";
    case Space::kSlot:
      return "slot";
    case Space::kGradient:
      return "gradient";
    case Space::kStaging:
      return "staging";
    case Space::kLanding:
      return "landing";
    case Space::kOutput:
      return "output";
    case Space::kPartial:
      return "partial";
    case Space::kSeat:
      return "seat";
    case Space::kBlock:
      return "block";
    case Space::kTotal:
      return "total";
  }
  return "unknown";
}

const char* rail_event_name(RailEvent event) {
  switch (event) {
    case RailEvent::kHead:
      return "head";
    case RailEvent::kArrival:
      return "arrival";
    case RailEvent::kConfirm:
      return "confirm";
    case RailEvent::kGrant:
      return "grant";
  }
  return "unknown";
}

const char* pacing_name(Pacing pacing) {
  switch (pacing) {
    case Pacing::kOff:
      return "off";
    case Pacing::kConfirmWhole:
      return "confirm of the whole";
    case Pacing::kConfirmHead:
      return "confirm of the head";
    case Pacing::kGrant:
      return "grant";
  }
  return "unknown";
}

bool Program::is_local(int other) const {
  return node_ranks.empty() ||
         std::find(node_ranks.begin(), node_ranks.end(), other) != node_ranks.end();
}

int Program::slices(Space space) const {
  switch (space) {
    case Space::kStaging:
      return batch > 0 ? batch * locals() * locals() : ranks;
    case Space::kSeat:
      return locals() * locals();
    case Space::kPartial:
    case Space::kBlock:
      return batch * locals();
    case Space::kTotal:
      return locals();
    case Space::kLanding:
      return nodes() > 1 ? nodes() : ranks;
    default:
      return ranks;
  }
}

int64_t moved_numel(const GroupLayout& layout, const Piece& piece, int shard) {
  const int64_t left = layout.valid_numel(piece.parameter, shard) - piece.begin;
  return std::clamp<int64_t>(left, 0, piece.numel);
}

int piece_blocks(const GroupLayout& layout, const Piece& piece, int shard, Block blocks[3]) {
  return layout.blocks(piece.parameter, shard, piece.begin, moved_numel(layout, piece, shard),
                       blocks);
}

std::string to_string(const Step& step) {
  std::string text = queue_name(step.queue);
  text.resize(std::max(text.size() + 1, kQueueColumn), ' ');
  return text + action_text(step);
}

std::string to_string(const Program& program) {
  std::string text = std::string(program.direction == Direction::kGather ? "gather" : "reduce") +
                     ", rank " + std::to_string(program.rank) + " of " +
                     std::to_string(program.ranks) + ", " + std::to_string(program.pieces.size()) +
                     " pieces";
  if (program.nodes() > 1) {
    text += ", node " + std::to_string(program.node) + " of " + std::to_string(program.nodes()) +
            ", pacing " + pacing_name(program.pacing);
  }
  text += "\n";
  for (const Step& step : program.steps) text += to_string(step) + "\n";
  return text;
}

}  // namespace tide
