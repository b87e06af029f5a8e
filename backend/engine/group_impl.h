// The Group over a fabric of either kind. One file per part: group.cc (life, errors, lists'
// memory), group_plan.cc (votes and slots), group_retire.cc (plans whose groups are gone),
// group_calls.cc (the collectives), group_nodes.cc (what several nodes add to all of these).
//
// Threads: all state below belongs to the call in progress, but what EngineContext, FlightRecord
// and the lanes share. Teardown: close() ends lanes, then the completion thread, then the fabric;
// then windows go with their last holders.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "backend/engine/arena.h"
#include "backend/engine/completion_thread.h"
#include "backend/engine/engine_context.h"
#include "backend/engine/enqueuing_executor.h"
#include "backend/engine/executor.h"
#include "backend/engine/flight_record.h"
#include "backend/engine/group.h"
#include "backend/engine/lanes.h"
#include "backend/engine/planning.h"
#include "backend/engine/slot_ring.h"
#include "backend/engine/vote.h"
#include "backend/plan/program_cache.h"

namespace tide {

// Of create_window: ranks may have heard different things, so the group cannot go on.
inline bool is_no_refusal(const Status& status) {
  return status.kind() == ErrorKind::kTimeout || status.kind() == ErrorKind::kPeerLost ||
         status.kind() == ErrorKind::kInterrupted;
}

// Who refuses a meeting, and why.
struct RefusedMeeting {
  int rank = 0;
  Refusal refusal = Refusal::kNone;
};

// The area of reduces between nodes: spaces one behind another, sized for every program whose
// segments have at most segment_bytes.
struct NodeArea {
  NodeArea() = default;
  NodeArea(const Topology& topology, int64_t staging_slice_bytes);
  int64_t segment_bytes = 0;
  std::array<int64_t, kSpaceCount> offset = {};
  int64_t bytes = 0;
};

// Held through each call. Knows its thread: a signal handler that runs in a call's wait may close
// the group.
class CallMutex {
 public:
  void lock() {
    mutex_.lock();
    owner_ = std::this_thread::get_id();
  }
  bool try_lock() {
    const bool taken = mutex_.try_lock();
    if (taken) owner_ = std::this_thread::get_id();
    return taken;
  }
  void unlock() {
    owner_ = std::thread::id();
    mutex_.unlock();
  }
  bool is_held_here() const { return owner_ == std::this_thread::get_id(); }

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_{};
};

class GroupImpl final : public Group {
 public:
  GroupImpl(const GroupOptions& options, std::unique_ptr<Fabric> fabric,
            std::shared_ptr<KeyValueStore> store, std::optional<GroupNodes> nodes);
  ~GroupImpl() override;

  // Collective: makes the control page.
  Status open();

  Result<std::vector<PlanAnswer>> plan(const std::vector<PlanRequest>& requests,
                                       int prefetch_depth) override;
  void forget(int plan) override;
  Result<GatherStarted> gather(const GatherCall& call) override;
  Status vacate(int plan, void* stream) override;
  Result<std::shared_ptr<Operation>> reduce(const ReduceCall& call) override;
  Result<std::shared_ptr<Operation>> gather_list(std::shared_ptr<const GroupLayout> layout,
                                                 const std::vector<const void*>& inputs,
                                                 const std::vector<void*>& outputs,
                                                 void* stream) override;
  Result<std::shared_ptr<Operation>> reduce_list(std::shared_ptr<const GroupLayout> layout,
                                                 const std::vector<const void*>& inputs,
                                                 const std::vector<void*>& outputs,
                                                 DType output_dtype,
                                                 const AccumulateOptions& options,
                                                 void* stream) override;
  Result<std::shared_ptr<void>> allocate(int64_t bytes) override;

  void refuse(const std::string& reason) override;

  GroupCounters counters() const override;
  std::string no_multicast() const override;
  Status error() const override { return context_.failure.status(); }
  std::string flight_record() const override;
  std::string wait_times() const override { return context_.wait_times.to_json(); }
  std::string nodes() const override;
  void set_timeout(std::chrono::milliseconds timeout) override { context_.set_timeout(timeout); }
  void abort(const Status& reason) override { (void)context_.break_group(reason, true); }
  void close() override;

 private:
  struct Plan {
    PlanRequest request;
    std::shared_ptr<const GroupLayout> layout;
    Staging staging = Staging::kNone;
    int prefetch_depth = 0;          // of its root
    bool uses_ring = false;          // its gathers take shared slots
    int own_slot = -1;               // of a group that stays unsharded
    int slot = -1;                   // held now
    int vacated_slot = -1;           // held last
    std::weak_ptr<SlotLease> lease;  // of its last gather
  };
  struct Slot {
    ArenaRange range;
    bool is_shared = true;
    bool is_retired = false;  // a larger one took its place; it never rejoins the ring
    int tenant = -1;          // plan that holds it or held it last
    std::vector<std::shared_ptr<OperationState>> users;  // what the next user must wait for
    std::shared_ptr<StreamPoint> vacated;                // and the caller's stream's last use
  };

  // group.cc
  Status usable() const;
  // usable(), and so is the caller's stream where the fabric enqueues.
  Status usable(void* stream) const;
  // Of this call: peers that make it learn the reason.
  Status invalid(const std::string& text) const;
  Deadline deadline() const { return Clock::now() + context_.timeout(); }
  // The call's place in the ring of records; waits for the call that had it before.
  Result<uint64_t> next_sequence();
  std::shared_ptr<OperationState> start(CallRecord record, std::string subject, Binding binding,
                                        Lane lane, void* stream);
  // `call`: of a list or reduce that meets over its areas, published for messages; its lane must be
  // idle.
  Status meet(CallRecord record, const Binding* call);
  // The meeting itself, and whether a rank refuses (kUnsupported).
  Status agree_to_meet(const CallRecord& record, const GroupLayout* layout);
  // Collective: a meeting, then a window. kUnsupported when a rank refuses; other errors broke the
  // group.
  Result<std::shared_ptr<ArenaMemory>> meet_and_create(const CallRecord& record, int64_t bytes,
                                                       const Binding* call);
  // Makes an area at the first call that needs it: `cause`, with its layout and descriptors bound.
  Status ensure_area(const CallRecord& cause, const Binding& call, ArenaRange* area, int64_t bytes);
  // Collective: by multicast, where all ranks may. An error broke the group.
  Status open_to_all(ArenaMemory* memory);
  int64_t staging_area_bytes() const;
  int64_t landing_area_bytes() const;

  // group_nodes.cc; with one node the first four do nothing.
  // The network learns which operation has the call's number.
  void announce(const CallRecord& record);
  // A meeting goes on with the other nodes; `refused` becomes the lowest refusing rank of all.
  Status tell_nodes(const CallRecord& record, std::optional<RefusedMeeting>* refused);
  // Ends registrations of memory that nobody uses any more. Collective, no operation in flight.
  Status drop_regions();
  void close_network(const Status& failed);
  // Collective: a window, and a region of the network where puts shall land in it. The same answer
  // on all ranks; kUnsupported when one refuses.
  Result<std::shared_ptr<ArenaMemory>> create_memory(int64_t bytes, bool for_puts);
  Status register_memory(ArenaMemory& memory);
  // One answer for all: own's error, or that of the lowest rank that has one.
  Status agree(const Status& own);
  Status bind_list_between_nodes(CallRecord record, Binding* binding);

  // group_plan.cc
  // The vote. `cause`: the plan whose gather found no slot, -1 without one; then there are no
  // requests.
  Result<std::vector<PlanAnswer>> vote_on(const std::vector<PlanRequest>& requests,
                                          int prefetch_depth, int cause);
  PlanBallot own_ballot(const std::vector<PlanRequest>& requests, int prefetch_depth) const;
  Result<std::vector<PlanBallot>> exchange(const PlanBallot& ballot, const CallRecord& record);
  // Null for no bytes. kUnsupported: a rank has no memory for it.
  Result<std::shared_ptr<ArenaMemory>> make_memory(int64_t bytes);
  Status make_arena(const PlanDecision& decision);
  void retire_shared_slots();
  void adopt(const std::vector<PlanRequest>& requests, int prefetch_depth, PlanDecision* decision);
  Status wait_for(OperationState& operation) const;
  Status drain();
  Status give_back(Plan& plan, void* stream);

  // group_retire.cc
  // Forgotten plans to whose slots no storage is bound on this rank.
  std::vector<int> retirable() const;
  // Those that all ranks named. Returns the bytes of arena that are no longer needed.
  int64_t retire(const std::vector<int>& plans);
  int64_t slot_memory_bytes() const;
  // A vote for the slots that deleted models took along.
  Status look_for_slots(int plan);

  // group_calls.cc
  Result<Plan*> find_plan(int plan, const char* call);
  Status check_reduce(const Plan& plan, const ReduceCall& call) const;
  Status check_sum(const std::vector<DType>& dtypes, DType output_dtype,
                   const AccumulateOptions& options) const;
  // The slot that the plan vacated last, while nobody else has had it; null otherwise.
  Slot* vacated_slot(const Plan& plan);
  void use_slot(Slot& slot, const std::shared_ptr<OperationState>& operation);
  // The reduce's program, in the form that the group's nodes ask for.
  void plan_sums(ReduceOptions options, ReduceOp op, Binding* binding);
  // Of a gather to a slot; `to_all`: it is open to all.
  std::shared_ptr<const Program> gather_program(const GroupLayout& layout, bool to_all);
  void advance(const Program& program, Binding* binding);
  void move_gradients(const ReduceCall& call, const Plan& plan, const Slot& slot,
                      Binding* binding) const;
  Status check_list(const char* call, const GroupLayout& layout, size_t inputs,
                    size_t outputs) const;
  void post_outputs(Binding* binding);

  const GroupOptions options_;
  const std::string rail_note_;  // see GroupNodes
  EngineContext context_;
  std::shared_ptr<CompletionThread> completion_;
  FlightRecord flight_record_;
  Lanes lanes_;
  std::unique_ptr<EnqueuingExecutor> enqueuing_;  // null over a blocking fabric
  Executor caller_;                               // meetings
  Vote vote_;
  ProgramCache programs_;
  std::shared_ptr<std::atomic<int64_t>> arena_bytes_;

  std::mutex close_mutex_;  // close() alone
  CallMutex call_mutex_;    // close() from another thread waits for it
  std::atomic<bool> closed_{false};
  std::atomic<uint64_t> operations_{0};
  uint64_t sequence_ = 0;
  uint32_t meetings_ = 0;
  std::array<uint32_t, kCounterCount> base_ = {};  // sums of `advance` over all calls so far

  std::map<int, Plan> plans_;  // by number, counted over the group's life
  int next_plan_ = 0;
  std::map<int, Slot> slots_;  // the same
  int next_slot_ = 0;
  SlotRing ring_;
  ArenaState arena_;
  ArenaRange staging_;
  ArenaRange landing_;
  // Between nodes.
  const NodeArea node_area_;
  ArenaRange list_slot_;                               // where coalesced gathers land
  std::shared_ptr<OperationState> list_user_;          // the last one
  std::vector<std::shared_ptr<ArenaMemory>> regions_;  // by number; null: ended
  int slotless_calls_to_skip_ = 0;                     // until the next look_for_slots()
  int slotless_pause_ = 0;

  mutable std::mutex multicast_mutex_;
  std::string no_multicast_ = "no slot has been made";  // then what the last opening met with

  std::atomic<int64_t> plan_count_{0};
  mutable std::mutex forgotten_mutex_;
  std::set<int> forgotten_;  // and not retired
};

}  // namespace tide
