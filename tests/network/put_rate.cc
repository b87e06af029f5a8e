// The yardstick of tests/bench/rails.py: goodput of large UCX puts on one rail, from node 0 to
// node 1. Usage: put_rate STORE DEVICE BYTES ROUNDS [LIBRARY]; asks TIDE_HOST and TIDE_HOSTS. Nodes
// from 2 on only take part in coming up. Node 0 prints one line a round: bytes a second from the
// put to the answer that it has arrived whole.
#include <cstdlib>
#include <iostream>

#include "tests/network/stores.h"
#include "transports/ucx/ucx.h"

namespace tide {
namespace {

constexpr int kRegion = 1;

Deadline soon() { return Clock::now() + std::chrono::seconds(60); }

Status move(Network& network, int64_t bytes, uint64_t round, const std::vector<char>& source) {
  WaitGuard guard;
  guard.timeout = std::chrono::seconds(60);
  guard.what = "put " + std::to_string(round);
  TIDE_RETURN_IF_ERROR(network.begin(round, round, guard.what));
  if (network.node() == 0) {
    const auto start = Clock::now();
    Put put;
    put.node = 1;
    put.operation = round;
    put.region = kRegion;
    put.segments = {{source.data(), 0, bytes}};
    TIDE_RETURN_IF_ERROR(network.put(put));
    TIDE_RETURN_IF_ERROR(network.wait(1, {EventKind::kGrant, round, 0, 0}, 1, guard));
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    std::cout << "RATE " << static_cast<int64_t>(static_cast<double>(bytes) / seconds) << std::endl;
  } else if (network.node() == 1) {
    TIDE_RETURN_IF_ERROR(network.wait(0, {EventKind::kArrival, round, 0, 0}, bytes, guard));
    TIDE_RETURN_IF_ERROR(network.signal(0, {EventKind::kGrant, round, 0, 0}));
  }
  TIDE_RETURN_IF_ERROR(network.drain(round, guard));
  network.end(round);
  return Status::ok();
}

Status run(const std::string& folder, const std::string& device, int64_t bytes, uint64_t rounds,
           const std::string& library) {
  UcxRailOptions rail_options;
  rail_options.device = device;
  rail_options.library = library;
  const auto rail = open_ucx_rail(rail_options);
  if (!rail.is_ok()) return rail.status();
  UcxGroupOptions options;
  options.name = "put rate";
  options.node = std::atoi(std::getenv("TIDE_HOST"));
  options.nodes = std::atoi(std::getenv("TIDE_HOSTS"));
  options.store = std::make_shared<FolderStore>(folder);
  const auto network = connect_ucx_group(rail.value(), options, soon());
  if (!network.is_ok()) return network.status();
  std::vector<char> memory(static_cast<size_t>(bytes), 1);
  std::vector<char> source(static_cast<size_t>(bytes), 2);
  TIDE_RETURN_IF_ERROR(network.value()->add_region(kRegion, {memory.data(), bytes}, soon()));
  for (uint64_t round = 1; round <= rounds; ++round)
    TIDE_RETURN_IF_ERROR(move(*network.value(), bytes, round, source));
  TIDE_RETURN_IF_ERROR(network.value()->quiesce(soon()));
  return network.value()->close(soon());
}

}  // namespace
}  // namespace tide

int main(int count, char** values) {
  if (count < 5 || std::getenv("TIDE_HOST") == nullptr) {
    std::cerr << "usage: put_rate STORE DEVICE BYTES ROUNDS [LIBRARY], under ci/hosts" << std::endl;
    return 2;
  }
  const tide::Status ended =
      tide::run(values[1], values[2], std::atoll(values[3]), std::strtoull(values[4], nullptr, 10),
                count > 5 ? values[5] : "");
  if (!ended.is_ok()) std::cerr << ended.to_string() << std::endl;
  return ended.is_ok() ? 0 : 1;
}
