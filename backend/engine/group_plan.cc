// Votes over groups, and the slots that they get.
#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "backend/engine/group_impl.h"

namespace tide {
namespace {

constexpr std::chrono::milliseconds kSlice{100};  // between looks for an interrupt

}  // namespace

Result<std::vector<PlanAnswer>> GroupImpl::plan(const std::vector<PlanRequest>& requests,
                                                int prefetch_depth) {
  std::lock_guard<CallMutex> calling(call_mutex_);
  TIDE_RETURN_IF_ERROR(usable());
  if (prefetch_depth < 0)
    return invalid("prefetch depth must be >= 0, got " + std::to_string(prefetch_depth));
  return vote_on(requests, prefetch_depth, -1);
}

Result<std::vector<PlanAnswer>> GroupImpl::vote_on(const std::vector<PlanRequest>& requests,
                                                   int prefetch_depth, int cause) {
  TIDE_RETURN_IF_ERROR(drain());
  CallRecord record;
  record.kind = CallKind::kPlan;
  record.plan = cause;
  Result<uint64_t> sequence = next_sequence();
  if (!sequence.is_ok()) return sequence.status();
  record.sequence = sequence.value();
  announce(record);
  context_.control->publish(record);

  arena_.node_area_bytes = node_area_.bytes;
  arena_.has_area = staging_.memory != nullptr;  // a call may have made it since
  Result<std::vector<PlanBallot>> ballots = exchange(own_ballot(requests, prefetch_depth), record);
  PlanDecision decision;
  if (ballots.is_ok()) {
    // No rank has an operation in flight: each drained its own before it sent its ballot.
    arena_.freed_bytes = retire(retired_by_all(ballots.value()));
    decision = decide(ballots.value(), arena_);
  }
  Status error = ballots.is_ok() ? decision.error : ballots.status();
  if (error.is_ok()) error = drop_regions();
  if (error.is_ok()) error = make_arena(decision);
  if (error.is_ok()) error = drop_regions();
  if (error.is_ok() && context_.spans_nodes()) context_.network().end(rail_operation_of(record));
  if (error.kind() == ErrorKind::kUnsupported) {
    // A rank has no memory for it: every rank got this answer.
    for (PlanAnswer& answer : decision.answers) {
      if (!answer.accepted) continue;
      answer = PlanAnswer{};
      answer.reason = error.message();
    }
    return decision.answers;
  }
  if (!error.is_ok()) {
    // Agreement's sentence begins so by itself.
    const bool is_complete = error.message().rfind(context_.where(), 0) == 0;
    return context_.break_group(
        is_complete ? error : Status(error.kind(), context_.where() + ": plan: " + error.message()),
        true);
  }
  arena_.prefetch_depth = std::max(arena_.prefetch_depth, prefetch_depth);
  adopt(requests, prefetch_depth, &decision);
  return decision.answers;
}

Status GroupImpl::wait_for(OperationState& operation) const {
  while (true) {
    const Status status = operation.wait(kSlice);
    if (operation.is_done()) return operation.status();
    if (status.kind() != ErrorKind::kTimeout) return status;
    TIDE_RETURN_IF_ERROR(context_.look_for_interrupt());
  }
}

Status GroupImpl::drain() {
  for (const std::shared_ptr<OperationState>& operation : flight_record_.in_flight()) {
    TIDE_RETURN_IF_ERROR(wait_for(*operation));
  }
  return Status::ok();
}

PlanBallot GroupImpl::own_ballot(const std::vector<PlanRequest>& requests,
                                 int prefetch_depth) const {
  PlanBallot ballot;
  ballot.requests = requests;
  for (PlanRequest& request : ballot.requests) {
    if (!enqueuing_ || !request.refusal.empty() || !request.serve_reduce) continue;
    // The kernels do not add every type.
    if (!check_sum({request.gradient_dtype}, request.gradient_dtype, {}).is_ok()) {
      request.refusal = std::string("gradients of ") + dtype_name(request.gradient_dtype) +
                        " cannot be summed on a GPU";
    }
  }
  ballot.prefetch_depth = prefetch_depth;
  ballot.staging_slice_bytes = options_.staging_slice_bytes;
  ballot.landing_slice_bytes = options_.landing_slice_bytes;
  ballot.available_bytes = options_.arena_limit_bytes > 0
                               ? options_.arena_limit_bytes - process_arena_bytes()
                               : std::numeric_limits<int64_t>::max();
  ballot.retirable = retirable();
  return ballot;
}

Result<std::vector<PlanBallot>> GroupImpl::exchange(const PlanBallot& ballot,
                                                    const CallRecord& record) {
  const Clock::time_point since = Clock::now();
  const auto check = [&](int missing_rank) {
    TIDE_RETURN_IF_ERROR(context_.failure.status());
    TIDE_RETURN_IF_ERROR(context_.look_for_interrupt());
    for (int rank = 0; rank < context_.ranks(); ++rank) {
      if (rank == context_.rank()) continue;
      TIDE_RETURN_IF_ERROR(context_.agreement->compare(record, rank, false, nullptr).status);
      TIDE_RETURN_IF_ERROR(context_.agreement->refused_instead(record, rank, since));
    }
    return context_.fabric().peer_status(missing_rank);
  };
  Result<std::vector<std::string>> texts = vote_.exchange(encode(ballot), deadline(), check);
  if (!texts.is_ok()) return texts.status();
  std::vector<PlanBallot> ballots;
  for (const std::string& text : texts.value()) {
    Result<PlanBallot> decoded = decode(text);
    if (!decoded.is_ok()) {
      return Status(decoded.status().kind(),
                    "rank " + std::to_string(ballots.size()) + ": " + decoded.status().message());
    }
    ballots.push_back(std::move(decoded.value()));
  }
  return ballots;
}

Result<std::shared_ptr<ArenaMemory>> GroupImpl::make_memory(int64_t bytes) {
  if (bytes == 0) return std::shared_ptr<ArenaMemory>();
  Result<std::shared_ptr<ArenaMemory>> created = create_memory(bytes, true);
  if (created.is_ok() || is_no_refusal(created.status())) return created;
  return Status(ErrorKind::kUnsupported, created.status().message());
}

// Slots and staging of the decision. A window for each of what goes together: the ring with the
// last plan that uses it, slots of groups that stay unsharded with their root, staging with the
// process group. kUnsupported: a rank has no memory, no slot has changed.
Status GroupImpl::make_arena(const PlanDecision& decision) {
  int64_t own_bytes = 0;
  for (const int64_t bytes : decision.own_slot_bytes) own_bytes += bytes;
  const auto shared = make_memory(decision.new_shared_slots * decision.shared_slot_bytes);
  if (!shared.is_ok()) return shared.status();
  const auto own = make_memory(own_bytes);
  if (!own.is_ok()) return own.status();
  const auto staging = make_memory(decision.makes_area ? staging_area_bytes() : 0);
  if (!staging.is_ok()) return staging.status();
  if (context_.spans_nodes()) TIDE_RETURN_IF_ERROR(open_to_all(staging.value().get()));
  for (const auto& slots : {shared.value(), own.value()})
    TIDE_RETURN_IF_ERROR(open_to_all(slots.get()));

  const auto add_slot = [&](const std::shared_ptr<ArenaMemory>& memory, int64_t offset,
                            int64_t bytes) {
    Slot& slot = slots_[next_slot_];
    slot.range = {memory, offset, bytes};
    slot.is_shared = memory == shared.value();
    if (slot.is_shared) ring_.put(next_slot_);
    ++next_slot_;
  };
  if (decision.replaces_shared) retire_shared_slots();
  for (int i = 0; i < decision.new_shared_slots; ++i)
    add_slot(shared.value(), i * decision.shared_slot_bytes, decision.shared_slot_bytes);
  arena_.shared_slots += decision.new_shared_slots;
  arena_.shared_slot_bytes = decision.shared_slot_bytes;
  int64_t offset = 0;
  for (const int64_t bytes : decision.own_slot_bytes) {
    if (bytes == 0) continue;
    add_slot(own.value(), offset, bytes);
    offset += bytes;
  }
  if (decision.makes_area) staging_ = {staging.value(), 0, staging_area_bytes()};
  return Status::ok();
}

// They never go out again; those that are held go when they are given back.
void GroupImpl::retire_shared_slots() {
  for (auto slot = slots_.begin(); slot != slots_.end();) {
    const auto tenant = plans_.find(slot->second.tenant);
    const bool held = tenant != plans_.end() && tenant->second.slot == slot->first;
    if (slot->second.is_shared) {
      slot->second.is_retired = true;
      ring_.remove(slot->first);
    }
    slot = slot->second.is_retired && !held ? slots_.erase(slot) : std::next(slot);
  }
  arena_.shared_slots = 0;
}

void GroupImpl::adopt(const std::vector<PlanRequest>& requests, int prefetch_depth,
                      PlanDecision* decision) {
  // make_arena added the slots of their own last, in the requests' order.
  int next_own_slot = next_slot_;
  for (const int64_t bytes : decision->own_slot_bytes) next_own_slot -= bytes > 0 ? 1 : 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    PlanAnswer& answer = decision->answers[i];
    if (!answer.accepted) continue;
    answer.plan = next_plan_++;
    Plan& plan = plans_[answer.plan];
    plan.request = requests[i];
    plan.layout = std::make_shared<GroupLayout>(requests[i].parameters, context_.ranks());
    plan.staging = answer.staging;
    plan.prefetch_depth = prefetch_depth;
    if (decision->own_slot_bytes[i] > 0) plan.own_slot = next_own_slot++;
    plan.uses_ring = plan.own_slot < 0 && answer.slot_bytes > 0;
    if (answer.staging == Staging::kLeased && plan.own_slot < 0) arena_.shared_leased = true;
    context_.agreement->add_plan(answer.plan, requests[i].name);
  }
  plan_count_ = static_cast<int64_t>(plans_.size());
}

Status GroupImpl::vacate(int plan, void* stream) {
  std::lock_guard<CallMutex> calling(call_mutex_);
  TIDE_RETURN_IF_ERROR(usable());
  Result<Plan*> found = find_plan(plan, "vacate");
  if (!found.is_ok()) return found.status();
  return give_back(*found.value(), stream);
}

Status GroupImpl::give_back(Plan& plan, void* stream) {
  if (plan.slot < 0) return Status::ok();
  Slot& slot = slots_[plan.slot];
  plan.vacated_slot = slot.is_retired ? -1 : plan.slot;
  Status used;
  if (enqueuing_) {
    auto point = context_.enqueuing()->point_of_stream(stream);
    used = point.status();
    if (point.is_ok()) slot.vacated = point.value();
  }
  if (slot.is_retired) {
    slots_.erase(plan.slot);  // operations that still use it hold the memory
  } else if (slot.is_shared) {
    ring_.put(plan.slot);
  }
  plan.slot = -1;
  return used;
}

}  // namespace tide
