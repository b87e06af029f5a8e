// Proves sequences of programs: runs the programs of all ranks on symbolic memory and finds what
// could go wrong on real memory in any timing.
//
// What it proves of a sequence:
//   - every element arrives exactly once, at its place; every sum has every rank's slice; nothing
//     else is written;
//   - nothing is read before it was written, nothing is overwritten before its readers were done
//     (slots, staging and landing areas, gradients, outputs): shown by vector clocks
//     (shadow_memory.h), so for every timing, not only for the one that ran;
//   - counters only grow, each ends an operation at base + advance, and no two writers of one
//     counter are unordered;
//   - between nodes: a put lands, head then rest, at any time after it was posted and in any order
//     with other puts, and its bytes are known to be there only to who waited for its event; a rail
//     brings each byte once; rounds keep to the program's pacing; every event is waited for;
//     nothing reads for the rail behind its drain;
//   - no deadlock, with a thread per queue and with all queues of a process merged into one FIFO.
//
// One schedule would do for correct programs: waits do not consume, so threads that meet only
// through growing counters end in the same state in every order. The checker does not take that on
// faith: check_all() runs orders that starve each queue and each process in turn, and random ones,
// and compares their canonical forms.
//
// A sequence is what the processes do, the same script on each: issue operations, wait for them,
// use slots, write gradients. It needs no torch and no memory of the real size: layouts of some
// hundred elements show every mistake.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/layout/group_layout.h"
#include "backend/plan/program.h"

namespace tide {

// "Starts, on every queue, once an earlier operation of the sequence has, on this process ...":
// what the engine adds where a slot goes from one operation to the next.
struct Dependency {
  enum class Until : uint8_t {
    kSummed,
    kRead
  };  // ... ended its sum queue; ... read all its gradients
  int operation = -1;
  Until until = Until::kSummed;
};

struct CheckedOperation {
  int group = 0;
  std::shared_ptr<const GroupLayout> layout;
  std::vector<std::shared_ptr<const Program>> programs;  // by rank
  std::vector<int> subset;                               // reduce: parameters with gradients
  std::vector<DType> gradient_dtypes;                    // parallel to subset
  int slot = -1;           // gather to slots: its destination; leased reduce: its staging
  int gradient_slot = -1;  // reduce whose gradients were moved into a slot; else -1
  int shards = 0;          // index of the shards' memory, per group
  int gradients = 0;       // index of the gradients' memory, per process
  int outputs = 0;         // index of the outputs' memory, per group
  std::vector<Dependency> after;
};

enum class Action : uint8_t {
  kIssue,           // the call
  kWait,            // until done
  kWaitRead,        // until its shards or gradients were read
  kUseGathered,     // reads everything that a gather wrote, and checks it
  kWriteGradients,  // writes the gradients that a later reduce takes
  kMoveGradients,   // copies them into the reduce's gradient_slot
  kReadSummed,      // reads everything that a reduce wrote, and checks it
  kUpdateShards,    // writes new values into the shards of a gather
};

struct ScriptItem {
  Action action = Action::kIssue;
  int operation = -1;
};

struct CheckedSequence {
  int processes = 1;
  std::vector<std::vector<int>> groups;  // process of each rank
  std::vector<CheckedOperation> operations;
  std::vector<ScriptItem>
      script;  // the same on all processes; items of groups without it are skipped
};

// The order in which the checker lets threads go on.
struct Schedule {
  enum class Kind : uint8_t { kForward, kBackward, kStarveQueue, kStarveProcess, kRandom };
  Kind kind = Kind::kForward;
  int which = 0;      // the starved queue or process; kRandom: the seed
  bool fifo = false;  // all queues of a process are one
};

struct CheckReport {
  std::string error;  // empty: proven
  uint64_t canonical =
      0;  // of who wrote what, where, between which reads; the same in every schedule
  std::vector<int64_t> pushed_bytes;  // by process: into memory of other processes of its node
  std::vector<int64_t> rail_bytes;    // by process: put into memory of other nodes

  bool is_ok() const { return error.empty(); }
};

CheckReport check(const CheckedSequence& sequence, const Schedule& schedule);

// Both modes, each queue and process starved once, `random_orders` random orders of each mode.
std::vector<Schedule> schedules_for(const CheckedSequence& sequence, int random_orders);

// The first failing report, or that of the first schedule once all agree on canonical form and
// bytes.
CheckReport check_all(const CheckedSequence& sequence, int random_orders);

}  // namespace tide
