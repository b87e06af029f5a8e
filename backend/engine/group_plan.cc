// Votes over groups, and the slots that they get.
#include <algorithm>
#include <limits>
#include <utility>

#include "backend/engine/group_impl.h"

namespace tide {

Result<std::vector<PlanAnswer>> GroupImpl::plan(const std::vector<PlanRequest>& requests,
                                                int prefetch_depth) {
  std::lock_guard<std::mutex> calling(call_mutex_);
  TIDE_RETURN_IF_ERROR(usable());
  if (prefetch_depth < 0)
    return invalid("prefetch depth must be >= 0, got " + std::to_string(prefetch_depth));
  TIDE_RETURN_IF_ERROR(drain());
  CallRecord record;
  record.kind = CallKind::kPlan;
  Result<uint64_t> sequence = next_sequence();
  if (!sequence.is_ok()) return sequence.status();
  record.sequence = sequence.value();
  context_.control->publish(record);

  arena_.has_area = staging_.memory != nullptr;  // a call may have made it since
  Result<std::vector<PlanBallot>> ballots = exchange(own_ballot(requests, prefetch_depth), record);
  PlanDecision decision;
  if (ballots.is_ok()) decision = decide(ballots.value(), arena_);
  Status error = ballots.is_ok() ? decision.error : ballots.status();
  if (error.is_ok()) error = make_arena(decision);
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
    context_.break_group(
        is_complete ? error : Status(error.kind(), context_.where() + ": plan: " + error.message()),
        true);
    return context_.failure.status();
  }
  arena_.prefetch_depth = std::max(arena_.prefetch_depth, prefetch_depth);
  adopt(requests, &decision);
  return decision.answers;
}

Status GroupImpl::drain() {
  for (const std::shared_ptr<OperationState>& operation : flight_record_.in_flight()) {
    TIDE_RETURN_IF_ERROR(operation->wait(std::nullopt));
  }
  return Status::ok();
}

PlanBallot GroupImpl::own_ballot(const std::vector<PlanRequest>& requests,
                                 int prefetch_depth) const {
  PlanBallot ballot;
  ballot.requests = requests;
  ballot.prefetch_depth = prefetch_depth;
  ballot.staging_slice_bytes = options_.staging_slice_bytes;
  ballot.landing_slice_bytes = options_.landing_slice_bytes;
  ballot.available_bytes = options_.arena_limit_bytes > 0
                               ? options_.arena_limit_bytes - process_arena_bytes()
                               : std::numeric_limits<int64_t>::max();
  return ballot;
}

Result<std::vector<PlanBallot>> GroupImpl::exchange(const PlanBallot& ballot,
                                                    const CallRecord& record) {
  const auto check = [&](int missing_rank) {
    TIDE_RETURN_IF_ERROR(context_.failure.status());
    for (int rank = 0; rank < context_.ranks(); ++rank) {
      if (rank == context_.rank()) continue;
      TIDE_RETURN_IF_ERROR(context_.agreement->compare(record, rank, false, nullptr).status);
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

// Slots and staging of the decision in one window. kUnsupported: a rank has no memory, nothing has
// changed.
Status GroupImpl::make_arena(const PlanDecision& decision) {
  if (decision.new_bytes == 0) return Status::ok();
  Result<std::shared_ptr<ArenaMemory>> created =
      ArenaMemory::create(context_.fabric(), decision.new_bytes, deadline(), arena_bytes_);
  if (!created.is_ok()) {
    const Status& reason = created.status();
    if (reason.kind() == ErrorKind::kTimeout || reason.kind() == ErrorKind::kPeerLost)
      return reason;
    return Status(ErrorKind::kUnsupported, reason.message());
  }
  const std::shared_ptr<ArenaMemory>& memory = created.value();
  int64_t offset = 0;
  const auto add_slot = [&](int64_t bytes, bool shared) {
    Slot& slot = slots_.emplace_back();
    slot.range = {memory, offset, bytes};
    slot.is_shared = shared;
    offset += bytes;
    if (shared) ring_.put(static_cast<int>(slots_.size()) - 1);
  };
  if (decision.replaces_shared) {
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (!slots_[i].is_shared || slots_[i].is_retired) continue;
      slots_[i].is_retired = true;
      ring_.remove(static_cast<int>(i));
      const bool held =
          slots_[i].tenant >= 0 && plans_[slots_[i].tenant].slot == static_cast<int>(i);
      if (!held) slots_[i].range = {};
    }
    arena_.shared_slots = 0;
  }
  for (int i = 0; i < decision.new_shared_slots; ++i) add_slot(decision.shared_slot_bytes, true);
  arena_.shared_slots += decision.new_shared_slots;
  arena_.shared_slot_bytes = decision.shared_slot_bytes;
  for (const int64_t bytes : decision.own_slot_bytes) {
    if (bytes > 0) add_slot(bytes, false);
  }
  if (decision.makes_area) staging_ = {memory, offset, staging_area_bytes()};
  return Status::ok();
}

void GroupImpl::adopt(const std::vector<PlanRequest>& requests, PlanDecision* decision) {
  // make_arena added the slots of their own last, in the requests' order.
  int next_own_slot = static_cast<int>(slots_.size());
  for (const int64_t bytes : decision->own_slot_bytes) next_own_slot -= bytes > 0 ? 1 : 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    PlanAnswer& answer = decision->answers[i];
    if (!answer.accepted) continue;
    answer.plan = static_cast<int>(plans_.size());
    Plan& plan = plans_.emplace_back();
    plan.request = requests[i];
    plan.layout = std::make_shared<GroupLayout>(requests[i].parameters, context_.ranks());
    plan.staging = answer.staging;
    if (decision->own_slot_bytes[i] > 0) plan.own_slot = next_own_slot++;
    if (answer.staging == Staging::kLeased && plan.own_slot < 0) arena_.shared_leased = true;
    context_.agreement->add_plan(requests[i].name);
  }
}

Status GroupImpl::vacate(int plan) {
  std::lock_guard<std::mutex> calling(call_mutex_);
  TIDE_RETURN_IF_ERROR(usable());
  Result<Plan*> found = find_plan(plan, "vacate");
  if (!found.is_ok()) return found.status();
  give_back(*found.value());
  return Status::ok();
}

void GroupImpl::give_back(Plan& plan) {
  if (plan.slot < 0) return;
  Slot& slot = slots_[plan.slot];
  if (slot.is_retired) {
    slot.range = {};  // operations that still use it hold the memory
    plan.vacated_slot = -1;
  } else {
    if (slot.is_shared) ring_.put(plan.slot);
    plan.vacated_slot = plan.slot;
  }
  plan.slot = -1;
}

}  // namespace tide
