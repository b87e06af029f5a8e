// Worked example of the order of turns, merged into one FIFO, 3 turns:
//   level 1 of turn 0, its puts; level 1 of turn 1, its puts; end of turn 0; level 1 of turn 2, its
//   puts; end of turn 1; end of turn 2; drain
// "End" is everything from the arrivals on: what turn t + 2 waits for stands in the end of turn t.
#include "backend/plan/node_reduce_plan.h"

#include <algorithm>

#include "backend/layout/hash.h"
#include "backend/plan/batches.h"
#include "backend/plan/cut.h"
#include "backend/plan/node_program.h"
#include "backend/plan/seats.h"
#include "backend/plan/steps.h"

namespace tide {
namespace {

constexpr int kAreas = 2;

struct Turn {
  int first_segment = 0;  // of the chunk, in the cut
  ReduceBatch batch;
  uint32_t sources_before = 0;  // of all earlier turns
  int area = 0;
};

class NodeReducePlanner {
 public:
  NodeReducePlanner(const GroupLayout& layout, const Topology& topology,
                    const NodeReduceOptions& options, Program* program)
      : layout_(layout),
        topology_(topology),
        options_(options),
        program_(program),
        steps_(program),
        nodes_(topology.nodes()),
        locals_(topology.local_ranks()),
        node_(topology.node(program->rank)),
        local_(topology.local(program->rank)) {}

  void plan() {
    cut();
    make_turns();
    if (turns_.empty()) return;
    const int count = static_cast<int>(turns_.size());
    grant_first();
    for (int t = 0; t < count; ++t) {
      push_slices(t);
      accumulate(t);
      put(t);
      if (t > 0) end(t - 1);
    }
    end(count - 1);
    steps_.rail(Op::kDrain, node_, 0);
    set_advances();
  }

 private:
  int rank_of(int node, int local) const { return topology_.rank(node, local); }
  int count() const { return static_cast<int>(turns_.size()); }

  // A whole number of chunks of G segments; segments at the end may be empty.
  void cut() {
    std::vector<CutItem> items;
    for (size_t i = 0; i < options_.subset.size(); ++i) {
      const int p = options_.subset[i];
      items.push_back({p, layout_.parameter(p).shard_numel, dtype_bytes(options_.dtypes[i])});
      element_bytes_.resize(static_cast<size_t>(p) + 1, 0);
      element_bytes_[p] = items.back().element_bytes;
    }
    CutLimits limits;
    limits.largest_bytes = std::max(kPieceAlignment, options_.segment_bytes);
    const int64_t least = packed_bytes(items) / limits.largest_bytes + 1;
    limits.wanted_chunks = (least + locals_ - 1) / locals_ * locals_;
    cut_ = cut_chunks(items, limits);
    int64_t offset = 0;
    for (int s = 0; s < cut_.chunks(); ++s, offset = 0) {
      for (int i = cut_.first(s); i < cut_.ends[s]; ++i) {
        Piece& piece = cut_.pieces[i];
        piece.partial_offset = offset;
        offset += align_piece(piece.numel * partial_element_bytes(piece.parameter));
        program_->slice_bytes = std::max(
            program_->slice_bytes,
            piece.packed_offset + align_piece(piece.numel * element_bytes_[piece.parameter]));
      }
      program_->partial_bytes = std::max(program_->partial_bytes, offset);
    }
    program_->pieces = cut_.pieces;
  }

  int64_t partial_element_bytes(int parameter) const {
    return std::max<int64_t>(4, element_bytes_[parameter]);
  }

  void make_turns() {
    uint32_t sources = 0;
    for (int first = 0; first < cut_.chunks(); first += locals_) {
      for (const ReduceBatch& batch : reduce_batches(nodes_, locals_)) {
        turns_.push_back({first, batch, sources, static_cast<int>(turns_.size()) % kAreas});
        sources += static_cast<uint32_t>(batch.sources);
      }
    }
    program_->areas = std::min(kAreas, count());
    program_->batch = std::min({kLargestBatch, locals_, nodes_});
  }

  // Piece range of segment s of the turn's chunk; empty behind the last one.
  int first_piece(const Turn& turn, int segment) const {
    const int s = turn.first_segment + segment;
    return s < cut_.chunks() ? cut_.first(s) : static_cast<int>(cut_.pieces.size());
  }
  int last_piece(const Turn& turn, int segment) const {
    const int s = turn.first_segment + segment;
    return s < cut_.chunks() ? cut_.ends[s] : static_cast<int>(cut_.pieces.size());
  }

  // Partial sums of one segment of the shards of all ranks of `target`.
  int64_t put_bytes(const Turn& turn, int segment, int target) const {
    int64_t bytes = 0;
    for (int k = 0; k < locals_; ++k) {
      for (int i = first_piece(turn, segment); i < last_piece(turn, segment); ++i) {
        const Piece& piece = cut_.pieces[i];
        bytes += moved_numel(layout_, piece, rank_of(target, k)) *
                 partial_element_bytes(piece.parameter);
      }
    }
    return bytes;
  }
  int target_of(const Turn& turn, int i) const {
    return target_with_number(nodes_, node_, turn.batch.first_number + i);
  }
  int source_of(const Turn& turn, int i) const {
    return source_with_number(nodes_, node_, turn.batch.first_number + i);
  }
  int segment_of(const Turn& turn, int i, int local) const {
    return segment_of_local(locals_, local, turn.batch.first_number + i);
  }
  bool is_own(const Turn& turn, int i) const { return turn.batch.first_number + i == 0; }
  bool puts_to(const Turn& turn, int i) const {
    return !is_own(turn, i) && put_bytes(turn, segment_of(turn, i, local_), target_of(turn, i)) > 0;
  }
  bool gets_from(const Turn& turn, int i) const {
    return !is_own(turn, i) && put_bytes(turn, segment_of(turn, i, local_), node_) > 0;
  }

  Step& move(Op op, Queue queue, int peer, const Turn& turn, int segment) {
    Step& step =
        steps_.move(op, queue, peer, first_piece(turn, segment), last_piece(turn, segment));
    step.area = turn.area;
    return step;
  }

  void grant_first() {
    const uint32_t free = static_cast<uint32_t>(std::min(kAreas, count()));
    if (locals_ > 1) steps_.signal(Queue::kSum, kAllPeers, Counter::kReduceCredit, free);
    if (locals_ > 1) steps_.signal(Queue::kCombine, kAllPeers, Counter::kBlockCredit, free);
    steps_.signal(Queue::kCombine, kSelf, Counter::kBlockCredit, free);
    // By earlier operations.
    if (options_.read_add || options_.behind_read_adds) wait_for_readers(Queue::kReduceRail, free);
    if (!options_.read_add) steps_.wait(Queue::kReduceRail, kSelf, Counter::kSeatFree, 0);
    for (int t = 0; t < static_cast<int>(free); ++t) grant(t);
  }

  // Read-add form: until all ranks of the node have read the own seats for the last time before
  // turn `turn_number` - 1.
  void wait_for_readers(Queue queue, uint32_t turn_number) {
    for (int k = 0; k < locals_; ++k)
      steps_.wait(queue, peer_or_self(k), Counter::kBlockCredit, turn_number);
  }

  void grant(int t) {
    for (int i = 0; i < turns_[t].batch.sources; ++i) {
      if (gets_from(turns_[t], i)) steps_.rail(Op::kGrant, source_of(turns_[t], i), t);
    }
  }

  void push_slices(int t) {
    const Turn& turn = turns_[t];
    for (int k = 1; k < locals_; ++k) {
      const int owner = (local_ + k) % locals_;
      const int peer = rank_of(node_, owner);
      steps_.wait(Queue::kReducePush, peer, Counter::kReduceCredit, static_cast<uint32_t>(t) + 1);
      for (int i = 0; i < turn.batch.sources; ++i) {
        for (int block = 0; block < locals_; ++block) {
          Step& step = move(Op::kCopy, Queue::kReducePush, peer, turn, segment_of(turn, i, owner));
          step.shard = rank_of(target_of(turn, i), block);
          step.from = Space::kGradient;
          step.to = Space::kStaging;
          step.slice = (i * locals_ + block) * locals_ + local_;
          program_->last_gradient_read = static_cast<int>(program_->steps.size()) - 1;
        }
        steps_.signal(Queue::kReducePush, peer, Counter::kReduceArrival,
                      turn.sources_before + static_cast<uint32_t>(i) + 1);
      }
    }
  }

  void accumulate(int t) {
    const Turn& turn = turns_[t];
    if (t == 0 || t >= kAreas) {  // turn 0: 0, all turns of earlier operations
      const uint32_t free = t == 0 ? 0 : static_cast<uint32_t>(t - kAreas) + 1;
      steps_.wait(Queue::kSum, kSelf, Counter::kPartialFree, free);
      if (!options_.read_add) steps_.wait(Queue::kSum, kSelf, Counter::kSeatFree, free);
      if (options_.read_add || (options_.behind_read_adds && t == 0))
        wait_for_readers(Queue::kSum, seats_granted(t));
    }
    if (options_.read_add) zero_empty_seats(t);
    for (int i = 0; i < turn.batch.sources; ++i) {
      for (int k = 1; k < locals_; ++k) {
        steps_.wait(Queue::kSum, rank_of(node_, (local_ + locals_ - k) % locals_),
                    Counter::kReduceArrival, turn.sources_before + static_cast<uint32_t>(i) + 1);
      }
      const int segment = segment_of(turn, i, local_);
      for (int block = 0; block < locals_; ++block) {
        Step& step = move(Op::kAccumulate, Queue::kSum, kSelf, turn, segment);
        step.shard = rank_of(target_of(turn, i), block);
        step.from = Space::kStaging;
        step.slice = (i * locals_ + block) * locals_;
        step.to = is_own(turn, i) ? Space::kSeat : Space::kPartial;
        step.to_slice = (is_own(turn, i) ? segment : i) * locals_ + block;
        program_->last_gradient_read = static_cast<int>(program_->steps.size()) - 1;
      }
      steps_.signal(Queue::kSum, kSelf, Counter::kPartialReady,
                    turn.sources_before + static_cast<uint32_t>(i) + 1);
    }
    if (locals_ > 1 && t + kAreas < count()) {
      steps_.signal(Queue::kSum, kAllPeers, Counter::kReduceCredit,
                    static_cast<uint32_t>(t + kAreas) + 1);
    }
  }

  // The credit that covers turn t: the first one covers both areas.
  uint32_t seats_granted(int t) const {
    return static_cast<uint32_t>(std::max(t + 1, std::min(kAreas, count())));
  }

  bool fills(const Turn& turn, int segment) const {
    return is_seat_filled(turn.batch, locals_, segment, local_);
  }

  void zero_empty_seats(int t) {
    const Turn& turn = turns_[t];
    for (int segment = 0; segment < locals_; ++segment) {
      if (fills(turn, segment)) continue;
      if (t >= kAreas && !fills(turns_[t - kAreas], segment)) continue;  // still zero
      Step& step = steps_.move(Op::kZero, Queue::kSum, kSelf, 0, 0);
      step.to = Space::kSeat;
      step.area = turn.area;
      step.to_slice = segment * locals_;
      step.shards = locals_;
    }
  }

  void put(int t) {
    const Turn& turn = turns_[t];
    for (int i = 0; i < turn.batch.sources; ++i) {
      if (!puts_to(turn, i)) continue;
      const int target = target_of(turn, i);
      const int segment = segment_of(turn, i, local_);
      steps_.wait(Queue::kReduceRail, kSelf, Counter::kPartialReady,
                  turn.sources_before + static_cast<uint32_t>(i) + 1);
      steps_.arrive(RailEvent::kGrant, target, t, 0, 0);
      Step& step = steps_.rail(Op::kPut, target, t);
      step.first_piece = first_piece(turn, segment);
      step.last_piece = last_piece(turn, segment);
      step.area = turn.area;
      step.from = Space::kPartial;
      step.slice = i * locals_;
      step.to = Space::kSeat;
      step.to_slice = segment * locals_;
      step.first_node = target;
      step.shards = locals_;
      step.bytes = put_bytes(turn, segment, target);
    }
  }

  void end(int t) {
    take_seats(t);
    if (options_.read_add) {
      offer_seats(t);
    } else {
      push_blocks(t);
    }
    combine(t);
    if (t + kAreas < count()) {
      if (options_.read_add) {
        wait_for_readers(Queue::kReduceRail, seats_granted(t + kAreas));
      } else {
        steps_.wait(Queue::kReduceRail, kSelf, Counter::kSeatFree, static_cast<uint32_t>(t) + 1);
      }
      grant(t + kAreas);
    }
    for (int i = 0; i < turns_[t].batch.sources; ++i) {
      if (puts_to(turns_[t], i)) {
        steps_.arrive(RailEvent::kConfirm, target_of(turns_[t], i), t, 0, 0);
      }
    }
    steps_.signal(Queue::kReduceRail, kSelf, Counter::kPartialFree, static_cast<uint32_t>(t) + 1);
  }

  void take_seats(int t) {
    const Turn& turn = turns_[t];
    for (int i = 0; i < turn.batch.sources; ++i) {
      if (gets_from(turn, i)) {
        steps_.arrive(RailEvent::kArrival, source_of(turn, i), t, 0,
                      put_bytes(turn, segment_of(turn, i, local_), node_));
        steps_.rail(Op::kConfirm, source_of(turn, i), t);
      }
      steps_.signal(Queue::kReduceRail, kSelf, Counter::kSeatArrival,
                    turn.sources_before + static_cast<uint32_t>(i) + 1);
    }
  }

  void push_blocks(int t) {
    const Turn& turn = turns_[t];
    const uint32_t turn_number = static_cast<uint32_t>(t) + 1;
    for (int k = 0; k < locals_; ++k) {
      steps_.wait(Queue::kUnpack, peer_or_self(k), Counter::kBlockCredit, turn_number);
    }
    for (int i = 0; i < turn.batch.sources; ++i) {
      const Counter ready = is_own(turn, i) ? Counter::kPartialReady : Counter::kSeatArrival;
      steps_.wait(Queue::kUnpack, kSelf, ready, turn.sources_before + static_cast<uint32_t>(i) + 1);
      const int segment = segment_of(turn, i, local_);
      for (int k = 0; k < locals_; ++k) {
        const int keeper = (local_ + k) % locals_;
        Step& step = move(Op::kCopy, Queue::kUnpack, peer_or_self(k), turn, segment);
        step.shard = rank_of(node_, keeper);
        step.from = Space::kSeat;
        step.slice = segment * locals_ + keeper;
        step.to = Space::kBlock;
        step.to_slice = i * locals_ + segment;
      }
    }
    for (int k = 0; k < locals_; ++k) {
      steps_.signal(Queue::kUnpack, peer_or_self(k), Counter::kBlockArrival, turn_number);
    }
    steps_.signal(Queue::kUnpack, kSelf, Counter::kSeatFree, turn_number);
  }

  // Read-add form: "my seats are full".
  void offer_seats(int t) {
    const Turn& turn = turns_[t];
    // Empty seats are zero before the first sum is ready.
    steps_.wait(Queue::kUnpack, kSelf, Counter::kPartialReady, turn.sources_before + 1);
    steps_.wait(Queue::kUnpack, kSelf, Counter::kSeatArrival,
                turn.sources_before + static_cast<uint32_t>(turn.batch.sources));
    for (int k = 0; k < locals_; ++k) {
      steps_.signal(Queue::kUnpack, peer_or_self(k), Counter::kBlockArrival,
                    static_cast<uint32_t>(t) + 1);
    }
  }

  int peer_or_self(int k) const { return k == 0 ? kSelf : rank_of(node_, (local_ + k) % locals_); }

  void combine(int t) {
    const Turn& turn = turns_[t];
    for (int k = 0; k < locals_; ++k) {
      steps_.wait(Queue::kCombine, peer_or_self(k), Counter::kBlockArrival,
                  static_cast<uint32_t>(t) + 1);
    }
    const bool last = turn.batch.first_number + turn.batch.sources == nodes_;
    for (int segment = 0; segment < locals_; ++segment) {
      if (first_piece(turn, segment) == last_piece(turn, segment)) continue;
      Step& step = move(options_.read_add ? Op::kReadAdd : Op::kCombine, Queue::kCombine, kSelf,
                        turn, segment);
      step.shard = program_->rank;
      step.from = options_.read_add ? Space::kSeat : Space::kBlock;
      step.slice = options_.read_add ? segment * locals_ + local_ : segment;
      step.to = last ? Space::kOutput : Space::kTotal;
      step.to_slice = segment;
      step.shards = turn.batch.sources;
      step.first_number = turn.batch.first_number;
    }
    if (t + kAreas < count()) {
      const uint32_t free = static_cast<uint32_t>(t + kAreas) + 1;
      if (locals_ > 1) steps_.signal(Queue::kCombine, kAllPeers, Counter::kBlockCredit, free);
      steps_.signal(Queue::kCombine, kSelf, Counter::kBlockCredit, free);
    }
  }

  void set_advances() {
    const uint32_t turns = static_cast<uint32_t>(count());
    const uint32_t sources =
        turns_.back().sources_before + static_cast<uint32_t>(turns_.back().batch.sources);
    for (Counter counter : {Counter::kPartialReady, Counter::kSeatArrival})
      set_advance(program_, counter, sources);
    for (Counter counter : {Counter::kPartialFree, Counter::kBlockArrival, Counter::kBlockCredit})
      set_advance(program_, counter, turns);
    if (!options_.read_add) set_advance(program_, Counter::kSeatFree, turns);
    if (locals_ == 1) return;
    set_advance(program_, Counter::kReduceCredit, turns);
    set_advance(program_, Counter::kReduceArrival, sources);
  }

  const GroupLayout& layout_;
  const Topology& topology_;
  const NodeReduceOptions& options_;
  Program* program_;
  StepWriter steps_;
  int nodes_;
  int locals_;
  int node_;
  int local_;
  Cut cut_;                             // chunk of the cut = segment
  std::vector<int64_t> element_bytes_;  // by parameter, as gradients
  std::vector<Turn> turns_;
};

}  // namespace

Program plan_node_reduce(const GroupLayout& layout, const Topology& topology, int rank,
                         const NodeReduceOptions& options) {
  Program program =
      start_node_program(Direction::kReduce, layout, topology, rank,
                         {options.segment_bytes, static_cast<int64_t>(options.read_add),
                          static_cast<int64_t>(options.behind_read_adds)});
  for (size_t i = 0; i < options.subset.size(); ++i) {
    program.hash = hash_combine(program.hash, static_cast<uint64_t>(options.subset[i]));
    program.hash = hash_combine(program.hash, static_cast<uint64_t>(options.dtypes[i]));
  }
  NodeReducePlanner(layout, topology, options, &program).plan();
  return program;
}

}  // namespace tide
