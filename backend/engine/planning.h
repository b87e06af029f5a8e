// Votes over the groups of one root: which are served, and how much arena that takes. Pure: ballots
// in, decision out, the same on every rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/engine/group.h"

namespace tide {

// What one rank says in a vote.
struct PlanBallot {
  std::vector<PlanRequest> requests;
  int prefetch_depth = 0;
  int64_t staging_slice_bytes = 0;
  int64_t landing_slice_bytes = 0;
  int64_t available_bytes = 0;  // of arena in its process
  // Plans whose groups are gone on this rank, with all storages of their slots. Ascending.
  std::vector<int> retirable;
};

std::string encode(const PlanBallot& ballot);
// Error when the bytes are no ballot.
Result<PlanBallot> decode(const std::string& bytes);

// What the group's arena already holds.
struct ArenaState {
  int shared_slots = 0;
  int64_t shared_slot_bytes = 0;
  bool shared_leased = false;   // a plan leases a shared slot
  int prefetch_depth = -1;      // largest so far
  bool has_area = false;        // of staging
  int64_t node_area_bytes = 0;  // of a group that spans nodes: its staging is always this area
  int64_t freed_bytes = 0;      // by this vote's retirements: available beside what ballots say
};

struct PlanDecision {
  Status error;                     // ranks do not even agree on what is voted about
  std::vector<PlanAnswer> answers;  // by request; `plan` not yet set
  // new_shared_slots of shared_slot_bytes stand in for all earlier ones.
  bool replaces_shared = false;
  int new_shared_slots = 0;
  int64_t shared_slot_bytes = 0;
  std::vector<int64_t> own_slot_bytes;  // by request; 0: no slot of its own
  bool makes_area = false;
  int64_t new_bytes = 0;  // of one rank
};

// Plans that every rank names.
std::vector<int> retired_by_all(const std::vector<PlanBallot>& ballots);

// One slot's bytes in a window.
int64_t align_slot(int64_t bytes);

PlanDecision decide(const std::vector<PlanBallot>& ballots, const ArenaState& arena);

}  // namespace tide
