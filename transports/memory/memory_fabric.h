// The fabric inside one process: ranks are threads, windows are ordinary memory. For tests of
// everything above the seam, and the reference for what a fabric does. Blocking, like host.
//
// All ranks' fabrics are made together and may be closed and destroyed in any order, each by its
// own thread. An event about a peer (failure, goodbye, death) is told by a thread of the fabric
// that hears it, never by the peer's.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "transports/fabric.h"

namespace tide {

struct MemoryFabricOptions {
  // Asked by each rank in create_window; an error is that rank's refusal. For tests of votes.
  std::function<Status(int rank, int64_t bytes)> refuse_window;
  // Emulated: a copy to Window::all() writes every rank's part, a read-add adds them in the order
  // of ranks. `refuse_multicast` as above, in open_to_all.
  bool multicast = false;
  std::function<Status(int rank)> refuse_multicast;
};

// fabrics[r] is rank r's.
std::vector<std::unique_ptr<Fabric>> make_memory_fabrics(int ranks,
                                                         const MemoryFabricOptions& options = {});

// What peers see when a rank's process dies: its fabric ends without a goodbye. `fabric` came from
// make_memory_fabrics.
void break_memory_fabric(Fabric& fabric);

}  // namespace tide
