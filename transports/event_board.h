// What every network keeps above its wire: the counts of events by operation, the posts that are
// not over yet, which peers are there, and the first error. A transport writes what it hears
// (counted, lost, left) and what it finished (post_over); the engine's threads wait here.
//
// Thread-safe; no method calls out but a guard's `check`, and that without the lock held. Operation
// 0 is the network's own: it is always there and has hash 0.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "transports/network.h"
#include "transports/node_names.h"

namespace tide {

class EventBoard {
 public:
  // `label` begins this node's messages: "node 1 of group 'default'".
  EventBoard(int node, int nodes, std::string label, NodeNames names = NodeNames());

  const std::string& label() const { return label_; }
  // A node, in messages.
  std::string name_of(int node) const { return names_.of(node); }
  int node() const { return node_; }
  int nodes() const { return nodes_; }

  // The engine's side, as network.h says.
  Status begin(uint64_t operation, uint64_t hash, const std::string& what);
  void end(uint64_t operation);
  int64_t count(int node, const Event& event) const;
  Status wait(int node, const Event& event, int64_t amount, const WaitGuard& guard);
  Status drain(uint64_t operation, const WaitGuard& guard);
  Status drain_all(const WaitGuard& guard);
  Status error() const;
  Status peer_status(int node) const;
  void wake_all();

  // Opens a post of a live operation and gives the hash that travels with it.
  Result<uint64_t> open_post(int node, uint64_t operation);
  void post_over(uint64_t operation);

  // The wire's side. Counts, or answers why the message cannot be right (the caller breaks the
  // network with it).
  Status counted(int node, const Event& event, int64_t amount, uint64_t hash);
  void left(int node);
  bool has_left(int node) const;
  // Keeps the first error; true if this was it. `node` is where it came from, -1 for this node.
  bool break_with(const Status& reason, int node);
  // Until all peers have said goodbye, an error, or the deadline; true if all have.
  bool wait_for_goodbyes(Deadline deadline);

 private:
  struct OperationState {
    uint64_t hash = 0;
    std::string what;
    bool begun = false;
    int open_posts = 0;
    std::unordered_map<uint64_t, int64_t> counts;  // by node, kind, round, part
    std::map<int, uint64_t> hashes;                // by node: what messages before begin() carried
  };
  Status mismatch(int node, uint64_t operation, const OperationState& state, uint64_t hash) const;
  template <class Reached, class Describe>
  Status wait_until(const WaitGuard& guard, int node, Reached reached, Describe describe);
  Status gone(int node) const;

  const int node_;
  const int nodes_;
  const std::string label_;
  const NodeNames names_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<uint64_t, OperationState> operations_;
  uint64_t last_begun_ = 0;
  int64_t open_posts_ = 0;
  std::vector<bool> left_;
  Status error_;
  int error_node_ = -1;
};

// Whether the put's segments lie in a region of region_bytes (-1: there is none); gives their
// bytes. `label` as above.
Result<int64_t> checked_put_bytes(const std::string& label, const Put& put, int64_t region_bytes);

const char* event_kind_name(EventKind kind);
// "arrival of operation 17, round 1, part 0"
std::string to_string(const Event& event);

}  // namespace tide
