// Worked example of the bounced form, 2 ranks, 3 chunks, rank 0 (from now on "arrival" for
// gather_arrival, "credit" for landing_credit):
//   unpack       signal credit to all = 2                  both areas are free
//   own          copy shard 0: shard -> output
//   gather_push  wait credit from 1 >= 2
//   gather_push  copy chunk 0 -> landing[0][0] of 1; signal arrival to 1 = 1
//   gather_push  copy chunk 1 -> landing[1][0] of 1; signal arrival to 1 = 2
//   unpack       wait arrival from 1 >= 1; copy chunk 0 of shard 1: landing[0][1] -> output
//   unpack       signal credit to all = 3                  area 0 again, for chunk 2
//   gather_push  wait credit from 1 >= 3
//   gather_push  copy chunk 2 -> landing[0][0] of 1; signal arrival to 1 = 3
//   unpack       wait arrival from 1 >= 2; copy chunk 1 of shard 1: landing[1][1] -> output
//   unpack       wait arrival from 1 >= 3; copy chunk 2 of shard 1: landing[0][1] -> output
// Push c stands before unpack c - 1: merged into one FIFO, each wait then looks at an earlier
// position of its peer.
#include "backend/plan/gather_plan.h"

#include <algorithm>

#include "backend/layout/hash.h"
#include "backend/plan/cut.h"
#include "backend/plan/own_shard.h"
#include "backend/plan/steps.h"

namespace tide {
namespace {

constexpr int kLandingAreas = 2;

// Pushes from the own shard (or, after a cast, the own place) to the places on every peer.
struct StraightForm {
  Space from = Space::kShard;
  Space to = Space::kSlot;
  Counter credit = Counter::kGatherCredit;
  uint32_t final_value = 1;
};

void push_straight(StepWriter& steps, int last_piece, const StraightForm& form) {
  for (int k = 1; k < steps.ranks(); ++k) {
    steps.wait(Queue::kGatherPush, steps.target(k), form.credit, form.final_value);
    Step& step = steps.move(Op::kCopy, Queue::kGatherPush, steps.target(k), 0, last_piece);
    step.shard = steps.rank();
    step.from = form.from;
    step.to = form.to;
    steps.signal(Queue::kGatherPush, steps.target(k), Counter::kGatherArrival, form.final_value);
  }
  for (int k = 1; k < steps.ranks(); ++k) {
    steps.wait(Queue::kArrive, steps.source(k), Counter::kGatherArrival, form.final_value);
  }
}

// The same by one store to all.
void push_to_all(StepWriter& steps, int last_piece, const StraightForm& form) {
  for (int k = 1; k < steps.ranks(); ++k)
    steps.wait(Queue::kGatherPush, steps.target(k), form.credit, form.final_value);
  Step& step = steps.move(Op::kCopy, Queue::kGatherPush, kAllRanks, 0, last_piece);
  step.shard = steps.rank();
  step.from = form.from;
  step.to = form.to;
  steps.signal(Queue::kGatherPush, kAllPeers, Counter::kGatherArrival, form.final_value);
  for (int k = 1; k < steps.ranks(); ++k)
    steps.wait(Queue::kArrive, steps.source(k), Counter::kGatherArrival, form.final_value);
}

void push_chunk(StepWriter& steps, const Cut& cut, int chunk) {
  const uint32_t granted =
      static_cast<uint32_t>(std::max(chunk + 1, std::min(kLandingAreas, cut.chunks())));
  for (int k = 1; k < steps.ranks(); ++k) {
    // The first grant covers both areas.
    if (chunk == 0 || chunk >= kLandingAreas) {
      steps.wait(Queue::kGatherPush, steps.target(k), Counter::kLandingCredit, granted);
    }
    Step& step = steps.move(Op::kCopy, Queue::kGatherPush, steps.target(k), cut.first(chunk),
                            cut.ends[chunk]);
    step.shard = steps.rank();
    step.from = Space::kShard;
    step.to = Space::kLanding;
    step.area = chunk % kLandingAreas;
    step.slice = steps.rank();
    steps.signal(Queue::kGatherPush, steps.target(k), Counter::kGatherArrival,
                 static_cast<uint32_t>(chunk + 1));
  }
}

void unpack_chunk(StepWriter& steps, const Cut& cut, int chunk) {
  for (int k = 1; k < steps.ranks(); ++k) {
    steps.wait(Queue::kUnpack, steps.source(k), Counter::kGatherArrival,
               static_cast<uint32_t>(chunk + 1));
    Step& step = steps.move(Op::kCopy, Queue::kUnpack, kSelf, cut.first(chunk), cut.ends[chunk]);
    step.shard = steps.source(k);
    step.from = Space::kLanding;
    step.to = Space::kOutput;
    step.area = chunk % kLandingAreas;
    step.slice = steps.source(k);
  }
  if (chunk + kLandingAreas < cut.chunks()) {
    steps.signal(Queue::kUnpack, kAllPeers, Counter::kLandingCredit,
                 static_cast<uint32_t>(chunk + kLandingAreas + 1));
  }
}

void push_bounced(StepWriter& steps, const Cut& cut) {
  for (int chunk = 0; chunk < cut.chunks(); ++chunk) {
    push_chunk(steps, cut, chunk);
    if (chunk > 0) unpack_chunk(steps, cut, chunk - 1);
  }
  unpack_chunk(steps, cut, cut.chunks() - 1);
}

Program plan_to_slot(const GroupLayout& layout, bool to_all, Program program) {
  program.pieces = whole_pieces(gather_items(layout));
  const int count = static_cast<int>(program.pieces.size());
  if (count == 0) return program;
  StepWriter steps(&program);
  const bool cast = needs_cast(layout, program.pieces);
  if (!steps.alone()) steps.signal(Queue::kGatherPush, kAllPeers, Counter::kGatherCredit, 1);
  if (cast) {
    cast_own(steps, layout, program.pieces);
  } else if (!to_all || steps.alone()) {
    copy_own(steps, count, Space::kSlot);
  }
  if (steps.alone()) return program;
  if (cast) {
    steps.signal(Queue::kOwn, kSelf, Counter::kCast, 1);
    steps.wait(Queue::kGatherPush, kSelf, Counter::kCast, 1);
    set_advance(&program, Counter::kCast, 1);
  }
  StraightForm form;
  form.from = cast ? Space::kSlot : Space::kShard;
  if (to_all) {
    push_to_all(steps, count, form);
  } else {
    push_straight(steps, count, form);
  }
  set_advance(&program, Counter::kGatherCredit, 1);
  set_advance(&program, Counter::kGatherArrival, 1);
  return program;
}

Program plan_to_output(const GroupLayout& layout, const GatherOptions& options, Program program) {
  const std::vector<CutItem> items = gather_items(layout);
  CutLimits limits;
  limits.largest_bytes = options.landing_slice_bytes;
  Cut cut = cut_chunks(items, limits);
  const uint32_t chunks = static_cast<uint32_t>(cut.chunks());
  program.pieces = options.bounced ? std::move(cut.pieces) : whole_pieces(items);
  const int count = static_cast<int>(program.pieces.size());
  if (count == 0) return program;
  StepWriter steps(&program);
  const uint32_t first_credit =
      options.bounced ? std::min<uint32_t>(kLandingAreas, chunks) : chunks;
  if (!steps.alone())
    steps.signal(Queue::kUnpack, kAllPeers, Counter::kLandingCredit, first_credit);
  copy_own(steps, count, Space::kOutput);
  if (steps.alone()) return program;
  if (options.bounced) {
    program.areas = static_cast<int>(first_credit);
    program.slice_bytes =
        std::max(kPieceAlignment, options.landing_slice_bytes & ~(kPieceAlignment - 1));
    push_bounced(steps, cut);
  } else {
    push_straight(steps, count, {Space::kShard, Space::kOutput, Counter::kLandingCredit, chunks});
  }
  set_advance(&program, Counter::kLandingCredit, chunks);
  set_advance(&program, Counter::kGatherArrival, chunks);
  return program;
}

}  // namespace

Program plan_gather(const GroupLayout& layout, int rank, const GatherOptions& options) {
  Program program;
  program.direction = Direction::kGather;
  program.ranks = layout.ranks();
  program.rank = rank;
  program.hash = hash_combine(layout.hash(), static_cast<uint64_t>(Direction::kGather));
  program.hash = hash_combine(program.hash, static_cast<uint64_t>(options.destination));
  if (options.destination == Space::kSlot) {
    if (options.to_all) program.hash = hash_combine(program.hash, 1);
    return plan_to_slot(layout, options.to_all, std::move(program));
  }
  program.hash = hash_combine(program.hash, static_cast<uint64_t>(options.landing_slice_bytes));
  return plan_to_output(layout, options, std::move(program));
}

}  // namespace tide
