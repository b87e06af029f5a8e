// What the parts of one group share: fabric, control page, failure, counters. Owned by the group,
// which outlives the lanes and closes the fabric before it goes.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/engine/agreement.h"
#include "backend/engine/allocations.h"
#include "backend/engine/control_page.h"
#include "backend/engine/failure.h"
#include "backend/engine/group.h"
#include "backend/engine/operation_state.h"
#include "backend/engine/wait_times.h"
#include "transports/enqueuing_fabric.h"

namespace tide {

// Threads of a group, see lanes.h.
enum class Lane : uint8_t { kGather, kReduce, kMove, kGatherRail, kReduceRail };
inline constexpr int kLaneCount = 5;

// Queue numbers for the fabric beside the plans' own.
inline constexpr int kMoveQueue = kQueueCount;
inline constexpr int kCallerQueue = kQueueCount + 1;

// Name of a control page counter, the engine's own included.
const char* control_counter_name(int counter);

// An operation's number on the network: these count from 1.
inline uint64_t rail_operation_of(const CallRecord& record) { return record.sequence + 1; }

class EngineContext {
 public:
  EngineContext(const GroupOptions& options, std::unique_ptr<Fabric> fabric,
                std::optional<GroupNodes> nodes);

  const std::string& name() const { return name_; }
  int rank() const { return fabric_->rank(); }
  int ranks() const { return fabric_->size(); }
  Fabric& fabric() const { return *fabric_; }
  // The other ranks of this node, rotated: the first is the next one after the own.
  const std::vector<int>& peers() const { return peers_; }
  bool spans_nodes() const { return network_ != nullptr; }
  // Only where the group spans nodes.
  const Topology& topology() const { return *topology_; }
  Network& network() const { return *network_; }
  // Null over a blocking fabric.
  EnqueuingFabric* enqueuing() const { return enqueuing_; }
  // The blocking fabric of the same ranks: for meetings, and what the processor reads.
  Fabric& host() const { return enqueuing_ != nullptr ? enqueuing_->host() : *fabric_; }
  std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_.load()); }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout.count(); }

  // "group 'default', rank 1".
  std::string where() const;
  // "gather 17 of 'layers.3', waiting for gather_arrival from rank 2, wanted 35, got 34"; the
  // operation alone when it does not wait.
  std::string describe(const OperationState& operation) const;
  // "arrival of round 1, part 0 from node 2 (rank 5), wanted 4096, got 0".
  std::string describe_event(int node, const Event& event, int64_t amount) const;
  // "node 2 (rank 5)": the peer on this rank's rail.
  std::string rail_peer(int node) const;
  // A wait on the host has ended that began at `begin`.
  void note_wait(OperationState& operation, const char* cause, int from, Clock::time_point begin);

  // The first error breaks the group: kept, own waits end, peers are told (not when a peer's own
  // failure is the reason). Returns what broke it, now or before. Any thread.
  Status break_group(const Status& reason, bool tell_peers);
  // The fabric's listener.
  void peer_failed(int peer, const Status& reason);
  // The network's listener.
  void node_failed(int node, const Status& reason);
  // The listener of a fabric that enqueues.
  void wait_failed(const Status& reason);

  // What a lane runs now (null: nothing), for peer_failed().
  void set_running(Lane lane, std::shared_ptr<OperationState> operation);

  // OK, or what ends a wait of a calling thread.
  Status look_for_interrupt() const { return interrupted_ ? interrupted_() : Status::ok(); }

  std::shared_ptr<ControlPage> control;  // set once, before the first call
  std::unique_ptr<Agreement> agreement;
  std::unique_ptr<Allocations> allocations;
  Failure failure;
  std::atomic<uint64_t> bytes_pushed{0};
  std::atomic<uint64_t> bytes_copied{0};
  std::atomic<uint64_t> bytes_summed{0};
  std::atomic<uint64_t> bytes_sent{0};
  std::atomic<uint64_t> copies_to_all{0};
  std::atomic<uint64_t> read_adds{0};
  WaitTimes wait_times;

 private:
  // "while in gather 17 of ..., waiting for ..."; empty where nothing runs.
  std::string running();

  const std::string name_;
  const std::unique_ptr<Fabric> fabric_;
  const std::optional<Topology> topology_;
  const std::unique_ptr<Network> network_;
  std::vector<int> peers_;
  EnqueuingFabric* const enqueuing_;
  std::atomic<int64_t> timeout_;
  const std::function<Status()> interrupted_;
  std::mutex mutex_;
  std::array<std::shared_ptr<OperationState>, kLaneCount> running_;
};

}  // namespace tide
