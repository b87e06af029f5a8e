// The engine's face: one Group per (process group, kind of device). It owns the arena, the queues
// and the operations; it knows fabrics and plans, no torch.
//
// Calls on one Group come from one thread at a time and in the same order on all ranks (c10d's own
// rule). Waits on operations may come from any thread. The first error breaks the group: it is
// kept, every later call returns it, every operation in flight ends with it, peers are told.
// close() returns within a second or two, also after an error; memory that storages still use stays
// mapped until their SlotLease or shared_ptr<void> is gone.
//
// Streams. Over a fabric that enqueues, a call's `stream` is the caller's: what was enqueued on it
// comes before the operation, and Operation::release orders a stream behind it. Nothing but plan(),
// allocate() and the first use of an area waits for the device. Elsewhere streams are ignored.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/engine/operation.h"
#include "backend/layout/group_layout.h"
#include "backend/plan/node_gather_plan.h"
#include "transports/fabric.h"
#include "transports/network.h"

namespace tide {

struct GroupOptions {
  std::string name;                              // for messages: the process group's name
  std::chrono::milliseconds timeout{1'800'000};  // of every wait
  int64_t staging_slice_bytes = 2 << 20;         // area staging: bytes of one slice of one area
  int64_t landing_slice_bytes = 1 << 20;         // bounced gathers: bytes of one slice of one area
  int64_t arena_limit_bytes = 0;                 // of this process, all groups together; 0: none
  int flight_record_size = 256;                  // operations that a dump shows, at most kRecords
  NodeGatherOptions rail_gather = {};            // between nodes: schedule, pacing, head
  // Asked about every 100 ms by waits of calling threads; its error (kInterrupted) ends them. A
  // call that its peers may have seen then breaks the group. Null: never.
  std::function<Status()> interrupted = {};
  // No sum by the switch, whose order is not fixed; copies to all are not concerned.
  bool deterministic = false;
};

// What a group that spans several nodes has beside its node's fabric.
struct GroupNodes {
  int rank = 0;                      // in the group; the fabric's ranks are the node's locals
  Topology topology;                 // equal on all ranks
  std::unique_ptr<Network> network;  // to the ranks on the same rail; its nodes are the topology's
  std::string rail_note;             // what a user should know about the choice of the rail
};

enum class Staging : uint8_t { kNone, kLeased, kArea };

// One FSDP2 group as the seam asks for it; the same on all ranks, `refusal` apart.
struct PlanRequest {
  std::string name;
  std::vector<Parameter> parameters;
  std::string refusal;  // why this rank cannot serve it; empty: it can
  bool serve_gather = true;
  bool serve_reduce = true;
  // Keeps a slot of its own from forward to backward (root, reshard_after_forward=False).
  bool stays_unsharded = false;
  // Reshards after backward and runs in In-Place mode: its slot may be staging.
  bool may_lease = true;
  DType gradient_dtype = DType::kBFloat16;  // expected; a call with wider gradients uses the area
};

// What the vote said, equal on all ranks.
struct PlanAnswer {
  bool accepted = false;
  std::string reason;  // the first refusing rank's, when not accepted: "rank 2: ..."
  int plan = -1;       // index for the calls below
  Staging staging = Staging::kNone;
  int64_t slot_bytes = 0;
};

// Memory of one slot as long as storages are bound to it. One object per gather; each bound storage
// holds a copy and drops it when torch frees the storage. Thread-safe.
class SlotLease;

struct GatherCall {
  int plan = -1;
  std::vector<const void*> shards;  // one per parameter of the plan: its padded shard, shard_dtype
  void* stream = nullptr;           // see Group
};
struct GatherStarted {
  std::shared_ptr<Operation> operation;
  std::shared_ptr<SlotLease> lease;
  std::vector<void*> places;  // unsharded parameters in the slot, one per parameter
  int slot = -1;
};

struct ReduceCall {
  int plan = -1;
  std::vector<int> parameters;         // ascending indices into the plan: those with gradients
  std::vector<DType> gradient_dtypes;  // parallel
  std::vector<const void*> gradients;  // parallel: unsharded, contiguous, without padding
  std::vector<void*> outputs;          // parallel: shard_numel elements each
  DType output_dtype = DType::kFloat32;
  AccumulateOptions options;
  // Move the gradients into the slot that this plan vacated last, read them there.
  bool slot_reuse = false;
  void* stream = nullptr;  // see Group
};

struct GroupCounters {  // since creation
  uint64_t operations = 0;
  uint64_t bytes_pushed = 0;   // into peers' memory by this rank; a store to all counts once
  uint64_t bytes_copied = 0;   // own copies, casts, unpacks, moves of Slot-Reuse
  uint64_t bytes_summed = 0;   // read by accumulates and combines
  uint64_t bytes_sent = 0;     // put over the rail to other nodes
  uint64_t copies_to_all = 0;  // steps that were one store to every rank
  uint64_t read_adds = 0;      // steps whose sum the switch made
  int64_t arena_bytes = 0;
  int64_t plans = 0;  // now: made and not retired
};

class Group {
 public:
  // Collective over the group: makes the control page. The store is used for votes. `nodes`: with
  // it `fabric` (blocking) is that of this rank's node alone.
  static Result<std::shared_ptr<Group>> create(const GroupOptions& options,
                                               std::unique_ptr<Fabric> fabric,
                                               std::shared_ptr<KeyValueStore> store,
                                               std::optional<GroupNodes> nodes = std::nullopt);
  virtual ~Group() = default;

  // Collective vote over all groups of one root: each accepted group gets a plan, and the arena
  // grows to hold the slots: prefetch_depth + 1 shared ones of the largest group that reshards, one
  // more where staging is leased, one of its own per group that stays unsharded. A refusal on one
  // rank refuses on all. Drains this rank's operations first; what forget() named is retired first.
  virtual Result<std::vector<PlanAnswer>> plan(const std::vector<PlanRequest>& requests,
                                               int prefetch_depth) = 0;

  // The FSDP2 group of this plan is gone: no further call names the plan. It is retired, and its
  // slots serve others, by the next vote in which every rank has forgotten it and no storage is
  // bound to them any more: plan(), or a gather that finds no slot. Any thread; waits for nothing.
  virtual void forget(int plan) = 0;

  // kUnsupported with a reason when no slot is free (equal on all ranks, as slots follow call
  // order): go stock this once.
  virtual Result<GatherStarted> gather(const GatherCall& call) = 0;
  // The plan's slot is free from here in call order (the storages are unbound), and in the order of
  // the stream that used it. No-op when it holds none.
  virtual Status vacate(int plan, void* stream = nullptr) = 0;
  virtual Result<std::shared_ptr<Operation>> reduce(const ReduceCall& call) = 0;

  // Coalesced calls: lists of (output, input) pairs described by `layout` (names: "tensor 3").
  // `allocations` as returned by allocate() make a gather straight when every rank's outputs lie in
  // them. Over a fabric that enqueues they must, at the same offsets on all ranks; kUnsupported
  // where this rank's do not.
  virtual Result<std::shared_ptr<Operation>> gather_list(std::shared_ptr<const GroupLayout> layout,
                                                         const std::vector<const void*>& inputs,
                                                         const std::vector<void*>& outputs,
                                                         void* stream = nullptr) = 0;
  virtual Result<std::shared_ptr<Operation>> reduce_list(std::shared_ptr<const GroupLayout> layout,
                                                         const std::vector<const void*>& inputs,
                                                         const std::vector<void*>& outputs,
                                                         DType output_dtype,
                                                         const AccumulateOptions& options,
                                                         void* stream = nullptr) = 0;

  // Collective, same order and sizes on all ranks: zeroed memory that peers can write, freed with
  // the last copy.
  virtual Result<std::shared_ptr<void>> allocate(int64_t bytes) = 0;

  // The caller has refused a call over wrong arguments before it reached the group. Peers that make
  // that call and wait for this rank learn the reason, in two seconds instead of their timeout. Any
  // thread.
  virtual void refuse(const std::string& reason) = 0;

  virtual GroupCounters counters() const = 0;
  // Why slots (between nodes: and seats) are not open to all by multicast; empty where they are.
  // The same on all ranks. Any thread.
  virtual std::string no_multicast() const = 0;
  virtual Status error() const = 0;  // OK until the group broke
  // JSON: the last operations with their state and sequence.
  virtual std::string flight_record() const = 0;
  // JSON: who was waited for, how long, and for what (wait_times.h).
  virtual std::string wait_times() const = 0;
  // JSON: {"nodes", "local_ranks", "node", "local", "rail", "device", "transport", "version",
  // "notes"} of a group that spans nodes, "{}" of any other.
  virtual std::string nodes() const = 0;
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;

  // Breaks the group on purpose: operations end with `reason`, peers are told.
  virtual void abort(const Status& reason) = 0;
  // Waits for own operations (at most a second), says goodbye, ends threads. Idempotent. From a
  // signal handler inside a call it only breaks the group; the last owner closes.
  virtual void close() = 0;
};

}  // namespace tide
