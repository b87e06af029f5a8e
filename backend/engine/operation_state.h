// What an Operation is inside the engine: the call as bound (addresses, program, places in the
// arena) and its progress.
//
// Written by the calling thread before it is handed to the lanes; then each lane reads the binding
// and reports through lane_passed_reads() and lane_done(). What a storage or a peer needs stays
// alive until the last lane is done, then the binding is dropped, so that a finished operation
// holds no memory.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/engine/allocations.h"
#include "backend/engine/arena.h"
#include "backend/engine/completion_thread.h"
#include "backend/engine/control_page.h"
#include "backend/engine/operation.h"
#include "backend/layout/group_layout.h"
#include "backend/plan/program.h"
#include "transports/enqueuing_fabric.h"
#include "transports/network.h"

namespace tide {

class OperationState;

// What a program's spaces mean in one call. Vectors are indexed by the layout's parameter.
struct Binding {
  std::shared_ptr<const GroupLayout> layout;
  std::shared_ptr<const Program> program;
  std::shared_ptr<const Program> bounced;  // lists: the form for outputs that peers cannot write
  std::array<uint32_t, kCounterCount> base = {};

  std::vector<const void*> shards;
  std::vector<const void*> gradients;
  std::vector<DType> gradient_dtypes;
  std::vector<void*> outputs;
  // Lists: of `outputs`; empty when one of them lies outside the arena.
  std::vector<Posting> postings;
  std::vector<TensorDescriptor> descriptors;

  // Slot-Reuse: the gradients on their way to the own slot; `gradients` points there.
  std::vector<CopyBlock> moves;

  ArenaRange slot;  // gather: where it lands
  ArenaRange staging;
  ArenaRange landing;
  // Between nodes: the area of a reduce (`staging`) holds several spaces, at these offsets.
  std::array<int64_t, kSpaceCount> space_offset = {};
  // A list between nodes: from the slot to the caller's outputs, once all is there.
  std::vector<CopyBlock> unpacks;
  DType output_dtype = DType::kBytes;
  AccumulateOptions options;

  // Users of the same slot, earlier in call order, and the caller's own use of it (a point of its
  // stream where it let go).
  std::vector<std::shared_ptr<OperationState>> after;
  std::shared_ptr<StreamPoint> vacated;
  std::vector<std::shared_ptr<void>> holds;  // allocations that the outputs lie in
};

// Where a lane stands, for messages: one word, readable at any time. Counter -1: not waiting.
struct WaitingFor {
  int counter = -1;
  int from = 0;
  uint32_t value = 0;
};

// Where a rail's lane stands.
struct RailWait {
  int node = -1;
  Event event;
  int64_t amount = 0;
};

class OperationState final : public Operation {
 public:
  OperationState(CallRecord record, std::string subject,
                 std::shared_ptr<CompletionThread> completion);

  const CallRecord& record() const { return record_; }
  // "gather 17 of 'layers.3'".
  std::string name() const;
  const std::string& subject() const { return subject_; }

  bool is_done() const override { return done_.load(std::memory_order_acquire); }
  Status status() const override;
  Status wait(std::optional<std::chrono::milliseconds> timeout) override;
  Status wait_read(std::optional<std::chrono::milliseconds> timeout) override;
  Status release(void* user_stream) override;
  Status release_read(void* user_stream) override;
  void on_done(std::function<void(const Status&)> callback) override;

  // For the calling thread, before the first lane gets it: how many lanes run it, and how many of
  // them read.
  Binding& binding() { return binding_; }
  void expect(int lanes, int reading_lanes);

  // For the lanes. moved: Slot-Reuse's gradients are in the slot (or the operation failed).
  void lane_started() { started_.store(true, std::memory_order_relaxed); }
  void lane_passed_reads();
  void lane_moved();
  void wait_moved();
  // The last lane completes the operation, with the first error that a lane brought.
  void lane_done(const Status& status);

  // Over a fabric that enqueues, from the calling thread once all is enqueued; queue numbers and
  // the points behind this operation on them. What is bound is then let go of on the completion
  // thread.
  struct QueuePoint {
    int queue = 0;
    std::shared_ptr<StreamPoint> point;
  };
  void set_points(std::vector<QueuePoint> ends, std::vector<QueuePoint> reads);
  // Empty once done.
  std::vector<QueuePoint> ends() const;

  void set_waiting(const WaitingFor& waiting);
  WaitingFor waiting() const;
  void set_rail_wait(const std::optional<RailWait>& wait);
  std::optional<RailWait> rail_wait() const;

  // Host time that its queues waited in all, and the rank of the longest wait. Zero and -1: none.
  struct Waited {
    uint64_t microseconds = 0;
    int longest_for = -1;
  };
  void add_wait(int from, uint64_t microseconds);
  Waited waited() const;

  struct Times {
    Clock::time_point queued, done;
  };
  enum class Phase { kQueued, kRunning, kDone, kFailed };
  Phase phase() const;
  Times times() const;

 private:
  void spin_until_done() const;

  const CallRecord record_;
  const std::string subject_;
  const std::shared_ptr<CompletionThread> completion_;

  Binding binding_;
  bool is_enqueued_ = false;
  std::vector<QueuePoint> ends_;
  std::vector<QueuePoint> reads_;
  std::atomic<bool> started_{false};
  std::atomic<bool> done_{false};
  std::atomic<bool> read_{false};
  std::atomic<uint64_t> waiting_{0};
  std::atomic<uint64_t> waited_{0};
  std::atomic<uint64_t> longest_wait_{0};  // microseconds, then the rank in the last 24 bits

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int lanes_left_ = 0;
  int readers_left_ = 0;
  bool moved_ = false;
  Status status_;
  Times times_;
  std::vector<std::function<void(const Status&)>> callbacks_;
  std::optional<RailWait> rail_wait_;
};

}  // namespace tide
