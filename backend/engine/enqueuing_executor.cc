#include "backend/engine/enqueuing_executor.h"

#include <algorithm>
#include <utility>

namespace tide {
namespace {

// Many blocks a call: the fabric makes its own batches, and few launches.
constexpr size_t kBlocksACall = 4096;

// What a guard asks while its wait is not over. Runs on the fabric's thread.
struct WaitCheck {
  EngineContext* context;
  std::shared_ptr<OperationState> operation;  // keeps the record
  std::shared_ptr<const GroupLayout> layout;
  int from;
  PeerWatch peers{};

  Status operator()() {
    TIDE_RETURN_IF_ERROR(peers.check(*context->agreement, operation->record(), layout.get()));
    const Status alive = context->fabric().peer_status(from);
    if (alive.is_ok()) return alive;
    return Status(alive.kind(), context->where() + ": " + operation->name() + ": rank " +
                                    std::to_string(from) + ": " + alive.message());
  }
};

Status differences(const EngineContext& context, const OperationState& operation,
                   const GroupLayout* layout) {
  for (int rank = 0; rank < context.ranks(); ++rank) {
    if (rank == context.rank()) continue;
    TIDE_RETURN_IF_ERROR(
        context.agreement->compare(operation.record(), rank, false, layout).status);
  }
  return Status::ok();
}

}  // namespace

EnqueuingExecutor::EnqueuingExecutor(EngineContext* context)
    : Executor(context, &context->fabric()), streams_(context->enqueuing()) {
  batch_ = kBlocksACall;
}

std::vector<int> EnqueuingExecutor::queues_of(const Binding& binding) const {
  std::vector<int> queues;
  const auto add = [&queues](int queue) {
    if (std::find(queues.begin(), queues.end(), queue) == queues.end()) queues.push_back(queue);
  };
  if (!binding.moves.empty()) add(kMoveQueue);
  for (const Step& step : binding.program->steps) add(static_cast<int>(step.queue));
  return queues;
}

int EnqueuingExecutor::lanes(const Binding& binding) const {
  return std::max(1, static_cast<int>(queues_of(binding).size()));
}

void EnqueuingExecutor::run(const std::shared_ptr<OperationState>& operation, void* user_stream) {
  const std::vector<int> queues = queues_of(operation->binding());
  operation->lane_started();
  Status status = enqueue(operation, user_stream, queues);
  if (!status.is_ok()) {
    status =
        context_->break_group(Status(status.kind(), context_->where() + ": " + operation->name() +
                                                        ": " + status.message()),
                              true);
  }
  complete(operation, queues, status);
}

Status EnqueuingExecutor::enqueue(const std::shared_ptr<OperationState>& operation,
                                  void* user_stream, const std::vector<int>& queues) {
  const Binding& binding = operation->binding();
  const Program& program = *binding.program;
  if (program.nodes() > 1)
    return Status(ErrorKind::kInternal, "a program between nodes reached the queues of one node");
  if (!binding.descriptors.empty() && program.ranks > 1) {
    context_->control->publish_table(program.direction, operation->record().sequence,
                                     binding.descriptors, binding.postings);
  }
  if (is_list(operation->record().kind) && program.direction == Direction::kGather)
    place_peer_outputs(binding);
  TIDE_RETURN_IF_ERROR(begin(binding, user_stream, queues));
  std::vector<OperationState::QueuePoint> reads;
  TIDE_RETURN_IF_ERROR(move(binding, queues, &reads));
  for (const Step& step : program.steps) TIDE_RETURN_IF_ERROR(run_step(operation, step));
  std::vector<OperationState::QueuePoint> ends;
  for (const int queue : queues) {
    auto point = streams_->point_of_queue(queue);
    TIDE_RETURN_IF_ERROR(point.status());
    ends.push_back({queue, point.value()});
  }
  if (binding.moves.empty()) reads = ends;
  operation->set_points(std::move(ends), std::move(reads));
  return Status::ok();
}

// The arrive queue touches no memory: it waits for nobody of this rank.
Status EnqueuingExecutor::begin(const Binding& binding, void* user_stream,
                                const std::vector<int>& queues) {
  auto called = streams_->point_of_stream(user_stream);
  TIDE_RETURN_IF_ERROR(called.status());
  for (const int queue : queues) {
    if (queue == static_cast<int>(Queue::kArrive)) continue;
    TIDE_RETURN_IF_ERROR(streams_->wait_for_point(queue, *called.value()));
    if (binding.vacated) TIDE_RETURN_IF_ERROR(streams_->wait_for_point(queue, *binding.vacated));
    for (const std::shared_ptr<OperationState>& earlier : binding.after) {
      for (const OperationState::QueuePoint& end : earlier->ends()) {
        if (end.queue != queue) TIDE_RETURN_IF_ERROR(streams_->wait_for_point(queue, *end.point));
      }
    }
  }
  return Status::ok();
}

// Slot-Reuse's gradients go to the slot first; everything else of the operation comes behind.
Status EnqueuingExecutor::move(const Binding& binding, const std::vector<int>& queues,
                               std::vector<OperationState::QueuePoint>* reads) {
  if (binding.moves.empty()) return Status::ok();
  TIDE_RETURN_IF_ERROR(
      fabric_->copy(kMoveQueue, binding.moves.data(), static_cast<int>(binding.moves.size())));
  for (const CopyBlock& block : binding.moves)
    context_->bytes_copied += static_cast<uint64_t>(block.rows * block.row_bytes);
  auto moved = streams_->point_of_queue(kMoveQueue);
  TIDE_RETURN_IF_ERROR(moved.status());
  for (const int queue : queues) {
    if (queue != kMoveQueue) TIDE_RETURN_IF_ERROR(streams_->wait_for_point(queue, *moved.value()));
  }
  reads->push_back({kMoveQueue, moved.value()});
  return Status::ok();
}

Status EnqueuingExecutor::run_step(const std::shared_ptr<OperationState>& operation,
                                   const Step& step) {
  if (step.op == Op::kWait) return wait(operation, step);
  return issue(operation->binding(), *operation->binding().program, step);
}

Status EnqueuingExecutor::wait(const std::shared_ptr<OperationState>& operation, const Step& step) {
  const int own = context_->rank();
  const int counter = static_cast<int>(step.counter);
  const int from = step.peer == kSelf ? own : step.peer;
  WaitGuard guard;
  guard.timeout = context_->timeout();
  guard.failed = context_->failure.flag();
  guard.what = operation->name() + ": " + control_counter_name(counter) + " from rank " +
               std::to_string(from);
  if (from != own)
    guard.check = WaitCheck{context_, operation, operation->binding().layout, from, {}};
  return fabric_->wait(static_cast<int>(step.queue), context_->control->word(own, counter, from),
                       operation->binding().base[counter] + step.value, guard);
}

void EnqueuingExecutor::place_peer_outputs(const Binding& binding) {
  const int tensors = binding.layout->size();
  peer_outputs_.assign(static_cast<size_t>(context_->ranks()) * tensors, nullptr);
  for (int p = 0; p < tensors && !binding.postings.empty(); ++p) {
    const Posting& posting = binding.postings[p];
    if (posting.allocation < 0) continue;  // no bytes
    const std::shared_ptr<ArenaMemory> memory = context_->allocations->memory(posting.allocation);
    for (int rank = 0; rank < context_->ranks() && memory; ++rank) {
      peer_outputs_[static_cast<size_t>(rank) * tensors + p] = memory->at(rank, posting.offset);
    }
  }
}

// `status` is not OK when the operation could not be enqueued whole: its queues then end by poison.
void EnqueuingExecutor::complete(const std::shared_ptr<OperationState>& operation,
                                 const std::vector<int>& queues, const Status& status) {
  if (queues.empty()) {
    operation->lane_done(status);
    return;
  }
  const std::shared_ptr<const GroupLayout> layout = operation->binding().layout;
  const auto passed = [context = context_, operation, layout, status](bool clean) {
    // What ended before any poison is whole, whatever has failed since.
    Status end = status.is_ok() && !clean ? context->failure.status() : status;
    if (end.is_ok()) {
      const Status differs = differences(*context, *operation, layout.get());
      if (!differs.is_ok()) end = context->break_group(differs, true);
    }
    operation->lane_done(end);
  };
  int unmarked = 0;
  for (const int queue : queues) {
    std::function<void(bool)> mark = passed;
    if (queue == kMoveQueue) {
      mark = [operation, passed](bool clean) {
        operation->lane_passed_reads();
        passed(clean);
      };
    }
    unmarked += streams_->mark(queue, std::move(mark)).is_ok() ? 0 : 1;
  }
  if (unmarked == 0) return;
  const Status broken =
      context_->break_group(Status(ErrorKind::kCuda, context_->where() + ": " + operation->name() +
                                                         ": its end cannot be enqueued"),
                            true);
  // Queues may go on reading and writing what is bound here: it is kept until they are gone.
  kept_.push_back(operation->binding());
  for (; unmarked > 0; --unmarked) operation->lane_done(broken);
}

}  // namespace tide
