// Plans whose FSDP2 groups are gone, and the slots that they held.
//
// A model dies at another time on every rank (garbage collection), so a rank only notes it; a vote
// retires what all ranks have noted, at one place of their call order. A slot to which a storage is
// still bound somewhere keeps its plan: its bytes are somebody's parameters.
#include <algorithm>

#include "backend/engine/group_impl.h"

namespace tide {
namespace {

constexpr int kLongestPause = 1024;  // calls

}  // namespace

void GroupImpl::forget(int plan) {
  std::lock_guard<std::mutex> lock(forgotten_mutex_);
  forgotten_.insert(plan);
}

std::vector<int> GroupImpl::retirable() const {
  std::vector<int> result;
  std::lock_guard<std::mutex> lock(forgotten_mutex_);
  for (const auto& [number, plan] : plans_) {
    if (forgotten_.count(number) > 0 && plan.lease.expired()) result.push_back(number);
  }
  return result;
}

int64_t GroupImpl::retire(const std::vector<int>& plans) {
  if (plans.empty()) return 0;
  const int64_t before = slot_memory_bytes();
  for (const int number : plans) {
    const auto found = plans_.find(number);
    if (found == plans_.end()) continue;
    // Nobody says on which stream a deleted model was last used.
    if (enqueuing_ && found->second.slot >= 0) (void)context_.enqueuing()->settle();
    (void)give_back(found->second, nullptr);
    if (found->second.own_slot >= 0) slots_.erase(found->second.own_slot);
    plans_.erase(found);
    context_.agreement->remove_plan(number);
    std::lock_guard<std::mutex> lock(forgotten_mutex_);
    forgotten_.erase(number);
  }
  plan_count_ = static_cast<int64_t>(plans_.size());
  arena_.prefetch_depth = -1;
  arena_.shared_leased = false;
  bool ring_is_used = false;
  for (const auto& [number, plan] : plans_) {
    if (!plan.uses_ring) continue;
    ring_is_used = true;
    arena_.prefetch_depth = std::max(arena_.prefetch_depth, plan.prefetch_depth);
    arena_.shared_leased = arena_.shared_leased || plan.staging == Staging::kLeased;
  }
  if (!ring_is_used) {
    retire_shared_slots();
    arena_.shared_slot_bytes = 0;
  }
  return before - slot_memory_bytes();
}

int64_t GroupImpl::slot_memory_bytes() const {
  std::set<const ArenaMemory*> seen;
  int64_t bytes = 0;
  for (const auto& [number, slot] : slots_) {
    if (seen.insert(slot.range.memory.get()).second) bytes += slot.range.memory->bytes();
  }
  return bytes;
}

// A program that has too few slots for good asks rarely: each vote that finds none doubles the
// calls until the next. All of it follows from calls and votes, so it is equal on all ranks.
Status GroupImpl::look_for_slots(int plan) {
  if (slotless_calls_to_skip_ > 0) {
    --slotless_calls_to_skip_;
    return Status::ok();
  }
  TIDE_RETURN_IF_ERROR(vote_on({}, 0, plan).status());
  slotless_pause_ = ring_.size() > 0 ? 0 : std::min(2 * slotless_pause_ + 1, kLongestPause);
  slotless_calls_to_skip_ = slotless_pause_;
  return Status::ok();
}

}  // namespace tide
