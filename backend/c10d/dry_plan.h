// What a vote would say if every rank asked for the same: planning without peers, for `tide check`.
// Pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/engine/group.h"

namespace tide {

struct DryPlan {
  std::vector<PlanAnswer> answers;  // by request; plan: its index
  int shared_slots = 0;             // of the ring
  int64_t shared_slot_bytes = 0;
  int64_t arena_bytes = 0;  // of one rank; the control page is not in it
};

// An arena that is empty so far. ranks >= 1. An error when the requests cannot be voted about.
Result<DryPlan> dry_plan(const std::vector<PlanRequest>& requests, int ranks, int prefetch_depth,
                         const GroupOptions& options);

}  // namespace tide
