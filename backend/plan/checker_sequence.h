// Builds sequences for the checker: what training does with one or several groups, with slots
// handed out as the engine hands them out.
//
// Worked example, In-Place, leased staging, prefetch 1, groups 0..1, backward: gather 1 holds slot
// A.
//   issue gather 0 -> slot B; use slot A; write gradients 1; issue reduce 1, staging = slot A
//   slot A joins the ring behind "reduce 1 summed"; use slot B; write gradients 0; issue reduce 0,
//   staging = slot B; ...
// The next gather takes the slot vacated longest ago, A, and starts once reduce 1 has summed on
// this process.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "backend/plan/checker.h"
#include "backend/plan/gather_plan.h"
#include "backend/plan/node_gather_plan.h"
#include "backend/plan/node_reduce_plan.h"
#include "backend/plan/reduce_plan.h"

namespace tide {

// Slots of one group's arena; the slot vacated longest ago goes out first.
class CheckedSlots {
 public:
  struct Slot {
    int index = -1;
    std::vector<Dependency> after;
  };

  explicit CheckedSlots(int slots = 0) {
    for (int i = 0; i < slots; ++i) vacated_.push_back({i, {}});
  }
  bool empty() const { return vacated_.empty(); }
  Slot take() {
    Slot slot = vacated_.front();
    vacated_.pop_front();
    return slot;
  }
  void vacate(Slot slot) { vacated_.push_back(std::move(slot)); }

 private:
  std::deque<Slot> vacated_;
};

// Operations and script of a sequence; every method returns the index of the operation that it
// added.
class SequenceBuilder {
 public:
  explicit SequenceBuilder(int processes) { sequence_.processes = processes; }

  // `members`: the process of each rank. Returns the group's index.
  int add_group(std::vector<int> members);

  int gather(int group, std::shared_ptr<const GroupLayout> layout, const GatherOptions& options,
             int shards);
  // Between nodes; to slots.
  int gather(int group, std::shared_ptr<const GroupLayout> layout, const Topology& topology,
             const NodeGatherOptions& options, int shards);
  int reduce(int group, std::shared_ptr<const GroupLayout> layout, const ReduceOptions& options);
  int reduce(int group, std::shared_ptr<const GroupLayout> layout, const Topology& topology,
             const NodeReduceOptions& options);
  CheckedOperation& operation(int index) { return sequence_.operations[index]; }
  void act(Action action, int operation) { sequence_.script.push_back({action, operation}); }

  CheckedSequence& sequence() { return sequence_; }

 private:
  int add(int group, std::shared_ptr<const GroupLayout> layout, int shards,
          const std::function<Program(int rank)>& plan);

  CheckedSequence sequence_;
};

// One root's groups, trained.
struct TrainingOptions {
  int group = 0;  // whose collectives
  int prefetch = 1;
  bool leased = false;      // staging: the vacated slot, or areas
  bool slot_reuse = false;  // Slot-Reuse (with areas), or In-Place
  bool keep_last = false;   // the last group stays unsharded between forward and backward
  int gradient_memories =
      2;                 // in turn; one is written again when the reduce that read it has read it
  int first_shards = 0;  // indices of memory, so that several roots do not share any
  int first_gradients = 0;
  int64_t staging_slice_bytes = 128;
  std::shared_ptr<CheckedSlots> ring;  // of several roots in one group; empty: a ring of its own
};

// Slots of a ring that serves these options alone.
int slots_for(const TrainingOptions& options);

class Training {
 public:
  Training(SequenceBuilder* builder, std::vector<std::shared_ptr<const GroupLayout>> layouts,
           const TrainingOptions& options);

  // Appends one part of a step to the script. Parts of several roots may be interleaved.
  void forward(int layer);
  void backward(int layer);
  void update();  // waits for all reduces, reads the sums, writes new shards

  int layers() const { return static_cast<int>(layouts_.size()); }

 private:
  struct Held {
    int gather = -1;
    CheckedSlots::Slot slot;
  };
  void ensure_gathered(int layer);
  void reduce(int layer);

  SequenceBuilder* builder_;
  std::vector<std::shared_ptr<const GroupLayout>> layouts_;
  TrainingOptions options_;
  std::shared_ptr<CheckedSlots> ring_;
  std::vector<Held> held_;        // by layer: its slot while unsharded
  std::vector<int> last_gather_;  // by layer
  std::vector<int> reduces_;      // of this step
  std::vector<int> readers_;      // by gradient memory: the reduce that reads it, or -1
};

}  // namespace tide
