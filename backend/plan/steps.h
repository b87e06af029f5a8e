// Appends steps to a program: one short call per line of a plan's worked example. Internal to
// backend/plan.
#pragma once

#include "backend/plan/program.h"

namespace tide {

class StepWriter {
 public:
  explicit StepWriter(Program* program) : program_(program) {}

  int rank() const { return program_->rank; }
  int ranks() const { return program_->ranks; }
  bool alone() const { return program_->ranks == 1; }

  // The k-th rank (1 <= k < ranks) that this rank pushes to, and the k-th whose bytes it expects:
  // rotated, so that no two ranks start with the same target. In groups of one node.
  int target(int k) const { return (rank() + k) % ranks(); }
  int source(int k) const { return (rank() + ranks() - k) % ranks(); }

  void signal(Queue queue, int peer, Counter counter, uint32_t value) {
    Step& step = append(Op::kSignal, queue, peer);
    step.counter = counter;
    step.value = value;
  }

  void wait(Queue queue, int peer, Counter counter, uint32_t value) {
    Step& step = append(Op::kWait, queue, peer);
    step.counter = counter;
    step.value = value;
  }

  // The caller sets shard, spaces, area and slice.
  Step& move(Op op, Queue queue, int peer, int first_piece, int last_piece) {
    Step& step = append(op, queue, peer);
    step.first_piece = first_piece;
    step.last_piece = last_piece;
    return step;
  }

  // A network step; the caller of a put sets the rest.
  Step& rail(Op op, int node, int round, int part = 0) {
    Step& step = append(op, rail_queue(program_->direction), kSelf);
    step.node = node;
    step.round = static_cast<uint16_t>(round);
    step.part = static_cast<uint16_t>(part);
    return step;
  }

  void arrive(RailEvent event, int node, int round, int part, int64_t bytes) {
    Step& step = rail(Op::kArrive, node, round, part);
    step.event = event;
    step.bytes = bytes;
  }

 private:
  Step& append(Op op, Queue queue, int peer) {
    Step& step = program_->steps.emplace_back();
    step.op = op;
    step.queue = queue;
    step.peer = peer;
    return step;
  }

  Program* program_;
};

// Advance of a counter by `value` in this program.
inline void set_advance(Program* program, Counter counter, uint32_t value) {
  program->advance[static_cast<size_t>(counter)] = value;
}

}  // namespace tide
