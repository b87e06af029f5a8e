// Runs programs: turns each step into calls of the fabric by resolving ranges of pieces to blocks
// of memory.
//
// One executor per thread that runs steps; it keeps its scratch memory, so that a step allocates
// nothing after the first few. Errors come back with the group's, the operation's and the waiting
// step's names in them; the caller breaks the group with them.
#pragma once

#include <vector>

#include "backend/engine/engine_context.h"
#include "backend/engine/executor_places.h"

namespace tide {

class Executor {
 public:
  // Meetings and blocking programs; `fabric` is the context's own or its host's.
  Executor(EngineContext* context, Fabric* fabric);

  // All of the operation's steps that belong to `lane`, in list order, after the operations that it
  // depends on.
  Status run(OperationState& operation, Lane lane);

  // A meeting of the calling threads: all ranks have published an equal record. `value` counts
  // meetings; `layout` may be null.
  Status meet(const CallRecord& record, uint32_t value, const GroupLayout* layout);
  // The same with the other nodes on this rail, whose records need not be equal to be met: their
  // hashes are compared by the network. Says `word` (> 0) to each; gives theirs, by node.
  Result<std::vector<int64_t>> meet_nodes(const CallRecord& record, int64_t word);

 protected:
  // A step that holds its queue up for nothing: moves, sums, signals, puts. The enqueuing
  // executor's too.
  Status issue(const Binding& binding, const Program& program, const Step& step);

  EngineContext* const context_;
  Fabric* const fabric_;
  // Blocks of one fabric call: enough to hide the call, few enough to stay in the cache.
  size_t batch_ = 128;
  std::vector<char*> peer_outputs_;  // straight lists: [rank][parameter]

 private:
  // What is waited for, and by which call.
  struct Call {
    const CallRecord* record = nullptr;
    OperationState* operation = nullptr;  // null for a meeting
    const GroupLayout* layout = nullptr;
  };

  Status run_move(OperationState& operation);
  Status run_program(OperationState& operation, const Program& program, Lane lane);
  Status run_step(const Binding& binding, const Program& program, const Step& step);
  Status choose_form(OperationState& operation, const Program** program);
  Status resolve_peer_outputs(const Binding& binding);
  Status unpack(const Binding& binding);

  // executor_moves.cc
  Status copy(const Binding& binding, const Program& program, const Step& step);
  Status cast(const Binding& binding, const Program& program, const Step& step);
  Status accumulate(const Binding& binding, const Program& program, const Step& step);
  Status signal(int queue, int counter, int peer, uint32_t value);
  // Where a copy's piece lies.
  Side side(const Binding& binding, const Program& program, const Step& step, bool is_to,
            const Piece& piece) const;

  // Of programs between nodes (executor_nodes.cc).
  Status put(const Binding& binding, const Program& program, const Step& step);
  void add_shards(const Binding& binding, const Program& program, const Step& step, Put* put);
  void add_landed(const Binding& binding, const Program& program, const Step& step, Put* put);
  void add_partial_sums(const Binding& binding, const Program& program, const Step& step, Put* put);
  Status tell(int node, const Event& event, int64_t amount);
  Status arrive(const Step& step);
  Status arrive(int node, const Event& event, int64_t amount);
  Status drain();
  Status combine(const Binding& binding, const Program& program, const Step& step);
  Status read_add(const Binding& binding, const Program& program, const Step& step);
  Status zero(const Binding& binding, const Program& program, const Step& step);
  Status send_sums(const Step& step, const AccumulateOptions& options);
  Status explain_rail(const Status& status, const std::string& what) const;
  // The operation's number on the network.
  uint64_t rail_operation() const { return rail_operation_of(*call_.record); }

  Status wait(int queue, int counter, int from, uint32_t value);

  Status check_wait(int from);
  Status explain(const Status& status, int counter, int from, uint32_t value) const;
  void begin(const Call& call);

  Call call_;
  std::vector<char> compared_;  // by rank: its record of this call was equal
  PeerWatch peers_;
  WaitGuard guard_;
  WaitGuard rail_guard_;
  int waiting_from_ = 0;

  std::vector<CopyBlock> copies_;
  std::vector<CastBlock> casts_;
  std::vector<AccumulateBlock> sums_;
  std::vector<AccumulateBlock> combines_;
  std::vector<ReadAddBlock> read_adds_;
};

}  // namespace tide
