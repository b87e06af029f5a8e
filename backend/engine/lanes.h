// The threads of a group over a blocking fabric. Which lane runs which queue:
//
//   kGather   own, gather_push, unpack, arrive of every gather
//   kReduce   reduce_push, sum, unpack, combine of every reduce
//   kGatherRail, kReduceRail
//             rail, reduce_rail: between nodes, so that no push or sum waits behind the network
//   kMove     Slot-Reuse's copies of gradients into the vacated slot: gradients are free although
//             the reduces before them still run
//
// A lane runs its operations in call order and an operation's steps in list order. Both orders are
// the same on all ranks, a program's list is a valid single FIFO, and what an operation waits for
// besides (earlier users of its slot, its own move) was called before it; so no order of progress
// deadlocks. Gather and reduce never block each other but through a slot. Few threads, because a
// step costs less than a wake-up where ranks share cores.
//
// Threads start with a lane's first operation.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "backend/engine/engine_context.h"

namespace tide {

class Lanes {
 public:
  explicit Lanes(EngineContext* context) : context_(context) {}
  ~Lanes() { stop(); }

  // From the calling thread. An operation that several lanes run is submitted to each. A thread
  // that cannot start breaks the group, here and at the peers.
  void submit(Lane lane, std::shared_ptr<OperationState> operation);
  // Runs what was submitted (after a failure that takes no time), then joins. Nothing may be
  // submitted afterwards.
  void stop();

 private:
  struct Worker {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::shared_ptr<OperationState>> queue;
    bool stopping = false;
    std::thread thread;
  };

  Status start(Lane lane, Worker& worker);
  void loop(Lane lane);
  void run(Lane lane, class Executor& executor, const std::shared_ptr<OperationState>& operation);

  EngineContext* const context_;
  std::array<Worker, kLaneCount> workers_;
};

}  // namespace tide
