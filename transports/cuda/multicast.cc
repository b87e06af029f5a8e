#include "transports/cuda/multicast.h"

#include <string>
#include <vector>

#include "transports/host/part_exchange.h"

namespace tide::cuda {
Status multicast_support(const DeviceContext& device, const Status& wanted, int ranks,
                         bool shares_gpu) {
  TIDE_RETURN_IF_ERROR(wanted);
  TIDE_RETURN_IF_ERROR(multicast_entries(device.api()).status());
  const auto refused = [](const std::string& why) {
    return Status(ErrorKind::kUnsupported, "NVLink multicast is off: " + why);
  };
  if (ranks < kLeastMulticastRanks) {
    return refused("a node of " + std::to_string(ranks) +
                   " ranks: one push reaches the only peer there may be");
  }
  if (shares_gpu) return refused("ranks share a GPU, and a team wants distinct ones");
  if (device.is_mig()) return refused(device.name() + " is a MIG instance");
  int offered = 0;
  if (device.api().device_attribute(&offered, kAttributeMulticast, device.device()) != kSuccess ||
      offered == 0) {
    return refused(device.name() +
                   " has none (no NVSwitch, or its fabric manager does not run, or confidential "
                   "computing)");
  }
  return Status::ok();
}

tide::Result<std::unique_ptr<Multicast>> Multicast::open(std::shared_ptr<DeviceContext> device,
                                                         Fabric& host, const Status& support,
                                                         const Part& part,
                                                         std::shared_ptr<WindowMap> map,
                                                         Deadline deadline) {
  std::unique_ptr<Multicast> made(new Multicast(std::move(device), part, std::move(map)));
  Multicast& own = *made;
  const int ranks = host.size();
  TIDE_RETURN_IF_ERROR(vote_on(host, own.check_size(support, ranks), deadline));
  PartExchange team;
  team.bytes = part.bytes;
  team.make = [&]() -> tide::Result<Descriptor> {
    if (host.rank() != 0) return Descriptor();
    return own.create(ranks);
  };
  team.use = [&](const std::vector<const Descriptor*>& objects) { return own.join(*objects[0]); };
  TIDE_RETURN_IF_ERROR(exchange_parts(host, team, deadline));
  TIDE_RETURN_IF_ERROR(vote_on(host, own.bind(), deadline));
  TIDE_RETURN_IF_ERROR(vote_on(host, own.map(), deadline));
  own.base_ = own.reserved_;
  own.map_->add(own.address(), 1, part.bytes, part.bytes);
  return made;
}

// Asked anew for each window: the environment may have changed.
Status Multicast::check_size(const Status& support, int ranks) {
  TIDE_RETURN_IF_ERROR(support);
  const tide::Result<const MulticastEntries*> entries = multicast_entries(device_->api());
  TIDE_RETURN_IF_ERROR(entries.status());
  MulticastProperties properties;
  properties.devices = static_cast<unsigned>(ranks);
  properties.bytes = static_cast<size_t>(part_.bytes);  // the answer depends on it
  size_t granularity = 0;
  TIDE_RETURN_IF_ERROR(
      device_->check(entries.value()->granularity(&granularity, &properties, kGranularityMinimum),
                     "cuMulticastGetGranularity", "asking for multicast"));
  if (granularity == 0 || properties.bytes % granularity != 0) {
    return {ErrorKind::kUnsupported, device_->name() + ": multicast wants multiples of " +
                                         std::to_string(granularity) + " bytes, the window has " +
                                         std::to_string(part_.bytes)};
  }
  entries_ = entries.value();
  return Status::ok();
}

tide::Result<Descriptor> Multicast::create(int ranks) {
  MulticastProperties properties;
  properties.devices = static_cast<unsigned>(ranks);
  properties.bytes = static_cast<size_t>(part_.bytes);
  TIDE_RETURN_IF_ERROR(device_->check(entries_->create(&created_, &properties), "cuMulticastCreate",
                                      "making a multicast team"));
  Code code = kSuccess;
  Descriptor descriptor = Descriptor::record([&] {
    int fd = -1;
    code = device_->api().memory_export(&fd, created_, kPosixDescriptor, 0);
    return code == kSuccess ? fd : -1;
  });
  TIDE_RETURN_IF_ERROR(
      device_->check(code, "cuMemExportToShareableHandle", "sharing a multicast team"));
  return descriptor;
}

Status Multicast::join(const Descriptor& object) {
  if (!object) return {ErrorKind::kInternal, "the multicast team came without a descriptor"};
  void* raw = reinterpret_cast<void*>(static_cast<intptr_t>(object.get()));
  AllocationHandle handle = 0;
  TIDE_RETURN_IF_ERROR(device_->check(device_->api().memory_import(&handle, raw, kPosixDescriptor),
                                      "cuMemImportFromShareableHandle",
                                      "taking the multicast team"));
  handle_ = handle;
  return device_->check(entries_->add_device(handle_, device_->device()), "cuMulticastAddDevice",
                        "joining the multicast team (does the fabric manager run?)");
}

Status Multicast::bind() {
  const Code code =
      entries_->bind_memory(handle_, 0, part_.handle, 0, static_cast<size_t>(part_.bytes), 0);
  bound_ = code == kSuccess;
  return device_->check(code, "cuMulticastBindMem",
                        code == kOutOfMemory
                            ? "binding a window to multicast: the switch's slots are used up "
                              "(NCCL and others take some; NCCL_NVLS_ENABLE=0 frees NCCL's)"
                            : "binding a window to multicast");
}

Status Multicast::map() {
  const DriverApi& api = device_->api();
  const auto bytes = static_cast<size_t>(part_.bytes);
  DevicePointer base = 0;
  TIDE_RETURN_IF_ERROR(device_->check(
      api.address_reserve(&base, bytes, static_cast<size_t>(device_->granularity()), 0, 0),
      "cuMemAddressReserve", "reserving a multicast address"));
  reserved_ = base;
  TIDE_RETURN_IF_ERROR(device_->check(api.memory_map(reserved_, bytes, 0, handle_, 0), "cuMemMap",
                                      "mapping multicast"));
  mapped_ = true;
  const AccessDescriptor access = device_->access();
  return device_->check(api.memory_set_access(reserved_, bytes, &access, 1), "cuMemSetAccess",
                        "mapping multicast");
}

Multicast::~Multicast() {
  const DriverApi& api = device_->api();
  const auto bytes = static_cast<size_t>(part_.bytes);
  if (base_ != 0) map_->remove(address());
  if (mapped_) (void)api.memory_unmap(reserved_, bytes);
  if (reserved_ != 0) (void)api.address_free(reserved_, bytes);
  if (bound_) (void)entries_->unbind(handle_, device_->device(), 0, bytes);
  if (handle_ != 0) (void)api.memory_release(handle_);
  if (created_ != 0) (void)api.memory_release(created_);
}

}  // namespace tide::cuda
