// One node of a group over UCX, for tests of faults: sends checked bytes to its neighbours
// operation by operation, does something bad to itself when asked to, and writes what became of it
// into STORE/result.NODE:
//   done                       every operation was right and the group closed in order
//   error KIND: MESSAGE        the group broke; then `clean` or `dirty`: whether memory changed
//   after close()
// Usage: ucx_node STORE [key=value...]; without node= and nodes= it asks TIDE_HOST and TIDE_HOSTS.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>

#include "tests/network/stores.h"
#include "tests/network/threads.h"
#include "transports/ucx/hello.h"
#include "transports/ucx/ucx_network.h"

namespace tide {
namespace {

using std::chrono::milliseconds;
using testing::byte_at;

struct Arguments {
  std::map<std::string, std::string> values;
  std::string text(const std::string& key, const std::string& otherwise) const {
    const auto found = values.find(key);
    return found == values.end() ? otherwise : found->second;
  }
  int64_t number(const std::string& key, int64_t otherwise) const {
    const auto found = values.find(key);
    return found == values.end() ? otherwise : std::atoll(found->second.c_str());
  }
};

std::string environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

class Node {
 public:
  Node(std::string folder, Arguments arguments)
      : folder_(std::move(folder)),
        arguments_(std::move(arguments)),
        node_(static_cast<int>(
            arguments_.number("node", std::atoi(environment("TIDE_HOST", "0").c_str())))),
        nodes_(static_cast<int>(
            arguments_.number("nodes", std::atoi(environment("TIDE_HOSTS", "1").c_str())))),
        bytes_(arguments_.number("bytes", 300'000)),
        memory_(static_cast<size_t>(nodes_ * bytes_)),
        source_(static_cast<size_t>(bytes_)) {}

  int run() {
    if (faults_here("late"))
      std::this_thread::sleep_for(milliseconds(arguments_.number("late_ms", 1500)));
    const Status ended = serve();
    std::string result = ended.is_ok() ? "done" : "error " + ended.to_string();
    if (network_) {
      const Status closed = network_->close(Clock::now() + std::chrono::seconds(10));
      if (!closed.is_ok()) result += "\nclose " + closed.to_string();
      std::fill(memory_.begin(), memory_.end(), 99);
      std::this_thread::sleep_for(milliseconds(300));
      const bool clean =
          std::count(memory_.begin(), memory_.end(), 99) == static_cast<int64_t>(memory_.size());
      result += clean ? "\nclean" : "\ndirty";
      result +=
          "\nforeign " + std::to_string(static_cast<UcxNetwork&>(*network_).foreign_messages());
    }
    std::ofstream(folder_ + "/result." + std::to_string(node_)) << result << "\n";
    std::cout << result << std::endl;
    return ended.is_ok() ? 0 : 3;
  }

 private:
  bool faults_here(const std::string& kind) const {
    return arguments_.text("fault", "") == kind &&
           arguments_.number("fault_node", nodes_ - 1) == node_;
  }
  static void shell(const std::string& command) {
    if (std::system(command.c_str()) != 0) std::cout << "failed: " << command << std::endl;
  }
  // A child that ends or wakes this process later; a stopped process cannot do it itself.
  static void signal_later(int signal, milliseconds when) {
    const pid_t victim = getpid();
    if (fork() == 0) {
      usleep(static_cast<useconds_t>(when.count() * 1000));
      kill(victim, signal);
      _exit(0);
    }
  }

  void do_something_bad() {
    const std::string port =
        environment("TIDE_HOSTS_NAME", "") + "-switch link set " + std::to_string(node_) + ".0 ";
    if (faults_here("kill")) kill(getpid(), SIGKILL);
    if (faults_here("stop")) {
      signal_later(SIGKILL, milliseconds(10'000));
      raise(SIGSTOP);
    }
    if (faults_here("nap")) {
      signal_later(SIGCONT, milliseconds(1500));
      raise(SIGSTOP);
    }
    if (faults_here("down")) shell("ip link set rail0 down");
    if (faults_here("hole")) shell("ip -n " + port + "nomaster");
    if (faults_here("blip")) {
      shell("ip link set rail0 down");
      std::this_thread::sleep_for(milliseconds(1000));
      shell("ip link set rail0 up");
    }
    if (faults_here("fail")) network_->fail({ErrorKind::kInternal, "this node has had enough"});
    if (faults_here("exit")) _exit(7);
  }

  Status serve() {
    UcxRailOptions rail_options;
    rail_options.device = arguments_.text("device", "rail0");
    rail_options.library = arguments_.text("library", "");
    rail_options.heartbeat = milliseconds(200);
    const auto rail = open_ucx_rail(rail_options);
    if (!rail.is_ok()) return rail.status();
    const auto store = std::make_shared<FolderStore>(folder_);
    UcxGroupOptions options;
    options.name = "faults";
    options.node = node_;
    options.nodes = nodes_;
    options.store = store;
    options.peer_timeout = milliseconds(arguments_.number("peer_timeout_ms", 5000));
    auto connected =
        connect_ucx_group(rail.value(), options,
                          Clock::now() + milliseconds(arguments_.number("deadline_ms", 60'000)));
    if (!connected.is_ok()) return connected.status();
    network_ = std::move(connected.value());
    TIDE_RETURN_IF_ERROR(network_->add_region(1, {memory_.data(), nodes_ * bytes_},
                                              Clock::now() + std::chrono::seconds(30)));
    if (arguments_.number("wait_for", 0) != 0) {  // somebody else has to do something first
      const auto told = store->get("go", Clock::now() + std::chrono::seconds(30));
      if (!told.is_ok()) return told.status();
    }
    const auto operations = static_cast<uint64_t>(arguments_.number("operations", 20));
    for (uint64_t operation = 1; operation <= operations; ++operation) {
      if (static_cast<int64_t>(operation) == arguments_.number("fault_operation", 8))
        do_something_bad();
      TIDE_RETURN_IF_ERROR(exchange(operation));
    }
    return network_->quiesce(Clock::now() + std::chrono::seconds(30));
  }

  Status exchange(uint64_t operation) {
    WaitGuard guard;
    guard.timeout = milliseconds(arguments_.number("timeout_ms", 40'000));
    guard.what = "exchange " + std::to_string(operation);
    TIDE_RETURN_IF_ERROR(network_->begin(operation, operation, guard.what));
    for (int64_t i = 0; i < bytes_; ++i)
      source_[static_cast<size_t>(i)] = byte_at(node_, operation, i);
    for (int peer = 0; peer < nodes_; ++peer) {
      if (peer == node_) continue;
      Put put;
      put.node = peer;
      put.operation = operation;
      put.region = 1;
      put.segments = {{source_.data(), node_ * bytes_, bytes_}};
      put.head_bytes = bytes_ / 4;
      TIDE_RETURN_IF_ERROR(network_->put(put));
    }
    for (int peer = 0; peer < nodes_; ++peer) {
      if (peer == node_) continue;
      TIDE_RETURN_IF_ERROR(
          network_->wait(peer, {EventKind::kArrival, operation, 0, 0}, bytes_, guard));
      for (int64_t i = 0; i < bytes_; ++i) {
        if (memory_[static_cast<size_t>(peer * bytes_ + i)] == byte_at(peer, operation, i))
          continue;
        return {ErrorKind::kInternal, "wrong byte " + std::to_string(i) + " from node " +
                                          std::to_string(peer) + " in operation " +
                                          std::to_string(operation)};
      }
      TIDE_RETURN_IF_ERROR(network_->signal(peer, {EventKind::kGrant, operation, 0, 0}));
    }
    for (int peer = 0; peer < nodes_;
         ++peer) {  // or a peer would overwrite what this node still compares
      if (peer != node_)
        TIDE_RETURN_IF_ERROR(network_->wait(peer, {EventKind::kGrant, operation, 0, 0}, 1, guard));
    }
    TIDE_RETURN_IF_ERROR(network_->drain(operation, guard));
    network_->end(operation);
    return Status::ok();
  }

  const std::string folder_;
  const Arguments arguments_;
  const int node_;
  const int nodes_;
  const int64_t bytes_;
  std::vector<unsigned char> memory_;
  std::vector<unsigned char> source_;
  std::unique_ptr<Network> network_;
};

}  // namespace
}  // namespace tide

int main(int count, char** values) {
  tide::Arguments arguments;
  for (int i = 2; i < count; ++i) {
    const std::string text = values[i];
    arguments.values[text.substr(0, text.find('='))] = text.substr(text.find('=') + 1);
  }
  if (count < 2) return 2;
  return tide::Node(values[1], arguments).run();
}
