// The fabric of one host's processes: shared memory by descriptors, signals by futex. Blocking:
// every call runs on the calling thread; waits sleep.
//
// Owned by one group. One thread of its own (the monitor) hears the peers' sockets and their ends:
// a peer that dies is noticed by its process descriptor or its closed socket, whichever is first,
// also while a forked child of it lives on. In a forked child every call returns an error,
// descriptors are closed and windows are not mapped. Teardown: close() (or the destructor) says
// goodbye and joins the monitor; windows stay mapped until their last owner.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "transports/fabric.h"
#include "transports/host/rank_names.h"

namespace tide {

struct HostFabricOptions {
  int rank = 0;
  int size = 1;
  std::string group;  // in messages and store keys: unique among the groups that share the store
  Deadline deadline;  // of connect_host_fabric
  std::string node;   // ranks with different nodes do not connect; empty: node_identity()
  RankNames names;    // of its ranks, in messages
  // Asked about every 100 ms while connecting and in create_window; its error ends the wait. Null:
  // never.
  std::function<Status()> interrupted;
  // Asked in create_window; an error is this rank's refusal. For tests of votes.
  std::function<Status(int64_t bytes)> refuse_window;
};

// Collective. kUnsupported, the same on all ranks, when they are on different nodes. After an error
// nothing is left.
Result<std::unique_ptr<Fabric>> connect_host_fabric(const HostFabricOptions& options,
                                                    KeyValueStore& store);

// Equal in two processes exactly when they can reach each other's private sockets: boot id and
// network namespace.
std::string node_identity();

}  // namespace tide
