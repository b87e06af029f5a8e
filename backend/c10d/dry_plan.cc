#include "backend/c10d/dry_plan.h"

#include <limits>

#include "backend/engine/planning.h"

namespace tide {

Result<DryPlan> dry_plan(const std::vector<PlanRequest>& requests, int ranks, int prefetch_depth,
                         const GroupOptions& options) {
  PlanBallot ballot;
  ballot.requests = requests;
  ballot.prefetch_depth = prefetch_depth;
  ballot.staging_slice_bytes = options.staging_slice_bytes;
  ballot.landing_slice_bytes = options.landing_slice_bytes;
  ballot.available_bytes = options.arena_limit_bytes > 0 ? options.arena_limit_bytes
                                                         : std::numeric_limits<int64_t>::max();
  PlanDecision decision =
      decide(std::vector<PlanBallot>(static_cast<size_t>(ranks), ballot), ArenaState());
  if (!decision.error.is_ok()) return decision.error;
  for (size_t i = 0; i < decision.answers.size(); ++i) {
    if (decision.answers[i].accepted) decision.answers[i].plan = static_cast<int>(i);
  }
  DryPlan plan;
  plan.answers = std::move(decision.answers);
  plan.shared_slots = decision.new_shared_slots;
  plan.shared_slot_bytes = decision.shared_slot_bytes;
  plan.arena_bytes = decision.new_bytes;
  return plan;
}

}  // namespace tide
