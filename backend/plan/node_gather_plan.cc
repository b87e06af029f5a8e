// Worked example of the order between rail and pushes, M = 3, G = 2, direct, no pacing:
//   rail         grant 0.0, 1.0;  arrive grant 0.0; put 0.0;  arrive grant 1.0; put 1.0
//   gather_push  copy the own shard
//   rail         arrive arrival 0.0; signal rail_arrival = 1
//   gather_push  wait rail_arrival 1; push offset 1 on
//   rail         arrive arrival 1.0; signal rail_arrival = 2
//   gather_push  wait rail_arrival 2; push offset 2 on
// Merged into one FIFO nothing waits for a later own step: each put stands before the arrivals that
// it does not need, and the pushes of a round behind the next round's put.
//
// Through landing, 3 chunks: chunk 0, chunk 1, area of chunk 0 free, chunk 2, area of chunk 1 free,
// area of chunk 2 free. What chunk c waits for of chunk c - 2's area stands before it everywhere.
#include "backend/plan/node_gather_plan.h"

#include <algorithm>

#include "backend/plan/doubling.h"
#include "backend/plan/gather_plan.h"
#include "backend/plan/node_program.h"
#include "backend/plan/own_shard.h"
#include "backend/plan/steps.h"

namespace tide {
namespace {

constexpr int kLandingAreas = 2;
// Of confirms that say "it is here whole" where the pacing's own say less.
constexpr int kWholePart = 1;

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
    cut_chunks_of_shards();
    if (pieces_ == 0) return;
    grant_first();
    for (chunk_ = 0; chunk_ < chunks(); ++chunk_) {
      run_chunk();
      if (landing() && chunk_ > 0) free_area(chunk_ - 1);
    }
    if (landing()) free_area(chunks() - 1);
    steps_.rail(Op::kDrain, node_, 0);
    complete();
  }

 private:
  bool landing() const { return options_.landing_slice_bytes > 0; }
  int chunks() const { return static_cast<int>(ends_.size()); }
  int first_piece() const { return chunk_ == 0 ? 0 : ends_[chunk_ - 1]; }
  int last_piece() const { return ends_[chunk_]; }
  int number_of(int chunk, int d) const { return chunk * rounds() + d; }
  uint32_t shards_before() const { return shards_before(chunk_); }
  uint32_t shards_before(int chunk) const {
    return static_cast<uint32_t>(chunk * (topology_.nodes() - 1));
  }
  int rounds() const { return static_cast<int>(rounds_.size()); }
  int peers() const { return topology_.local_ranks() - 1; }
  int peer(int k) const { return topology_.rank(node_, (local_ + k) % topology_.local_ranks()); }
  int rank_at_offset(int node, int offset) const {
    return topology_.rank(node_at_offset(topology_.nodes(), node, offset), local_);
  }

  // Bytes that a rail carries of a rank's shard in this chunk.
  int64_t chunk_bytes(int rank) const {
    int64_t bytes = 0;
    for (int i = first_piece(); i < last_piece(); ++i) {
      const Piece& piece = program_->pieces[i];
      bytes +=
          moved_numel(layout_, piece, rank) * dtype_bytes(layout_.parameter(piece.parameter).dtype);
    }
    return bytes;
  }

  std::vector<RailPart> parts_of(int first_node, int d) const {
    const RailRound& round = rounds_[d];
    std::vector<int64_t> bytes;
    for (int i = 0; i < round.shards; ++i)
      bytes.push_back(chunk_bytes(rank_at_offset(first_node, i)));
    // Nobody asks for the last round's head.
    const bool heads = d + 1 < rounds() && (options_.pacing == Pacing::kConfirmHead ||
                                            options_.pacing == Pacing::kGrant);
    return cut_round(bytes, options_.part_bytes, heads ? options_.head_bytes : 0);
  }

  void cut_chunks_of_shards() {
    const std::vector<CutItem> items = gather_items(layout_);
    if (!landing()) {
      program_->pieces = whole_pieces(items);
      ends_ = {static_cast<int>(program_->pieces.size())};
    } else {
      CutLimits limits;
      limits.largest_bytes = options_.landing_slice_bytes;
      Cut cut = cut_chunks(items, limits);
      pack_tightly(&cut);
      program_->pieces = std::move(cut.pieces);
      ends_ = std::move(cut.ends);
      program_->areas = std::min(kLandingAreas, chunks());
      program_->slice_bytes =
          std::max(kPieceAlignment, options_.landing_slice_bytes & ~(kPieceAlignment - 1));
    }
    pieces_ = static_cast<int>(program_->pieces.size());
  }

  // Without gaps, so that a chunk of a shard is one run of bytes on the wire.
  void pack_tightly(Cut* cut) const {
    for (int chunk = 0; chunk < cut->chunks(); ++chunk) {
      int64_t offset = 0;
      for (int i = cut->first(chunk); i < cut->ends[chunk]; ++i) {
        Piece& piece = cut->pieces[i];
        piece.packed_offset = offset;
        offset += piece.numel * dtype_bytes(layout_.parameter(piece.parameter).dtype);
      }
    }
  }

  // The sender of a round cuts the same list of shards as its receiver.
  void cut_rounds() {
    const int nodes = topology_.nodes();
    sent_.clear();
    received_.clear();
    for (int d = 0; d < rounds(); ++d) {
      sent_.push_back(parts_of(node_at_offset(nodes, node_, rounds_[d].first_sent), d));
      received_.push_back(parts_of(node_at_offset(nodes, node_, rounds_[d].first_received), d));
    }
  }

  void run_chunk() {
    cut_rounds();
    arrived_rounds_ = 0;
    arrived_ = {0};
    pushed_ = 0;
    if (landing()) {
      if (chunk_ > 0 || needs_cast()) {
        if (chunk_ == 0) place_own();
        pack();
      } else {
        pack();
        place_own();
      }
    } else {
      place_own();
    }
    for (int d = 0; d < rounds(); ++d) run_round(d);
    arrive_until(rounds());
    push_on();
    // Rounds of a chunk are granted behind the heads of the one before.
    if (landing() && options_.pacing == Pacing::kGrant && chunk_ == 0 && chunks() > 1) grant(1, 0);
  }

  bool needs_cast() const { return tide::needs_cast(layout_, program_->pieces); }

  // The chunk of the own shard into the own slice of its area.
  void pack() {
    if (chunk_ == 0) steps_.wait(Queue::kOwn, kSelf, Counter::kLeft, 0);  // of earlier operations
    if (chunk_ >= kLandingAreas) {
      steps_.wait(Queue::kOwn, kSelf, Counter::kLeft,
                  static_cast<uint32_t>(chunk_ - kLandingAreas + 1));
    }
    Step& step = steps_.move(Op::kCopy, Queue::kOwn, kSelf, first_piece(), last_piece());
    step.shard = program_->rank;
    step.from = own_from_;
    step.to = Space::kLanding;
    step.area = chunk_ % kLandingAreas;
    step.slice = node_;
    steps_.signal(Queue::kOwn, kSelf, Counter::kPacked, static_cast<uint32_t>(chunk_) + 1);
    steps_.wait(Queue::kRail, kSelf, Counter::kPacked, static_cast<uint32_t>(chunk_) + 1);
  }

  // Placed here, and left from here.
  void free_area(int chunk) {
    steps_.wait(Queue::kRail, kSelf, Counter::kPlaced, shards_before(chunk + 1));
    const bool whole = options_.pacing == Pacing::kConfirmWhole;
    for (int d = 0; d < rounds(); ++d) {
      // The next chunk, and the next round, have waited for the pacing's own confirms.
      if (whole && (d + 1 < rounds() || chunk + 1 < chunks())) continue;
      steps_.arrive(RailEvent::kConfirm, rounds_[d].send_to_node, number_of(chunk, d),
                    whole ? 0 : kWholePart, 0);
    }
    steps_.signal(Queue::kRail, kSelf, Counter::kLeft, static_cast<uint32_t>(chunk) + 1);
    if (chunk + kLandingAreas < chunks()) grant_chunk(chunk + kLandingAreas);
  }

  // Whether this round's sender (or receiver) has not been met in an earlier one.
  bool is_granted_at_start(int d, int RailRound::*end) const {
    return std::none_of(rounds_.begin(), rounds_.begin() + d,
                        [&](const RailRound& earlier) { return earlier.*end == rounds_[d].*end; });
  }

  void grant(int chunk, int d) {
    steps_.rail(Op::kGrant, rounds_[d].receive_from_node, number_of(chunk, d));
  }

  void grant_chunk(int chunk) {
    for (int d = 0; d < rounds(); ++d) {
      if (options_.pacing == Pacing::kGrant && d > 0) break;
      if (is_granted_at_start(d, &RailRound::receive_from_node)) grant(chunk, d);
    }
  }

  void grant_first() {
    grant_chunk(0);
    if (chunks() > 1 && options_.pacing != Pacing::kGrant) grant_chunk(1);
    if (peers() > 0) {
      steps_.signal(Queue::kGatherPush, kAllPeers, Counter::kGatherCredit, 1);
      set_advance(program_, Counter::kGatherCredit, 1);
    }
  }

  bool to_all() const { return options_.to_all && peers() > 0; }

  void place_own() {
    if (!needs_cast()) {
      if (!to_all()) copy_own(steps_, pieces_, Space::kSlot);
      return;
    }
    cast_own(steps_, layout_, program_->pieces);
    steps_.signal(Queue::kOwn, kSelf, Counter::kCast, 1);
    set_advance(program_, Counter::kCast, 1);
    if (!landing()) steps_.wait(Queue::kRail, kSelf, Counter::kCast, 1);
    if (peers() > 0) steps_.wait(Queue::kGatherPush, kSelf, Counter::kCast, 1);
    own_from_ = Space::kSlot;
  }

  void run_round(int d) {
    arrive_until(first_round_with(rounds_[d].needed()));
    wait_for_pacing(d);
    put(d);
    if (chunk_ == 0 && d == 0) push_own();
    push_on();
    const bool last = d + 1 == rounds();
    switch (options_.pacing) {
      case Pacing::kOff:
        return;
      case Pacing::kConfirmWhole:
        arrive_until(d + 1);
        if (!last || landing()) confirm(d);
        return;
      case Pacing::kConfirmHead:
      case Pacing::kGrant:
        // Nothing lies between a round's puts but waits, so an earlier round's tail costs no time.
        if (last) return;
        arrive_head(d);
        if (options_.pacing == Pacing::kGrant) {
          grant(chunk_, d + 1);
        } else {
          confirm(d);
        }
        arrive_until(d);
        return;
    }
  }

  void confirm(int d, int part = 0) {
    steps_.rail(Op::kConfirm, rounds_[d].receive_from_node, number_of(chunk_, d), part);
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
      steps_.arrive(RailEvent::kConfirm, rounds_[d - 1].send_to_node, number_of(chunk_, d - 1), 0,
                    0);
    }
    if (options_.pacing == Pacing::kConfirmWhole && d == 0 && chunk_ > 0) {
      steps_.arrive(RailEvent::kConfirm, rounds_.back().send_to_node,
                    number_of(chunk_ - 1, rounds() - 1), 0, 0);
    }
    if (options_.pacing == Pacing::kGrant || is_granted_at_start(d, &RailRound::send_to_node)) {
      steps_.arrive(RailEvent::kGrant, rounds_[d].send_to_node, number_of(chunk_, d), 0, 0);
    }
  }

  void put(int d) {
    const RailRound& round = rounds_[d];
    for (int i = 0; i < static_cast<int>(sent_[d].size()); ++i) {
      const RailPart& part = sent_[d][i];
      if (part.bytes == 0) continue;
      Step& step = steps_.rail(Op::kPut, round.send_to_node, number_of(chunk_, d), i);
      step.first_piece = first_piece();
      step.last_piece = last_piece();
      step.from = landing() ? Space::kLanding : own_from_;
      step.to = landing() ? Space::kLanding : Space::kSlot;
      step.area = chunk_ % kLandingAreas;
      step.first_node = node_at_offset(topology_.nodes(), node_, round.first_sent + part.first);
      if (landing()) step.slice = step.first_node;
      step.shards = part.shards;
      step.bytes = part.bytes;
      step.head_bytes = part.head_bytes;
    }
  }

  void arrive_head(int d) {
    for (int i = 0; i < static_cast<int>(received_[d].size()); ++i) {
      const int64_t bytes = received_[d][i].head_bytes;
      if (bytes == 0) continue;
      steps_.arrive(RailEvent::kHead, rounds_[d].receive_from_node, number_of(chunk_, d), i, bytes);
    }
  }

  // Whole arrival of all parts of rounds before `round`.
  void arrive_until(int round) {
    for (; arrived_rounds_ < round; ++arrived_rounds_) {
      const int d = arrived_rounds_;
      for (int i = 0; i < static_cast<int>(received_[d].size()); ++i) {
        const RailPart& part = received_[d][i];
        if (part.bytes > 0) {
          steps_.arrive(RailEvent::kArrival, rounds_[d].receive_from_node, number_of(chunk_, d), i,
                        part.bytes);
        }
        arrived_.push_back(arrived_.back() + part.shards);
        steps_.signal(Queue::kRail, kSelf, Counter::kRailArrival,
                      shards_before() + static_cast<uint32_t>(arrived_.back()));
      }
      if (landing() && options_.pacing != Pacing::kConfirmWhole) confirm(d, kWholePart);
    }
  }

  void copy_to(int target, int shard, Space from) {
    const bool own = shard == program_->rank;
    Step& step = steps_.move(Op::kCopy, Queue::kGatherPush, target, own ? 0 : first_piece(),
                             own ? pieces_ : last_piece());
    step.shard = shard;
    step.from = from;
    step.to = Space::kSlot;
  }

  void signal_arrival(int target, uint32_t shards) {
    steps_.signal(Queue::kGatherPush, target, Counter::kGatherArrival, shards);
  }

  void push_own() {
    if (to_all()) {
      for (int k = 1; k <= peers(); ++k)
        steps_.wait(Queue::kGatherPush, peer(k), Counter::kGatherCredit, 1);
      copy_to(kAllRanks, program_->rank, own_from_);
      signal_arrival(kAllPeers, 1);
      return;
    }
    for (int k = 1; k <= peers(); ++k) {
      steps_.wait(Queue::kGatherPush, peer(k), Counter::kGatherCredit, 1);
      copy_to(peer(k), program_->rank, own_from_);
      signal_arrival(peer(k), 1);
    }
  }

  // Everything that has arrived so far and is not pushed on yet.
  void push_on() {
    for (; pushed_ + 1 < arrived_.size(); ++pushed_) {
      const int first = arrived_[pushed_] + 1;  // offset; 0 is the own shard
      const int last = arrived_[pushed_ + 1];
      const uint32_t so_far = shards_before() + static_cast<uint32_t>(last);
      if (landing()) place(first, last, so_far);
      if (peers() == 0) continue;
      steps_.wait(Queue::kGatherPush, kSelf, here(), so_far);
      const auto push = [&](int target, int told) {
        for (int offset = first; offset <= last; ++offset)
          copy_to(target, rank_at_offset(node_, offset), Space::kSlot);
        signal_arrival(told, so_far + 1);
      };
      if (to_all()) push(kAllRanks, kAllPeers);
      for (int k = 1; k <= peers() && !to_all(); ++k) push(peer(k), peer(k));
    }
  }

  // What says that shards of other nodes lie in the slot.
  Counter here() const { return landing() ? Counter::kPlaced : Counter::kRailArrival; }

  // Landing to the own slot.
  void place(int first, int last, uint32_t so_far) {
    steps_.wait(Queue::kUnpack, kSelf, Counter::kRailArrival, so_far);
    for (int offset = first; offset <= last; ++offset) {
      Step& step = steps_.move(Op::kCopy, Queue::kUnpack, kSelf, first_piece(), last_piece());
      step.shard = rank_at_offset(node_, offset);
      step.from = Space::kLanding;
      step.to = Space::kSlot;
      step.area = chunk_ % kLandingAreas;
      step.slice = node_at_offset(topology_.nodes(), node_, offset);
    }
    steps_.signal(Queue::kUnpack, kSelf, Counter::kPlaced, so_far);
  }

  void complete() {
    const uint32_t shards = shards_before(chunks());
    for (int k = peers(); k >= 1; --k) {
      steps_.wait(Queue::kArrive, peer(k), Counter::kGatherArrival, shards + 1);
    }
    steps_.wait(Queue::kArrive, kSelf, here(), shards);
    set_advance(program_, Counter::kRailArrival, shards);
    if (peers() > 0) set_advance(program_, Counter::kGatherArrival, shards + 1);
    if (!landing()) return;
    set_advance(program_, Counter::kPlaced, shards);
    for (Counter counter : {Counter::kPacked, Counter::kLeft})
      set_advance(program_, counter, static_cast<uint32_t>(chunks()));
  }

  const GroupLayout& layout_;
  const Topology& topology_;
  const NodeGatherOptions& options_;
  Program* program_;
  StepWriter steps_;
  int node_;
  int local_;
  std::vector<RailRound> rounds_;
  std::vector<int> ends_;                    // of the chunks, in the pieces; straight: one chunk
  int chunk_ = 0;                            // the current one; of it:
  std::vector<std::vector<RailPart>> sent_;  // by round
  std::vector<std::vector<RailPart>> received_;  // by round
  int pieces_ = 0;
  Space own_from_ = Space::kShard;
  int arrived_rounds_ = 0;          // whose arrival has been waited for
  std::vector<int> arrived_ = {0};  // shards that have arrived after each part waited for
  size_t pushed_ = 0;               // parts pushed on
};

}  // namespace

Program plan_node_gather(const GroupLayout& layout, const Topology& topology, int rank,
                         const NodeGatherOptions& options) {
  if (topology.nodes() == 1) {
    GatherOptions inside;
    inside.to_all = options.to_all;
    return plan_gather(layout, rank, inside);
  }
  Program program = start_node_program(
      Direction::kGather, layout, topology, rank,
      {static_cast<int64_t>(options.schedule), static_cast<int64_t>(options.pacing),
       options.head_bytes, options.part_bytes, options.landing_slice_bytes,
       static_cast<int64_t>(options.to_all)});
  program.pacing = options.pacing;
  NodeGatherPlanner(layout, topology, options, &program).plan();
  return program;
}

}  // namespace tide
