// Worked example of the order between rail and pushes, M = 3, G = 2, direct, no pacing:
//   rail         grant 0.0, 1.0;  arrive grant 0.0; put 0.0;  arrive grant 1.0; put 1.0
//   gather_push  copy the own shard
//   rail         arrive arrival 0.0; signal rail_arrival = 1
//   gather_push  wait rail_arrival 1; push offset 1 on
//   rail         arrive arrival 1.0; signal rail_arrival = 2
//   gather_push  wait rail_arrival 2; push offset 2 on
// Merged into one FIFO nothing waits for a later own step: each put stands before the arrivals that
// it does not need, and the pushes of a round behind the next round's put.
#include "backend/plan/node_gather_plan.h"

#include <algorithm>

#include "backend/layout/hash.h"
#include "backend/plan/doubling.h"
#include "backend/plan/gather_plan.h"
#include "backend/plan/own_shard.h"
#include "backend/plan/steps.h"

namespace tide {
namespace {

class NodeGatherPlanner {
 public:
  NodeGatherPlanner(const GroupLayout& layout, const Topology& topology,
                    const NodeGatherOptions& options, Program* program)
      : layout_(layout),
        topology_(topology),
        options_(options),
        program_(program),
        steps_(program),
        node_(topology.node(program->rank)),
        local_(topology.local(program->rank)),
        rounds_(rail_rounds(options.schedule, topology.nodes(), node_)) {}

  void plan() {
    program_->pieces = whole_pieces(gather_items(layout_));
    pieces_ = static_cast<int>(program_->pieces.size());
    if (pieces_ == 0) return;
    cut_rounds();
    grant_slot();
    place_own();
    for (int d = 0; d < rounds(); ++d) run_round(d);
    arrive_until(rounds());
    push_on();
    steps_.rail(Op::kDrain, node_, 0);
    complete();
  }

 private:
  int rounds() const { return static_cast<int>(rounds_.size()); }
  int peers() const { return topology_.local_ranks() - 1; }
  int peer(int k) const { return topology_.rank(node_, (local_ + k) % topology_.local_ranks()); }
  int rank_at_offset(int node, int offset) const {
    return topology_.rank(node_at_offset(topology_.nodes(), node, offset), local_);
  }

  std::vector<RailPart> parts_of(int first_node, int d) const {
    const RailRound& round = rounds_[d];
    std::vector<int64_t> bytes;
    for (int i = 0; i < round.shards; ++i) {
      bytes.push_back(valid_shard_bytes(layout_, rank_at_offset(first_node, i)));
    }
    // Nobody asks for the last round's head.
    const bool heads = d + 1 < rounds() && (options_.pacing == Pacing::kConfirmHead ||
                                            options_.pacing == Pacing::kGrant);
    return cut_round(bytes, options_.part_bytes, heads ? options_.head_bytes : 0);
  }

  // The sender of a round cuts the same list of shards as its receiver.
  void cut_rounds() {
    const int nodes = topology_.nodes();
    for (int d = 0; d < rounds(); ++d) {
      sent_.push_back(parts_of(node_at_offset(nodes, node_, rounds_[d].first_sent), d));
      received_.push_back(parts_of(node_at_offset(nodes, node_, rounds_[d].first_received), d));
    }
  }

  // Whether this round's sender (or receiver) has not been met in an earlier one.
  bool is_granted_at_start(int d, int RailRound::*end) const {
    return std::none_of(rounds_.begin(), rounds_.begin() + d,
                        [&](const RailRound& earlier) { return earlier.*end == rounds_[d].*end; });
  }

  void grant(int d) { steps_.rail(Op::kGrant, rounds_[d].receive_from_node, d); }

  void grant_slot() {
    for (int d = 0; d < rounds(); ++d) {
      if (options_.pacing == Pacing::kGrant && d > 0) break;
      if (is_granted_at_start(d, &RailRound::receive_from_node)) grant(d);
    }
    if (peers() > 0) {
      steps_.signal(Queue::kGatherPush, kAllPeers, Counter::kGatherCredit, 1);
      set_advance(program_, Counter::kGatherCredit, 1);
    }
  }

  void place_own() {
    if (!needs_cast(layout_, program_->pieces)) {
      copy_own(steps_, pieces_, Space::kSlot);
      return;
    }
    cast_own(steps_, layout_, program_->pieces);
    steps_.signal(Queue::kOwn, kSelf, Counter::kCast, 1);
    set_advance(program_, Counter::kCast, 1);
    steps_.wait(Queue::kRail, kSelf, Counter::kCast, 1);
    if (peers() > 0) steps_.wait(Queue::kGatherPush, kSelf, Counter::kCast, 1);
    own_from_ = Space::kSlot;
  }

  void run_round(int d) {
    arrive_until(first_round_with(rounds_[d].needed()));
    wait_for_pacing(d);
    put(d);
    if (d == 0) push_own();
    push_on();
    const bool last = d + 1 == rounds();
    switch (options_.pacing) {
      case Pacing::kOff:
        return;
      case Pacing::kConfirmWhole:
        arrive_until(d + 1);
        if (!last) steps_.rail(Op::kConfirm, rounds_[d].receive_from_node, d);
        return;
      case Pacing::kConfirmHead:
      case Pacing::kGrant:
        // Nothing lies between a round's puts but waits, so an earlier round's tail costs no time.
        if (last) return;
        arrive_head(d);
        if (options_.pacing == Pacing::kGrant) {
          grant(d + 1);
        } else {
          steps_.rail(Op::kConfirm, rounds_[d].receive_from_node, d);
        }
        arrive_until(d);
        return;
    }
  }

  // Rounds that must have arrived whole before offsets [0, needed) are all here.
  int first_round_with(int needed) const {
    int d = 0;
    while (d < rounds() && rounds_[d].first_received < needed) ++d;
    return d;
  }

  void wait_for_pacing(int d) {
    const bool confirmed =
        options_.pacing == Pacing::kConfirmWhole || options_.pacing == Pacing::kConfirmHead;
    if (confirmed && d > 0) {
      steps_.arrive(RailEvent::kConfirm, rounds_[d - 1].send_to_node, d - 1, 0, 0);
    }
    if (options_.pacing == Pacing::kGrant || is_granted_at_start(d, &RailRound::send_to_node)) {
      steps_.arrive(RailEvent::kGrant, rounds_[d].send_to_node, d, 0, 0);
    }
  }

  void put(int d) {
    const RailRound& round = rounds_[d];
    for (int i = 0; i < static_cast<int>(sent_[d].size()); ++i) {
      const RailPart& part = sent_[d][i];
      if (part.bytes == 0) continue;
      Step& step = steps_.rail(Op::kPut, round.send_to_node, d, i);
      step.last_piece = pieces_;
      step.from = own_from_;
      step.to = Space::kSlot;
      step.first_node = node_at_offset(topology_.nodes(), node_, round.first_sent + part.first);
      step.shards = part.shards;
      step.bytes = part.bytes;
      step.head_bytes = part.head_bytes;
    }
  }

  void arrive_head(int d) {
    for (int i = 0; i < static_cast<int>(received_[d].size()); ++i) {
      const int64_t bytes = received_[d][i].head_bytes;
      if (bytes > 0) steps_.arrive(RailEvent::kHead, rounds_[d].receive_from_node, d, i, bytes);
    }
  }

  // Whole arrival of all parts of rounds before `round`.
  void arrive_until(int round) {
    for (; arrived_rounds_ < round; ++arrived_rounds_) {
      const int d = arrived_rounds_;
      for (int i = 0; i < static_cast<int>(received_[d].size()); ++i) {
        const RailPart& part = received_[d][i];
        if (part.bytes > 0) {
          steps_.arrive(RailEvent::kArrival, rounds_[d].receive_from_node, d, i, part.bytes);
        }
        arrived_.push_back(arrived_.back() + part.shards);
        steps_.signal(Queue::kRail, kSelf, Counter::kRailArrival,
                      static_cast<uint32_t>(arrived_.back()));
      }
    }
  }

  Step& copy_to(int target, int shard, Space from) {
    Step& step = steps_.move(Op::kCopy, Queue::kGatherPush, target, 0, pieces_);
    step.shard = shard;
    step.from = from;
    step.to = Space::kSlot;
    return step;
  }

  void push_own() {
    for (int k = 1; k <= peers(); ++k) {
      steps_.wait(Queue::kGatherPush, peer(k), Counter::kGatherCredit, 1);
      copy_to(peer(k), program_->rank, own_from_);
      steps_.signal(Queue::kGatherPush, peer(k), Counter::kGatherArrival, 1);
    }
  }

  // Everything that has arrived so far and is not pushed on yet.
  void push_on() {
    for (; pushed_ + 1 < arrived_.size() && peers() > 0; ++pushed_) {
      const int first = arrived_[pushed_] + 1;  // offset; 0 is the own shard
      const int last = arrived_[pushed_ + 1];
      steps_.wait(Queue::kGatherPush, kSelf, Counter::kRailArrival, static_cast<uint32_t>(last));
      for (int k = 1; k <= peers(); ++k) {
        for (int offset = first; offset <= last; ++offset) {
          copy_to(peer(k), rank_at_offset(node_, offset), Space::kSlot);
        }
        steps_.signal(Queue::kGatherPush, peer(k), Counter::kGatherArrival,
                      static_cast<uint32_t>(last + 1));
      }
    }
  }

  void complete() {
    const uint32_t nodes = static_cast<uint32_t>(topology_.nodes());
    for (int k = peers(); k >= 1; --k) {
      steps_.wait(Queue::kArrive, peer(k), Counter::kGatherArrival, nodes);
    }
    steps_.wait(Queue::kArrive, kSelf, Counter::kRailArrival, nodes - 1);
    set_advance(program_, Counter::kRailArrival, nodes - 1);
    if (peers() > 0) set_advance(program_, Counter::kGatherArrival, nodes);
  }

  const GroupLayout& layout_;
  const Topology& topology_;
  const NodeGatherOptions& options_;
  Program* program_;
  StepWriter steps_;
  int node_;
  int local_;
  std::vector<RailRound> rounds_;
  std::vector<std::vector<RailPart>> sent_;      // by round
  std::vector<std::vector<RailPart>> received_;  // by round
  int pieces_ = 0;
  Space own_from_ = Space::kShard;
  int arrived_rounds_ = 0;          // whose arrival has been waited for
  std::vector<int> arrived_ = {0};  // shards that have arrived after each part waited for
  size_t pushed_ = 0;               // parts pushed on
};

uint64_t hash_of(const Topology& topology, const NodeGatherOptions& options, uint64_t hash) {
  for (uint64_t value :
       {static_cast<uint64_t>(topology.nodes()), static_cast<uint64_t>(options.schedule),
        static_cast<uint64_t>(options.pacing), static_cast<uint64_t>(options.head_bytes),
        static_cast<uint64_t>(options.part_bytes)}) {
    hash = hash_combine(hash, value);
  }
  for (int node = 0; node < topology.nodes(); ++node) {
    for (int rank : topology.members(node)) hash = hash_combine(hash, static_cast<uint64_t>(rank));
  }
  return hash;
}

}  // namespace

int64_t valid_shard_bytes(const GroupLayout& layout, int rank) {
  int64_t bytes = 0;
  for (int p = 0; p < layout.size(); ++p) {
    bytes += layout.valid_numel(p, rank) * dtype_bytes(layout.parameter(p).dtype);
  }
  return bytes;
}

Program plan_node_gather(const GroupLayout& layout, const Topology& topology, int rank,
                         const NodeGatherOptions& options) {
  if (topology.nodes() == 1) return plan_gather(layout, rank, {});
  Program program;
  program.direction = Direction::kGather;
  program.ranks = layout.ranks();
  program.rank = rank;
  program.node = topology.node(rank);
  program.node_ranks = topology.members(program.node);
  for (int node = 0; node < topology.nodes(); ++node) {
    program.rail_ranks.push_back(topology.rank(node, topology.local(rank)));
  }
  program.pacing = options.pacing;
  program.hash = hash_combine(layout.hash(), static_cast<uint64_t>(Direction::kGather));
  program.hash = hash_of(topology, options, program.hash);
  NodeGatherPlanner(layout, topology, options, &program).plan();
  return program;
}

}  // namespace tide
