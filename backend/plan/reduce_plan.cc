// Worked example of area staging, 2 ranks, 3 chunks, rank 0 ("arrival" for reduce_arrival, "credit"
// for reduce_credit):
//   sum          signal credit to all = 2       both areas are free, all earlier sums are done
//   reduce_push  wait credit from 1 >= 2
//   reduce_push  copy chunk 0 of shard 1: gradient -> staging[0][0] of 1; signal arrival to 1 = 1
//   reduce_push  copy chunk 1 of shard 1: gradient -> staging[1][0] of 1; signal arrival to 1 = 2
//   sum          wait arrival from 1 >= 1; accumulate chunk 0: staging[0] + gradient -> output
//   sum          signal credit to all = 3       area 0 again, for chunk 2
//   reduce_push  wait credit from 1 >= 3
//   reduce_push  copy chunk 2 of shard 1: gradient -> staging[0][0] of 1; signal arrival to 1 = 3
//   sum          wait arrival from 1 >= 2; accumulate chunk 1
//   sum          wait arrival from 1 >= 3; accumulate chunk 2
// Leased staging is the same with one area that holds every part, and no credit but the first.
#include "backend/plan/reduce_plan.h"

#include <algorithm>

#include "backend/layout/hash.h"
#include "backend/plan/cut.h"
#include "backend/plan/steps.h"

namespace tide {
namespace {

std::vector<CutItem> reduce_items(const GroupLayout& layout, const ReduceOptions& options) {
  std::vector<CutItem> items;
  items.reserve(options.subset.size());
  for (size_t i = 0; i < options.subset.size(); ++i) {
    const int p = options.subset[i];
    items.push_back({p, layout.parameter(p).shard_numel, dtype_bytes(options.dtypes[i])});
  }
  return items;
}

Cut cut_reduce(const std::vector<CutItem>& items, const ReduceOptions& options) {
  CutLimits limits;
  limits.one_slice = options.areas == 1;
  limits.largest_bytes = limits.one_slice ? packed_bytes(items) : options.staging_slice_bytes;
  limits.smallest_bytes = kSmallestSumBytes;
  limits.wanted_chunks = options.sums;
  return cut_chunks(items, limits);
}

class ReducePlanner {
 public:
  ReducePlanner(Program* program, const Cut& cut, int areas)
      : program_(program),
        steps_(program),
        cut_(cut),
        leased_(areas == 1),
        areas_(leased_ ? 1 : areas) {}

  void write() {
    if (!steps_.alone()) grant_first();
    for (int chunk = 0; chunk < cut_.chunks(); ++chunk) {
      push(chunk);
      if (chunk > 0) sum(chunk - 1);
    }
    sum(cut_.chunks() - 1);
  }

 private:
  uint32_t first_credit() const {
    return static_cast<uint32_t>(leased_ ? 1 : std::min(areas_, cut_.chunks()));
  }
  Counter credit() const { return leased_ ? Counter::kLeaseCredit : Counter::kReduceCredit; }

  // A leased slot is free since the call began; an area only behind the sums of earlier calls.
  void grant_first() {
    steps_.signal(leased_ ? Queue::kReducePush : Queue::kSum, kAllPeers, credit(), first_credit());
  }

  void push(int chunk) {
    const uint32_t arrival = static_cast<uint32_t>(chunk + 1);
    for (int k = 1; k < steps_.ranks(); ++k) {
      const int target = steps_.target(k);
      if (chunk == 0) {
        steps_.wait(Queue::kReducePush, target, credit(), first_credit());
      } else if (!leased_ && chunk >= areas_) {
        steps_.wait(Queue::kReducePush, target, credit(), arrival);
      }
      Step& step = move(Op::kCopy, Queue::kReducePush, target, chunk);
      step.shard = target;
      step.from = Space::kGradient;
      step.to = Space::kStaging;
      step.slice = steps_.rank();
      steps_.signal(Queue::kReducePush, target, Counter::kReduceArrival, arrival);
    }
  }

  void sum(int chunk) {
    for (int k = 1; k < steps_.ranks(); ++k) {
      steps_.wait(Queue::kSum, steps_.source(k), Counter::kReduceArrival,
                  static_cast<uint32_t>(chunk + 1));
    }
    Step& step = move(Op::kAccumulate, Queue::kSum, kSelf, chunk);
    step.shard = steps_.rank();
    step.from = Space::kStaging;
    step.to = Space::kOutput;
    if (!steps_.alone() && !leased_ && chunk + areas_ < cut_.chunks()) {
      steps_.signal(Queue::kSum, kAllPeers, credit(), static_cast<uint32_t>(chunk + areas_ + 1));
    }
  }

  Step& move(Op op, Queue queue, int peer, int chunk) {
    Step& step = steps_.move(op, queue, peer, cut_.first(chunk), cut_.ends[chunk]);
    step.area = chunk % areas_;
    program_->last_gradient_read = static_cast<int>(program_->steps.size()) - 1;
    return step;
  }

  Program* program_;
  StepWriter steps_;
  const Cut& cut_;
  bool leased_;
  int areas_;
};

uint64_t reduce_hash(const GroupLayout& layout, const ReduceOptions& options) {
  uint64_t hash = hash_combine(layout.hash(), static_cast<uint64_t>(Direction::kReduce));
  hash = hash_combine(hash, options.subset.size());
  for (size_t i = 0; i < options.subset.size(); ++i) {
    hash = hash_combine(hash, static_cast<uint64_t>(options.subset[i]) * 256 +
                                  static_cast<uint64_t>(options.dtypes[i]));
  }
  hash = hash_combine(hash, static_cast<uint64_t>(options.areas));
  hash = hash_combine(hash, static_cast<uint64_t>(options.staging_slice_bytes));
  return hash_combine(hash, static_cast<uint64_t>(options.sums));
}

}  // namespace

int64_t packed_shard_bytes(const GroupLayout& layout, const ReduceOptions& options) {
  return packed_bytes(reduce_items(layout, options));
}

Program plan_reduce(const GroupLayout& layout, int rank, const ReduceOptions& options) {
  Program program;
  program.direction = Direction::kReduce;
  program.ranks = layout.ranks();
  program.rank = rank;
  program.hash = reduce_hash(layout, options);
  const std::vector<CutItem> items = reduce_items(layout, options);
  Cut cut = cut_reduce(items, options);
  if (cut.chunks() == 0) return program;
  program.pieces = cut.pieces;
  ReducePlanner(&program, cut, options.areas).write();
  if (program.ranks == 1) return program;

  const bool leased = options.areas == 1;
  const uint32_t chunks = static_cast<uint32_t>(cut.chunks());
  program.areas = leased ? 1 : std::min(options.areas, cut.chunks());
  program.slice_bytes =
      leased ? packed_bytes(items)
             : std::max(kPieceAlignment, options.staging_slice_bytes & ~(kPieceAlignment - 1));
  set_advance(&program, leased ? Counter::kLeaseCredit : Counter::kReduceCredit,
              leased ? 1 : chunks);
  set_advance(&program, Counter::kReduceArrival, chunks);
  return program;
}

}  // namespace tide
