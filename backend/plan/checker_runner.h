// How a sequence becomes threads: each process has one thread for its script and one per (group,
// queue), or, as a FIFO, one for all queues. A queue's thread runs, operation by operation in the
// order of the script's kIssue items:
//   begin     waits for the issue and for the operation's dependencies, takes over what they know
//   steps     of this queue, in list order
//   read, end the points that kWaitRead, kWait and dependencies wait for
// Knowledge travels as clocks: from the issue to the queues, from a signal to the wait that it
// satisfies, from read and end points to whoever waits for them.
//
// A put has a thread of its own, that lands its head and then the rest at any time after it was
// posted: puts of one rail are not ordered. The i-th puts of a process's gathers (or reduces) share
// a thread; the drain of the earlier operation must lie before the later one's put.
//
// Internal to the checker.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "backend/layout/hash.h"
#include "backend/plan/checker.h"
#include "backend/plan/checker_memory.h"

namespace tide::checking {

inline constexpr int kScriptQueue = kQueueCount;  // stands for the script in schedules and tags
inline constexpr int kDeliveryQueue = kQueueCount + 1;  // of puts under way

struct Item {
  enum class Kind : uint8_t { kBegin, kStep, kReadPoint, kEnd, kScript, kHead, kTail };
  Kind kind = Kind::kStep;
  int operation = -1;
  int rank = -1;
  int queue = 0;
  int index = 0;  // of the step, or of the script item
};

struct Thread {
  int process = 0;
  int queue = 0;  // kScriptQueue for the script; of a FIFO: kOwn
  std::string name;
  std::vector<Item> items;
  size_t next = 0;
  Clocks clocks;
  bool finished() const { return next == items.size(); }
};

// A word of a control page: what was signalled, in order.
struct Word {
  struct Signal {
    int64_t value = 0;
    Clocks clocks;
  };
  std::vector<Signal> signals;
  int writer = -1;  // thread of the last signal
  uint32_t written = 0;
};

// A put of one operation: where it is.
struct Delivery {
  size_t thread = 0;
  std::optional<Clocks> posted;
  std::optional<Clocks> head;  // what its landing tells
  std::optional<Clocks> whole;
};

// An event between nodes.
struct Message {
  int64_t amount = 0;
  Clocks clocks;
  bool awaited = false;
};

// Points of one operation on one rank, by queue; absent until reached.
struct Progress {
  std::optional<Clocks> issued;
  std::array<std::optional<Clocks>, kQueueCount> ended;
  std::array<std::optional<Clocks>, kQueueCount> read;
  std::array<bool, kQueueCount> used = {};
  std::array<bool, kQueueCount> reads = {};  // shards or gradients
  std::map<int, Delivery> puts;              // by step
  bool drained = false;
};

class CheckerRunner {
 public:
  CheckerRunner(const CheckedSequence& sequence, const Schedule& schedule)
      : sequence_(sequence),
        schedule_(schedule),
        memory_(sequence),
        random_(static_cast<uint32_t>(schedule.which)) {
    number_counters();
    make_threads();
  }

  CheckReport run() {
    while (error_.empty() && run_some()) {
    }
    if (error_.empty()) error_ = describe_deadlock();
    if (error_.empty()) error_ = check_counters();
    if (error_.empty()) error_ = check_messages();
    if (error_.empty()) error_ = memory_.check_amounts();
    return {error_, memory_.canonical(), memory_.pushed_bytes(), memory_.rail_bytes()};
  }

 private:
  const CheckedOperation& operation(int index) const { return sequence_.operations[index]; }
  const std::vector<int>& processes(int index) const {
    return sequence_.groups[operation(index).group];
  }

  int rank_of(int index, int process) const {
    const std::vector<int>& members = processes(index);
    const auto found = std::find(members.begin(), members.end(), process);
    return found == members.end() ? -1 : static_cast<int>(found - members.begin());
  }

  void number_counters();
  void make_threads();
  void append_deliveries(int index, int rank);
  void append_operation(int index, int rank, const std::vector<Thread*>& queues);
  Thread* thread_of(int process, int group, int queue);

  bool run_some();
  bool run_item(Thread& thread);
  bool begin(Thread& thread, const Item& item);
  bool run_step(Thread& thread, const Item& item);
  bool wait_for(Thread& thread, const Item& item, const Step& step);
  void signal(Thread& thread, const Item& item, const Step& step, int target);
  bool run_script(Thread& thread, const Item& item);
  bool run_network(Thread& thread, const Item& item, const Step& step);
  bool land_head(Thread& thread, const Item& item);
  void land_tail(Thread& thread, const Item& item);
  void post(Thread& thread, const Item& item, const Step& step);
  std::string check_pacing(const Thread& thread, const Item& item, const Step& step) const;
  bool knows(const Thread& thread, const Delivery& put, bool whole) const;
  bool arrive(Thread& thread, const Item& item, const Step& step);
  bool drain(Thread& thread, const Item& item);
  void send(Thread& thread, const Item& item, const Step& step, RailEvent event, int64_t amount);
  bool join_points(Thread& thread, int index, int rank, bool read_only);

  Actor actor(const Thread& thread, const Item& item) const {
    const uint64_t tag =
        hash_combine(hash_combine(kHashSeed, static_cast<uint64_t>(thread.process)),
                     static_cast<uint64_t>(item.operation));
    return {static_cast<int>(&thread - threads_.data()), &thread.clocks, tag};
  }
  // What others learn from `thread` now; what it does next is no longer part of it.
  Clocks release(Thread& thread) {
    Clocks clocks = thread.clocks;
    ++thread.clocks[&thread - threads_.data()];
    return clocks;
  }

  std::string describe(const Thread& thread) const;
  std::string describe_deadlock() const;
  std::string check_counters() const;
  std::string check_messages() const;

  const CheckedSequence& sequence_;
  Schedule schedule_;
  CheckerMemory memory_;
  std::mt19937 random_;
  std::vector<Thread> threads_;
  std::vector<int> most_puts_;                         // of one program, by group
  std::vector<size_t> order_;                          // of preference
  size_t first_starved_ = 0;                           // in order_
  std::map<std::tuple<int, int, int>, size_t> index_;  // (process, group, queue) -> thread
  std::vector<std::vector<Progress>> progress_;        // by operation and rank
  // Sum of `advance` before an operation.
  std::vector<std::array<int64_t, kCounterCount>> base_;
  std::map<std::tuple<int, int, int, int>, Word> words_;  // (group, counter, owner, writer)
  // (operation, receiver, sender, event, round, part)
  std::map<std::tuple<int, int, int, RailEvent, int, int>, Message> messages_;
  std::string error_;
};

}  // namespace tide::checking
