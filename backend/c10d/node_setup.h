// Where the ranks of a group stand, and the rails between their nodes: found over the store, step
// by step, each by vote, so that all ranks of the group go the same way.
//
// A node is where windows can be opened; `node_size` cuts one host's ranks further. With one node
// there is no network. Between nodes each rank opens the rail of its place in its node (rails.h)
// and meets the ranks of the same place on it. No libtorch here.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "backend/engine/group.h"
#include "backend/plan/topology.h"
#include "transports/fabric.h"

namespace tide {

struct RailOptions {
  std::string rails;                            // TIDE_RAILS
  std::string library;                          // TIDE_UCX_LIBRARY
  std::vector<std::string> library_candidates;  // tried where the system has no UCX
};

struct NodeSetupOptions {
  std::string group;  // for messages
  int rank = 0;
  int size = 1;
  int program_rank = 0;   // of this process in the default group
  int64_t node_size = 0;  // 0: ranks of one host are one node; else program ranks of each
  bool on_gpu = false;    // the group serves a GPU's memory
  RailOptions rail;
  std::chrono::milliseconds timeout{30'000};  // of the group's waits: a node silent for so long is
                                              // lost, after 30 s at the latest
  Deadline deadline;                          // of the set-up
};

// Collective. kUnsupported, with the same reason on all ranks, when the nodes are unequal, a rank
// has no rail or no UCX, or a rail did not come up.
Result<GroupNodes> set_up_nodes(const NodeSetupOptions& options,
                                const std::shared_ptr<KeyValueStore>& store);

}  // namespace tide
