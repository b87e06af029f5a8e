// A collective exchange of one descriptor a rank over the sockets of a host fabric, with the votes
// that make it all or nothing: what its own windows are made by, for fabrics whose memory is not
// the host's.
#pragma once

#include <functional>
#include <vector>

#include "transports/fabric.h"
#include "transports/host/descriptor.h"

namespace tide {

struct PartExchange {
  int64_t bytes = 0;  // must be equal on all ranks
  // This rank's part, or why there is none. An empty descriptor where only the vote matters.
  std::function<Result<Descriptor>()> make;
  // Takes all ranks' parts, parts[r] rank r's, the own one included; called when every rank has
  // one.
  std::function<Status(const std::vector<const Descriptor*>& parts)> use;
};

// Every rank calls it in the same order, also between create_window calls. An error of `make` or
// `use` on any rank is an error on all of them, with that rank's reason; what a rank has put to use
// by then, it gives up. `host` comes from connect_host_fabric.
Status exchange_parts(Fabric& host, const PartExchange& exchange, Deadline deadline);

// A yes or no of all ranks; the first refusing rank's reason.
inline Status vote_on(Fabric& host, const Status& own, Deadline deadline) {
  PartExchange exchange;
  exchange.make = [&]() -> Result<Descriptor> {
    TIDE_RETURN_IF_ERROR(own);
    return Descriptor();
  };
  exchange.use = [](const std::vector<const Descriptor*>&) { return Status::ok(); };
  return exchange_parts(host, exchange, deadline);
}

}  // namespace tide
