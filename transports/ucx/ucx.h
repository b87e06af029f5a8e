// The network over UCX, as the rest of tide sees it: a rail per process, and one Network per group
// on it. No UCX header is needed to include this. Where tide was built without UCX's headers every
// call answers with that reason.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "transports/network.h"
#include "transports/node_names.h"

namespace tide {

class UcxRail;  // shared by the groups of a process; ends, with its thread, after the last of them

struct UcxRailOptions {
  std::string device;   // as rails.h names it: "rail0", "mlx5_3:1"
  bool rdma = false;    // InfiniBand or RoCE device; otherwise tcp over that interface
  std::string library;  // TIDE_UCX_LIBRARY: this file and no other
  std::vector<std::string> library_candidates;  // tried after the system's: the wheel's libucp.so.0
  int64_t window_bytes = 4 << 20;               // most bytes under way on this rail
  int64_t chunk_bytes = 512 << 10;              // one put of UCX
  std::chrono::milliseconds heartbeat{500};
};

Result<std::shared_ptr<UcxRail>> open_ucx_rail(const UcxRailOptions& options);

struct UcxGroupOptions {
  std::string name;  // of the process group, for messages
  int node = 0;
  int nodes = 1;
  NodeNames names;  // for messages
  int rail = 0;     // index of this process's rail among its node's; equal on all nodes
  std::shared_ptr<KeyValueStore> store;  // keys are private to this group and this life of it
  std::chrono::milliseconds peer_timeout{30'000};  // a peer that is silent for so long is lost
  std::string refusal;  // why this rank has no rail: told to all nodes instead of a hello
};

// Collective over the group's nodes: everyone comes up or everyone gets the same reason, which
// names the node. Worker addresses go over the store; each pair of nodes has moved and checked real
// bytes before this returns OK. `rail` may be null with a refusal.
Result<std::unique_ptr<Network>> connect_ucx_group(std::shared_ptr<UcxRail> rail,
                                                   const UcxGroupOptions& options,
                                                   Deadline deadline);

// Empty, or why there is no UCX in this build.
std::string ucx_missing_from_build();

}  // namespace tide
