#include "backend/engine/engine_context.h"

#include <algorithm>
#include <utility>

#include "backend/engine/node_fabric.h"
#include "transports/event_board.h"

namespace tide {

const char* control_counter_name(int counter) {
  if (counter == kMeetCounter) return "the call";
  return counter_name(static_cast<Counter>(counter));
}

EngineContext::EngineContext(const GroupOptions& options, std::unique_ptr<Fabric> fabric,
                             std::optional<GroupNodes> nodes)
    : wait_times(nodes ? nodes->topology.ranks() : fabric->size()),
      name_(options.name),
      fabric_(nodes ? std::make_unique<NodeFabric>(std::move(fabric), nodes->topology, nodes->rank)
                    : std::move(fabric)),
      topology_(nodes ? std::optional<Topology>(nodes->topology) : std::nullopt),
      network_(nodes ? std::move(nodes->network) : nullptr),
      enqueuing_(fabric_->capabilities().blocking ? nullptr
                                                  : dynamic_cast<EnqueuingFabric*>(fabric_.get())),
      timeout_(options.timeout.count()),
      interrupted_(options.interrupted) {
  const int locals = topology_ ? topology_->local_ranks() : ranks();
  for (int k = 1; k < locals; ++k) {
    peers_.push_back(topology_ ? topology_->rank(topology_->node(rank()),
                                                 (topology_->local(rank()) + k) % locals)
                               : (rank() + k) % locals);
  }
}

std::string EngineContext::where() const {
  return "group '" + name_ + "', rank " + std::to_string(rank());
}

std::string EngineContext::describe(const OperationState& operation) const {
  std::string text = operation.name();
  if (enqueuing_ != nullptr) {
    // A wait's text begins with its operation's name (enqueuing_executor.cc).
    for (const std::string& what : enqueuing_->standing_in()) {
      if (what.rfind(text + ": ", 0) == 0)
        return text + ", waiting for" + what.substr(text.size() + 1);
    }
    return text;
  }
  const WaitingFor waiting = operation.waiting();
  if (waiting.counter >= 0 && control) {
    const uint32_t got =
        __atomic_load_n(control->word(rank(), waiting.counter, waiting.from), __ATOMIC_RELAXED);
    text += ", waiting for " + std::string(control_counter_name(waiting.counter)) + " from rank " +
            std::to_string(waiting.from) + ", wanted " + std::to_string(waiting.value) + ", got " +
            std::to_string(got);
  }
  if (const std::optional<RailWait> rail = operation.rail_wait()) {
    text += ", waiting for " + describe_event(rail->node, rail->event, rail->amount);
  }
  return text;
}

std::string EngineContext::describe_event(int node, const Event& event, int64_t amount) const {
  return std::string(event_kind_name(event.kind)) + " of round " + std::to_string(event.round) +
         ", part " + std::to_string(event.part) + " from " + rail_peer(node) + ", wanted " +
         std::to_string(amount) + ", got " + std::to_string(network_->count(node, event));
}

std::string EngineContext::rail_peer(int node) const {
  return "node " + std::to_string(node) + " (rank " +
         std::to_string(topology_->rank(node, topology_->local(rank()))) + ")";
}

void EngineContext::note_wait(OperationState& operation, const char* cause, int from,
                              Clock::time_point begin) {
  const auto time = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin);
  const auto microseconds = static_cast<uint64_t>(time.count());
  operation.add_wait(from, microseconds);
  wait_times.add(operation, cause, from, microseconds);
}

Status EngineContext::break_group(const Status& reason, bool tell_peers) {
  // Fabrics and plans know no group: their messages get its name here.
  const bool is_located = reason.message().find("group '") != std::string::npos;
  const Status located =
      is_located ? reason : Status(reason.kind(), where() + ": " + reason.message());
  if (failure.set(located)) {
    fabric_->wake_all();
    if (tell_peers) fabric_->fail(located);
    if (network_) network_->fail(located);  // also of a peer's failure: each rank has its own rail
  }
  return failure.status();
}

std::string EngineContext::running() {
  std::string running;
  if (enqueuing_ != nullptr) {
    for (const std::string& what : enqueuing_->standing_in())
      running += (running.empty() ? " while in " : " and in ") + what;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto operation = running_.begin(); operation != running_.end(); ++operation) {
    if (!*operation || std::find(running_.begin(), operation, *operation) != operation) continue;
    running += (running.empty() ? " while in " : " and in ") + describe(**operation);
  }
  return running;
}

void EngineContext::peer_failed(int peer, const Status& reason) {
  (void)break_group(
      Status(ErrorKind::kPeerLost, where() + ": rank " + std::to_string(peer) + " failed" +
                                       running() + ": " + reason.message()),
      false);
}

void EngineContext::node_failed(int node, const Status& reason) {
  std::string text = where();
  if (node >= 0 && node != network_->node()) {
    text += ": rank " + std::to_string(topology_->rank(node, topology_->local(rank()))) +
            " of node " + std::to_string(node) + " failed";
  } else {
    text += ": its rail failed";
  }
  const ErrorKind kind =
      node >= 0 && reason.kind() != ErrorKind::kInvalidUse ? ErrorKind::kPeerLost : reason.kind();
  (void)break_group(Status(kind, text + running() + ": " + reason.message()), true);
}

void EngineContext::wait_failed(const Status& reason) {
  // Agreement's and the check's sentences are complete.
  if (reason.kind() != ErrorKind::kTimeout || !control) {
    (void)break_group(reason, true);
    return;
  }
  std::string calls;
  for (int r = 0; r < ranks(); ++r) {
    calls += (r == 0 ? "" : ", ") + std::string("rank ") + std::to_string(r) + " " +
             std::to_string(control->calls(r));
  }
  (void)break_group(
      Status(reason.kind(), reason.message() + "; calls made: " + calls +
                                " (a rank with fewer is stopped, slow or has left one out)"),
      true);
}

void EngineContext::set_running(Lane lane, std::shared_ptr<OperationState> operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  running_[static_cast<size_t>(lane)].swap(operation);
}

}  // namespace tide
