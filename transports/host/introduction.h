// How the ranks of a group find each other: from a store to one authenticated socket per pair.
//
// Every rank listens on a socket with a random name and publishes the name; rank 0 publishes the
// group's random token. A rank connects to every lower one and says hello with the token; the lower
// one answers with a welcome. Either side drops a connection of another user or without the token,
// whatever else it says. Afterwards nobody listens any more.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "transports/fabric.h"
#include "transports/host/descriptor.h"
#include "transports/host/host_fabric.h"

namespace tide {

struct PeerLink {
  Descriptor socket;  // sequenced packets, not blocking; empty for the own rank
  // Readable once the peer's process ended (pidfd); empty where the kernel offers none.
  Descriptor process;
  pid_t pid = 0;  // 0: unknown
};

// Why a key of rank `name` ("rank 2") was not in the store: `status` of the read, and for a timeout
// what that says about the rank.
Status absent_rank(const std::string& name, const Status& status);

// links[r] is the connection to rank r. kUnsupported when ranks are on different nodes (the same
// answer on all ranks), kTimeout naming the ranks that did not come.
Result<std::vector<PeerLink>> introduce(const HostFabricOptions& options, KeyValueStore& store);

}  // namespace tide
