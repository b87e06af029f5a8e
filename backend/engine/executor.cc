#include "backend/engine/executor.h"

#include <algorithm>
#include <utility>

namespace tide {
namespace {

Lane lane_of(const Program& program, const Step& step) {
  const bool is_reduce = program.direction == Direction::kReduce;
  if (step.queue == rail_queue(program.direction))
    return is_reduce ? Lane::kReduceRail : Lane::kGatherRail;
  return is_reduce ? Lane::kReduce : Lane::kGather;
}

// Between nodes a wait inside the node may be the consequence of a rail's, which then speaks first.
std::chrono::milliseconds with_grace(std::chrono::milliseconds timeout) {
  return timeout + std::min<std::chrono::milliseconds>(timeout / 4, std::chrono::seconds(5));
}

bool is_rail(Lane lane) { return lane == Lane::kGatherRail || lane == Lane::kReduceRail; }

}  // namespace

Executor::Executor(EngineContext* context, Fabric* fabric)
    : context_(context), fabric_(fabric), compared_(static_cast<size_t>(context->ranks())) {
  guard_.failed = context->failure.flag();
  guard_.check = [this] { return check_wait(waiting_from_); };
  rail_guard_.failed = guard_.failed;
  rail_guard_.check = [this] {
    if (call_.operation == nullptr) TIDE_RETURN_IF_ERROR(context_->look_for_interrupt());
    return peers_.check(*context_->agreement, *call_.record, call_.layout);
  };
}

void Executor::begin(const Call& call) {
  call_ = call;
  std::fill(compared_.begin(), compared_.end(), 0);
  peers_ = {};
  rail_guard_.timeout = context_->timeout();
  guard_.timeout = context_->spans_nodes() ? with_grace(context_->timeout()) : context_->timeout();
}

Status Executor::run(OperationState& operation, Lane lane) {
  const Binding& binding = operation.binding();
  begin({&operation.record(), &operation, binding.layout.get()});
  for (const std::shared_ptr<OperationState>& earlier : binding.after)
    TIDE_RETURN_IF_ERROR(earlier->wait(std::nullopt));
  if (lane == Lane::kMove) return run_move(operation);
  if (is_rail(lane)) return run_program(operation, *binding.program, lane);

  if (!binding.moves.empty()) {
    operation.wait_moved();
    TIDE_RETURN_IF_ERROR(context_->failure.status());
  }
  const Program* program = binding.program.get();
  if (!binding.descriptors.empty() && program->ranks > 1) {
    context_->control->publish_table(program->direction, operation.record().sequence,
                                     binding.descriptors, binding.postings);
  }
  if (binding.bounced && !program->steps.empty() && program->ranks > 1) {
    TIDE_RETURN_IF_ERROR(choose_form(operation, &program));
  }
  if ((program->direction == Direction::kReduce) != (lane == Lane::kReduce))
    return Status(ErrorKind::kInternal, "a program reached another lane");
  TIDE_RETURN_IF_ERROR(run_program(operation, *program, lane));
  return unpack(binding);
}

Status Executor::unpack(const Binding& binding) {
  if (binding.unpacks.empty()) return Status::ok();
  for (const CopyBlock& block : binding.unpacks)
    context_->bytes_copied += static_cast<uint64_t>(block.rows * block.row_bytes);
  return fabric_->copy(static_cast<int>(Queue::kUnpack), binding.unpacks.data(),
                       static_cast<int>(binding.unpacks.size()));
}

Status Executor::run_move(OperationState& operation) {
  const std::vector<CopyBlock>& moves = operation.binding().moves;
  TIDE_RETURN_IF_ERROR(fabric_->copy(kMoveQueue, moves.data(), static_cast<int>(moves.size())));
  uint64_t bytes = 0;
  for (const CopyBlock& block : moves) bytes += static_cast<uint64_t>(block.rows * block.row_bytes);
  context_->bytes_copied += bytes;
  operation.lane_passed_reads();
  return Status::ok();
}

Status Executor::run_program(OperationState& operation, const Program& program, Lane lane) {
  const Binding& binding = operation.binding();
  const bool reads_caller_memory = binding.moves.empty();
  int last_read = -1;
  if (program.direction == Direction::kReduce) {
    last_read = program.last_gradient_read;
  } else if (!is_rail(lane)) {
    last_read = static_cast<int>(program.steps.size()) - 1;
    while (last_read >= 0 && (program.steps[last_read].op == Op::kSignal ||
                              program.steps[last_read].op == Op::kWait ||
                              is_network_step(program.steps[last_read].op) ||
                              program.steps[last_read].from != Space::kShard)) {
      --last_read;
    }
  }
  for (int i = 0; i < static_cast<int>(program.steps.size()); ++i) {
    if (lane_of(program, program.steps[i]) != lane) continue;
    TIDE_RETURN_IF_ERROR(run_step(binding, program, program.steps[i]));
    if (i == last_read && reads_caller_memory) operation.lane_passed_reads();
  }
  // A rail's last step is its drain: no put of a gather reads its shards any more.
  if (lane == Lane::kGatherRail) operation.lane_passed_reads();
  if (is_rail(lane)) context_->network().end(rail_operation());
  return Status::ok();
}

Status Executor::run_step(const Binding& binding, const Program& program, const Step& step) {
  switch (step.op) {
    case Op::kWait: {
      const int counter = static_cast<int>(step.counter);
      const int from = step.peer == kSelf ? context_->rank() : step.peer;
      return wait(static_cast<int>(step.queue), counter, from, binding.base[counter] + step.value);
    }
    case Op::kArrive:
      return arrive(step);
    case Op::kDrain:
      return drain();
    default:
      return issue(binding, program, step);
  }
}

Status Executor::issue(const Binding& binding, const Program& program, const Step& step) {
  const int counter = static_cast<int>(step.counter);
  switch (step.op) {
    case Op::kCopy:
      return copy(binding, program, step);
    case Op::kCast:
      return cast(binding, program, step);
    case Op::kAccumulate:
      return accumulate(binding, program, step);
    case Op::kSignal:
      return signal(static_cast<int>(step.queue), counter, step.peer,
                    binding.base[counter] + step.value);
    case Op::kCombine:
      return combine(binding, program, step);
    case Op::kReadAdd:
      return read_add(binding, program, step);
    case Op::kZero:
      return zero(binding, program, step);
    case Op::kPut:
      return put(binding, program, step);
    case Op::kConfirm:
      return tell(step.node, {EventKind::kConfirm, rail_operation(), step.round, step.part}, 1);
    case Op::kGrant:
      return tell(step.node, {EventKind::kGrant, rail_operation(), step.round, step.part}, 1);
    case Op::kWait:
    case Op::kArrive:
    case Op::kDrain:
      break;  // they hold the queue up; run_step's
  }
  return Status(ErrorKind::kInternal, "unknown step");
}

// Every rank says where its outputs lie and grants the areas in one signal: the bounced form's
// first step. When all have spoken, all decide alike. What the straight form grants beyond that
// follows with its own first step.
Status Executor::choose_form(OperationState& operation, const Program** program) {
  const Binding& binding = operation.binding();
  const Step& grant = binding.bounced->steps.front();
  if (grant.op != Op::kSignal || grant.peer != kAllPeers) {
    return Status(ErrorKind::kInternal,
                  "a bounced gather does not begin with a grant to all peers");
  }
  const int counter = static_cast<int>(grant.counter);
  const int queue = static_cast<int>(grant.queue);
  const uint32_t value = binding.base[counter] + grant.value;
  TIDE_RETURN_IF_ERROR(signal(queue, counter, kAllPeers, value));
  bool straight = !binding.postings.empty();
  for (int k = 1; k < context_->ranks(); ++k) {
    const int peer = (context_->rank() + k) % context_->ranks();
    TIDE_RETURN_IF_ERROR(wait(queue, counter, peer, value));
    straight = straight && context_->control->table_is_posted(peer, Direction::kGather);
  }
  if (!straight) {
    *program = binding.bounced.get();
    return Status::ok();
  }
  return resolve_peer_outputs(binding);
}

Status Executor::resolve_peer_outputs(const Binding& binding) {
  const int tensors = binding.layout->size();
  peer_outputs_.assign(static_cast<size_t>(context_->ranks()) * tensors, nullptr);
  int64_t last_allocation = -1;
  std::shared_ptr<ArenaMemory> memory;
  for (int rank = 0; rank < context_->ranks(); ++rank) {
    if (rank == context_->rank()) continue;
    for (int p = 0; p < tensors; ++p) {
      const Posting posting = context_->control->posting(rank, p);
      if (posting.allocation < 0) continue;
      if (posting.allocation != last_allocation)
        memory = context_->allocations->memory(posting.allocation);
      last_allocation = posting.allocation;
      const Parameter& parameter = binding.layout->parameter(p);
      const int64_t bytes = parameter.unsharded_numel * dtype_bytes(parameter.dtype);
      if (!memory || posting.offset < 0 || posting.offset > memory->bytes() - bytes) {
        return Status(ErrorKind::kInternal, context_->where() + ": rank " + std::to_string(rank) +
                                                " posted '" + parameter.name + "' at " +
                                                std::to_string(posting.offset) + " of allocation " +
                                                std::to_string(posting.allocation) +
                                                ", which has no such range here");
      }
      peer_outputs_[static_cast<size_t>(rank) * tensors + p] = memory->at(rank, posting.offset);
    }
  }
  return Status::ok();
}

Status Executor::signal(int queue, int counter, int peer, uint32_t value) {
  const int own = context_->rank();
  if (peer != kAllPeers) {
    const int owner = peer == kSelf ? own : peer;
    return fabric_->signal(queue, context_->control->word(owner, counter, own), value);
  }
  for (const int owner : context_->peers()) {
    TIDE_RETURN_IF_ERROR(
        fabric_->signal(queue, context_->control->word(owner, counter, own), value));
  }
  return Status::ok();
}

Status Executor::wait(int queue, int counter, int from, uint32_t value) {
  const uint32_t* word = context_->control->word(context_->rank(), counter, from);
  // Other side: the fabric's signal, a release at least, behind the copies that it speaks for.
  if (static_cast<int32_t>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) < 0) {
    waiting_from_ = from;
    if (call_.operation != nullptr) call_.operation->set_waiting({counter, from, value});
    const Clock::time_point begin = Clock::now();
    const Status status = fabric_->wait(queue, word, value, guard_);
    if (call_.operation != nullptr)
      context_->note_wait(*call_.operation, control_counter_name(counter), from, begin);
    if (!status.is_ok()) return explain(status, counter, from, value);
    if (call_.operation != nullptr) call_.operation->set_waiting({});
  }
  if (from == context_->rank() || compared_[from]) return Status::ok();
  compared_[from] = 1;
  return context_->agreement->compare(*call_.record, from, true, call_.layout).status;
}

// Runs about every 100 ms in a wait. What a peer's record says matters before that it left: it may
// have left over it.
Status Executor::check_wait(int from) {
  if (call_.operation == nullptr) TIDE_RETURN_IF_ERROR(context_->look_for_interrupt());
  TIDE_RETURN_IF_ERROR(peers_.check(*context_->agreement, *call_.record, call_.layout));
  return fabric_->peer_status(from);
}

Status Executor::explain(const Status& status, int counter, int from, uint32_t value) const {
  const Status broken = context_->failure.status();
  if (!broken.is_ok()) return broken;
  if (status.kind() == ErrorKind::kInvalidUse) return status;  // Agreement's sentence, complete
  const std::string call = call_.operation != nullptr
                               ? call_.operation->name()
                               : context_->agreement->describe(*call_.record) + " (call " +
                                     std::to_string(call_.record->sequence) + ")";
  const uint32_t got =
      __atomic_load_n(context_->control->word(context_->rank(), counter, from), __ATOMIC_RELAXED);
  std::string text = context_->where() + ": " + call + ": ";
  if (status.kind() == ErrorKind::kTimeout)
    text += "waited " + std::to_string(guard_.timeout.count()) + " ms for ";
  text += std::string(control_counter_name(counter)) + " from rank " + std::to_string(from) +
          ", wanted " + std::to_string(value) + ", got " + std::to_string(got);
  if (status.kind() == ErrorKind::kTimeout) {
    text += "; that rank has made " + std::to_string(context_->control->calls(from)) +
            " calls, this is call " + std::to_string(call_.record->sequence) +
            " counted from 0: it is stopped, slow or has left this call out";
  } else {
    text += ": " + status.message();
  }
  return Status(status.kind(), std::move(text));
}

Status Executor::meet(const CallRecord& record, uint32_t value, const GroupLayout* layout) {
  begin({&record, nullptr, layout});
  TIDE_RETURN_IF_ERROR(context_->failure.status());
  TIDE_RETURN_IF_ERROR(signal(kCallerQueue, kMeetCounter, kAllPeers, value));
  for (const int peer : context_->peers())
    TIDE_RETURN_IF_ERROR(wait(kCallerQueue, kMeetCounter, peer, value));
  return Status::ok();
}

}  // namespace tide
