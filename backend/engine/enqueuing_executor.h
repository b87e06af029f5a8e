// Runs programs over a fabric that enqueues: the calling thread walks the list once and puts every
// step on its queue's stream. No lane, no host wait: what a blocking executor does in time, this
// one does in stream order.
//
//   begin     the operation's queues come behind the caller's stream, behind the earlier users of
//             its slot and behind the caller's own use of the slot
//   waits     each has a guard of its own, which the fabric's watch thread asks: deadline, the
//             peers' records (agreement.h), the peer's life
//   end       one point a queue, for the caller's streams and the slot's next user; one mark a
//             queue, whose passing completes the operation
//
// Records are compared by the watch (in waits, and at the marks), so a push may leave before a
// difference is seen: it stays inside the agreed range of the arena, and the group fails.
//
// Called by the group's calling thread alone. Callbacks of marks and guards run on the fabric's
// thread and use the context and the operation only, both of which outlive the fabric's end.
#pragma once

#include <memory>
#include <vector>

#include "backend/engine/executor.h"

namespace tide {

class EnqueuingExecutor : private Executor {
 public:
  explicit EnqueuingExecutor(EngineContext* context);

  // Queues that the operation's steps stand in: so many marks complete it (at least one).
  int lanes(const Binding& binding) const;

  // Enqueues the operation and breaks the group where that fails. `user_stream`: what was enqueued
  // there before comes first.
  void run(const std::shared_ptr<OperationState>& operation, void* user_stream);

  // After the fabric's end: lets go of what queues might have used that could not be drained.
  void drop_kept() { kept_.clear(); }

 private:
  std::vector<int> queues_of(const Binding& binding) const;
  Status enqueue(const std::shared_ptr<OperationState>& operation, void* user_stream,
                 const std::vector<int>& queues);
  Status begin(const Binding& binding, void* user_stream, const std::vector<int>& queues);
  Status move(const Binding& binding, const std::vector<int>& queues,
              std::vector<OperationState::QueuePoint>* reads);
  Status run_step(const std::shared_ptr<OperationState>& operation, const Step& step);
  Status wait(const std::shared_ptr<OperationState>& operation, const Step& step);
  // Where peers' outputs lie: where the own ones do, as lists are allocated alike.
  void place_peer_outputs(const Binding& binding);
  void complete(const std::shared_ptr<OperationState>& operation, const std::vector<int>& queues,
                const Status& status);

  EnqueuingFabric* const streams_;
  std::vector<Binding> kept_;
};

}  // namespace tide
