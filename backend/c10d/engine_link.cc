#include "backend/c10d/engine_link.h"

#include <unistd.h>

#include <utility>

#include "backend/c10d/prefixed_keys.h"
#include "transports/cuda/cuda_fabric.h"
#include "transports/host/host_fabric.h"

namespace tide {

Status check_process(pid_t process, const std::string& group_name) {
  if (getpid() == process) return Status::ok();
  return Status(ErrorKind::kInvalidUse, "group '" + group_name + "' belongs to process " +
                                            std::to_string(process) +
                                            "; this process was forked from it and cannot use it: "
                                            "make process groups after the fork");
}

EngineLink::EngineLink(EngineLinkOptions options, std::shared_ptr<KeyValueStore> store)
    : process_(getpid()), store_(std::move(store)), options_(std::move(options)) {}

EngineLink::~EngineLink() {
  if (getpid() == process_) return;
  // The group's threads live in the parent: joining them here would wait for ever.
  new std::shared_ptr<Group>(std::move(group_));
}

Result<std::shared_ptr<Group>> EngineLink::group() {
  TIDE_RETURN_IF_ERROR(check_process(process_, options_.group.name));
  std::lock_guard<std::mutex> making(making_mutex_);
  {
    std::lock_guard<std::mutex> lock(state_mutex_);
    if (refusal_) return *refusal_;
    if (group_) return group_;
  }
  Result<std::shared_ptr<Group>> made = make();
  std::lock_guard<std::mutex> lock(state_mutex_);
  if (refusal_) {  // aborted meanwhile
    if (made.is_ok()) made.value()->abort(*refusal_);
    return *refusal_;
  }
  if (made.is_ok()) {
    group_ = made.value();
  } else {
    refusal_ = made.status();
  }
  return made;
}

Result<std::shared_ptr<Group>> EngineLink::make() {
  EngineLinkOptions options;
  {
    std::lock_guard<std::mutex> lock(state_mutex_);
    options = options_;
  }
  const Deadline deadline = Clock::now() + options.group.timeout;
  NodeSetupOptions setup;
  setup.group = options.group.name;
  setup.rank = options.rank;
  setup.size = options.size;
  setup.program_rank = options.program_rank;
  setup.node_size = options.node_size;
  setup.on_gpu = options.device != kHostMemory;
  setup.rail = options.rail;
  setup.timeout = options.group.timeout;
  setup.deadline = deadline;
  Result<GroupNodes> nodes = set_up_nodes(setup, store_);
  if (!nodes.is_ok()) return nodes.status();
  const Topology& topology = nodes.value().topology;

  HostFabricOptions fabric_options;
  fabric_options.rank = topology.local(options.rank);
  fabric_options.size = topology.local_ranks();
  fabric_options.group = options.group.name;
  fabric_options.names = RankNames(topology.members(topology.node(options.rank)));
  fabric_options.interrupted = options.group.interrupted;
  fabric_options.deadline = deadline;
  const auto node_keys = std::make_shared<PrefixedKeys>(
      store_, "node/" + std::to_string(topology.node(options.rank)) + "/");
  if (options.device == kHostMemory) {
    Result<std::unique_ptr<Fabric>> fabric = connect_host_fabric(fabric_options, *node_keys);
    if (!fabric.is_ok()) return fabric.status();
    std::optional<GroupNodes> beyond;
    if (topology.nodes() > 1) beyond = std::move(nodes.value());
    return Group::create(options.group, std::move(fabric.value()), store_, std::move(beyond));
  }
  CudaFabricOptions cuda_options;
  cuda_options.host = fabric_options;
  cuda_options.device = options.device;
  cuda_options.api = cuda::driver();
  cuda_options.images = cuda::kernel_images();
  if (!options.multicast) {
    cuda_options.multicast =
        Status(ErrorKind::kUnsupported, "NVLink multicast is off: TIDE_MULTICAST=0");
  }
  cuda_options.make_room = options.make_room;
  Result<std::unique_ptr<CudaFabric>> fabric = connect_cuda_fabric(cuda_options, *node_keys);
  if (!fabric.is_ok()) return fabric.status();
  return Group::create(options.group, std::move(fabric.value()), store_);
}

std::shared_ptr<Group> EngineLink::group_if_made() const {
  std::lock_guard<std::mutex> lock(state_mutex_);
  return group_;
}

std::chrono::milliseconds EngineLink::timeout() const {
  std::lock_guard<std::mutex> lock(state_mutex_);
  return options_.group.timeout;
}

void EngineLink::set_timeout(std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(state_mutex_);
  options_.group.timeout = timeout;
  if (group_) group_->set_timeout(timeout);
}

void EngineLink::abort(const Status& reason) {
  if (getpid() != process_) return;
  std::shared_ptr<Group> group;
  {
    std::lock_guard<std::mutex> lock(state_mutex_);
    group = group_;
    if (!group && !refusal_) refusal_ = reason;
  }
  if (group) group->abort(reason);
}

void EngineLink::close() {
  if (getpid() != process_) return;
  if (std::shared_ptr<Group> group = group_if_made()) group->close();
}

}  // namespace tide
