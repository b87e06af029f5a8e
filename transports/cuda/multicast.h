// One address for all ranks' parts of a window: NVLink multicast. A copy engine's store there
// reaches every part, and a kernel's multimem.ld_reduce reads the sum of all of them.
//
// Setting it up is a vote at every stage, for the driver blocks in "bind" and "map" until every
// GPU of the team was added: a rank that failed before would leave the others there for ever.
//   0  support    environment, options, driver, attributes, distinct GPUs, sizes
//   1  team       rank 0 creates the object and exports it; all import it (rank 0 too: the driver
//                 takes copies through a handle of its own making for local ones) and add their GPU
//   2  binding    each rank binds its own part
//   3  mapping    each rank maps the object; only then may anybody see the address
// A refusal at any stage, on any rank, is everybody's; each gives up what it had, and the window
// stays as it was.
//
// Teardown: unmap, unbind, release what was imported, release what was created; before the part
// is. The creator keeps its reference to the end: without it the object's descriptor names nothing.
#pragma once

#include <memory>

#include "transports/cuda/device_context.h"
#include "transports/fabric.h"
#include "transports/host/descriptor.h"
#include "transports/host/window_map.h"

namespace tide::cuda {

// Fewer ranks push as fast: with one peer there is nothing to save.
inline constexpr int kLeastMulticastRanks = 3;

// What speaks against multicast on this rank, before any call that makes something. `wanted`: OK,
// or why its user does not want it.
Status multicast_support(const DeviceContext& device, const Status& wanted, int ranks,
                         bool shares_gpu);

class Multicast {
 public:
  struct Part {
    AllocationHandle handle = 0;  // this rank's part; outlives the Multicast
    int64_t bytes = 0;            // whole, as allocated; equal on all ranks
  };
  // Collective over `host`'s ranks; the context is current. `support`: multicast_support's answer.
  // `map` learns the address.
  static tide::Result<std::unique_ptr<Multicast>> open(std::shared_ptr<DeviceContext> device,
                                                       Fabric& host, const Status& support,
                                                       const Part& part,
                                                       std::shared_ptr<WindowMap> map,
                                                       Deadline deadline);
  ~Multicast();  // the context is current
  Multicast(const Multicast&) = delete;
  Multicast& operator=(const Multicast&) = delete;

  void* address() const { return reinterpret_cast<void*>(base_); }

 private:
  Multicast(std::shared_ptr<DeviceContext> device, const Part& part, std::shared_ptr<WindowMap> map)
      : device_(std::move(device)), part_(part), map_(std::move(map)) {}

  Status check_size(const Status& support, int ranks);
  tide::Result<Descriptor> create(int ranks);
  Status join(const Descriptor& object);
  Status bind();
  Status map();

  const std::shared_ptr<DeviceContext> device_;
  const Part part_;
  const std::shared_ptr<WindowMap> map_;
  const MulticastEntries* entries_ = nullptr;  // of device_'s table
  AllocationHandle created_ = 0;               // rank 0's
  AllocationHandle handle_ = 0;                // imported
  bool bound_ = false;
  DevicePointer reserved_ = 0;
  bool mapped_ = false;
  DevicePointer base_ = 0;  // once everybody has mapped
};

}  // namespace tide::cuda
