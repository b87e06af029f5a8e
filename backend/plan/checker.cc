// How a sequence becomes threads: each process has one thread for its script and one per (group, queue), or, as a FIFO,
// one for all queues. A queue's thread runs, operation by operation in the order of the script's kIssue items:
//   begin     waits for the issue and for the operation's dependencies, takes over what they know
//   steps     of this queue, in list order
//   read, end the points that kWaitRead, kWait and dependencies wait for
// Knowledge travels as clocks: from the issue to the queues, from a signal to the wait that it satisfies, from read and end
// points to whoever waits for them.
#include "backend/plan/checker.h"

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <tuple>

#include "backend/layout/hash.h"
#include "backend/plan/checker_memory.h"

namespace tide {
namespace {

constexpr int kScriptQueue = kQueueCount;  // stands for the script in schedules and tags

struct Item {
  enum class Kind : uint8_t { kBegin, kStep, kReadPoint, kEnd, kScript };
  Kind kind = Kind::kStep;
  int operation = -1;
  int rank = -1;
  int queue = 0;
  int index = 0;  // of the step, or of the script item
};

struct Thread {
  int process = 0;
  int queue = 0;  // kScriptQueue for the script; of a FIFO: kOwn
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

// Points of one operation on one rank, by queue; absent until reached.
struct Progress {
  std::optional<Clocks> issued;
  std::array<std::optional<Clocks>, kQueueCount> ended;
  std::array<std::optional<Clocks>, kQueueCount> read;
  std::array<bool, kQueueCount> used = {};
  std::array<bool, kQueueCount> reads = {};  // shards or gradients
};

// Whether a queue reads what the caller handed in: own shards, or gradients.
bool reads_sources(Direction direction, int queue_index) {
  const Queue queue = static_cast<Queue>(queue_index);
  if (direction == Direction::kReduce) return queue == Queue::kReducePush || queue == Queue::kSum;
  return queue == Queue::kOwn || queue == Queue::kGatherPush;
}

class Runner {
 public:
  Runner(const CheckedSequence& sequence, const Schedule& schedule)
      : sequence_(sequence), schedule_(schedule), memory_(sequence), random_(static_cast<uint32_t>(schedule.which)) {
    number_counters();
    make_threads();
  }

  CheckReport run() {
    while (error_.empty() && run_some()) {
    }
    if (error_.empty()) error_ = describe_deadlock();
    if (error_.empty()) error_ = check_counters();
    if (error_.empty()) error_ = memory_.check_amounts();
    return {error_, memory_.canonical(), memory_.pushed_bytes()};
  }

 private:
  const CheckedOperation& operation(int index) const { return sequence_.operations[index]; }
  const std::vector<int>& processes(int index) const { return sequence_.groups[operation(index).group]; }

  int rank_of(int index, int process) const {
    const std::vector<int>& members = processes(index);
    const auto found = std::find(members.begin(), members.end(), process);
    return found == members.end() ? -1 : static_cast<int>(found - members.begin());
  }

  void number_counters();
  void make_threads();
  void append_operation(int index, int rank, const std::vector<Thread*>& queues);
  Thread* thread_of(int process, int group, int queue);

  bool run_some();
  bool run_item(Thread& thread);
  bool begin(Thread& thread, const Item& item);
  bool run_step(Thread& thread, const Item& item);
  bool wait_for(Thread& thread, const Item& item, const Step& step);
  void signal(Thread& thread, const Item& item, const Step& step, int target);
  bool run_script(Thread& thread, const Item& item);
  bool join_points(Thread& thread, int index, int rank, bool read_only);

  Actor actor(const Thread& thread, const Item& item) const {
    const uint64_t tag = hash_combine(hash_combine(kHashSeed, static_cast<uint64_t>(thread.process)),
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

  const CheckedSequence& sequence_;
  Schedule schedule_;
  CheckerMemory memory_;
  std::mt19937 random_;
  std::vector<Thread> threads_;
  std::vector<size_t> order_;                          // of preference
  size_t first_starved_ = 0;                           // in order_
  std::map<std::tuple<int, int, int>, size_t> index_;  // (process, group, queue) -> thread
  std::vector<std::vector<Progress>> progress_;        // by operation and rank
  // Sum of `advance` before an operation.
  std::vector<std::array<int64_t, kCounterCount>> base_;
  std::map<std::tuple<int, int, int, int>, Word> words_;  // (group, counter, owner, writer)
  std::string error_;
};

void Runner::number_counters() {
  base_.resize(sequence_.operations.size());
  std::map<int, std::array<int64_t, kCounterCount>> sums;
  for (const ScriptItem& item : sequence_.script) {
    if (item.action != Action::kIssue) continue;
    std::array<int64_t, kCounterCount>& sum = sums[operation(item.operation).group];
    base_[item.operation] = sum;
    for (int c = 0; c < kCounterCount; ++c) sum[c] += operation(item.operation).programs.front()->advance[c];
  }
}

Thread* Runner::thread_of(int process, int group, int queue) {
  const auto key = schedule_.fifo && queue != kScriptQueue ? std::make_tuple(process, -1, 0)
                                                           : std::make_tuple(process, group, queue);
  const auto found = index_.find(key);
  if (found != index_.end()) return &threads_[found->second];
  index_[key] = threads_.size();
  Thread& thread = threads_.emplace_back();
  thread.process = process;
  thread.queue = schedule_.fifo && queue != kScriptQueue ? 0 : queue;
  return &thread;
}

void Runner::append_operation(int index, int rank, const std::vector<Thread*>& queues) {
  const Program& program = *operation(index).programs[rank];
  std::array<int, kQueueCount> last = {};
  std::array<int, kQueueCount> last_read = {};
  last.fill(-1);
  last_read.fill(-1);
  for (int i = 0; i < static_cast<int>(program.steps.size()); ++i) {
    const int queue = static_cast<int>(program.steps[i].queue);
    last[queue] = i;
    if (program.direction == Direction::kGather || i <= program.last_gradient_read) last_read[queue] = i;
  }
  Progress& progress = progress_[index][rank];
  for (int i = 0; i < static_cast<int>(program.steps.size()); ++i) {
    const int queue = static_cast<int>(program.steps[i].queue);
    std::vector<Item>& items = queues[queue]->items;
    const auto append = [&](Item::Kind kind) { items.push_back({kind, index, rank, queue, i}); };
    if (!progress.used[queue]) append(Item::Kind::kBegin);
    progress.used[queue] = true;
    append(Item::Kind::kStep);
    if (i == last_read[queue] && reads_sources(program.direction, queue)) {
      progress.reads[queue] = true;
      append(Item::Kind::kReadPoint);
    }
    if (i == last[queue]) append(Item::Kind::kEnd);
  }
}

void Runner::make_threads() {
  for (const CheckedOperation& checked : sequence_.operations) progress_.emplace_back(checked.programs.size());
  // No thread is made after the first pointer was taken, so pointers into threads_ stay valid.
  for (int process = 0; process < sequence_.processes; ++process) {
    thread_of(process, -1, kScriptQueue);
    for (int group = 0; group < static_cast<int>(sequence_.groups.size()); ++group) {
      for (int queue = 0; queue < kQueueCount; ++queue) thread_of(process, group, queue);
    }
  }
  for (int process = 0; process < sequence_.processes; ++process) {
    Thread* script = thread_of(process, -1, kScriptQueue);
    for (size_t i = 0; i < sequence_.script.size(); ++i) {
      const int index = sequence_.script[i].operation;
      const int rank = rank_of(index, process);
      if (rank < 0) continue;
      script->items.push_back({Item::Kind::kScript, index, rank, kScriptQueue, static_cast<int>(i)});
      if (sequence_.script[i].action != Action::kIssue) continue;
      std::vector<Thread*> queues;
      for (int queue = 0; queue < kQueueCount; ++queue) {
        queues.push_back(thread_of(process, operation(index).group, queue));
      }
      append_operation(index, rank, queues);
    }
  }
  std::erase_if(threads_, [](const Thread& thread) { return thread.items.empty(); });
  index_.clear();
  for (size_t i = 0; i < threads_.size(); ++i) {
    threads_[i].clocks.assign(threads_.size(), 0);
    threads_[i].clocks[i] = 1;
    order_.push_back(i);
  }
  if (schedule_.kind == Schedule::Kind::kBackward) std::reverse(order_.begin(), order_.end());
  const auto starved = [&](size_t i) {
    if (schedule_.kind == Schedule::Kind::kStarveQueue) return threads_[i].queue == schedule_.which;
    return schedule_.kind == Schedule::Kind::kStarveProcess && threads_[i].process == schedule_.which;
  };
  const auto first = std::stable_partition(order_.begin(), order_.end(), [&](size_t i) { return !starved(i); });
  first_starved_ = static_cast<size_t>(first - order_.begin());
}

// Runs items of the preferred threads that can go on; false when none can.
bool Runner::run_some() {
  if (schedule_.kind == Schedule::Kind::kRandom) {
    std::shuffle(order_.begin(), order_.end(), random_);
    for (size_t i : order_) {
      const uint32_t burst = 1 + random_() % 4;
      bool went_on = false;
      for (uint32_t k = 0; k < burst && run_item(threads_[i]); ++k) went_on = true;
      if (went_on || !error_.empty()) return true;
    }
    return false;
  }
  // A starved thread takes one item, then the others are asked again.
  for (size_t k = 0; k < order_.size(); ++k) {
    bool went_on = false;
    while (run_item(threads_[order_[k]])) {
      went_on = true;
      if (k >= first_starved_) break;
    }
    if (went_on || !error_.empty()) return true;
  }
  return false;
}

bool Runner::run_item(Thread& thread) {
  if (thread.finished() || !error_.empty()) return false;
  const Item& item = thread.items[thread.next];
  Progress& progress = progress_[item.operation][item.rank];
  bool went_on = true;
  switch (item.kind) {
    case Item::Kind::kBegin: went_on = begin(thread, item); break;
    case Item::Kind::kStep: went_on = run_step(thread, item); break;
    case Item::Kind::kReadPoint: progress.read[item.queue] = release(thread); break;
    case Item::Kind::kEnd: progress.ended[item.queue] = release(thread); break;
    case Item::Kind::kScript: went_on = run_script(thread, item); break;
  }
  if (!error_.empty()) error_ = describe(thread) + ": " + error_;
  if (went_on) ++thread.next;
  return went_on;
}

bool Runner::begin(Thread& thread, const Item& item) {
  const Progress& progress = progress_[item.operation][item.rank];
  if (!progress.issued) return false;
  join_clocks(&thread.clocks, *progress.issued);
  // Dependencies join only what they need: all of them must be there first.
  for (const Dependency& dependency : operation(item.operation).after) {
    const Progress& earlier = progress_[dependency.operation][rank_of(dependency.operation, thread.process)];
    const int sum = static_cast<int>(Queue::kSum);
    if (dependency.until == Dependency::Until::kSummed) {
      if (!earlier.used[sum]) continue;
      if (!earlier.ended[sum]) return false;
      join_clocks(&thread.clocks, *earlier.ended[sum]);
    } else if (!join_points(thread, dependency.operation, rank_of(dependency.operation, thread.process), true)) {
      return false;
    }
  }
  return true;
}

// Of all queues that the operation uses; its gradients (or shards) were read, or it is done.
bool Runner::join_points(Thread& thread, int index, int rank, bool read_only) {
  const Progress& progress = progress_[index][rank];
  if (!progress.issued) return false;
  for (int pass = 0; pass < 2; ++pass) {
    for (int q = 0; q < kQueueCount; ++q) {
      if (!(read_only ? progress.reads[q] : progress.used[q])) continue;
      const std::optional<Clocks>& point = read_only ? progress.read[q] : progress.ended[q];
      if (pass == 0 && !point) return false;
      if (pass == 1) join_clocks(&thread.clocks, *point);
    }
  }
  return true;
}

bool Runner::run_step(Thread& thread, const Item& item) {
  const Step& step = operation(item.operation).programs[item.rank]->steps[item.index];
  const int ranks = operation(item.operation).programs[item.rank]->ranks;
  if (step.peer < kAllPeers || step.peer >= ranks) {
    error_ = "names a peer that does not exist";
    return true;
  }
  if (step.op == Op::kWait) return wait_for(thread, item, step);
  if (step.op == Op::kSignal) {
    for (int target = 0; target < ranks; ++target) {
      const bool chosen = step.peer == kAllPeers ? target != item.rank
                                                 : target == (step.peer == kSelf ? item.rank : step.peer);
      if (chosen) signal(thread, item, step, target);
    }
    return true;
  }
  error_ = memory_.run(actor(thread, item), item.operation, item.rank, step);
  return true;
}

bool Runner::wait_for(Thread& thread, const Item& item, const Step& step) {
  if (step.peer == kAllPeers) {
    error_ = "waits for all peers at once";
    return true;
  }
  const int counter = static_cast<int>(step.counter);
  const int writer = step.peer == kSelf ? item.rank : step.peer;
  if (step.value > operation(item.operation).programs[item.rank]->advance[counter]) {
    error_ = "waits past the operation's advance";
    return true;
  }
  const int64_t value = base_[item.operation][counter] + step.value;
  const Word& word = words_[{operation(item.operation).group, counter, item.rank, writer}];
  // The first signal that satisfies the wait: later ones may not have come yet on another day.
  const auto enough = std::find_if(word.signals.begin(), word.signals.end(),
                                   [&](const Word::Signal& signal) { return signal.value >= value; });
  if (value <= 0) return true;
  if (enough == word.signals.end()) return false;
  join_clocks(&thread.clocks, enough->clocks);
  return true;
}

void Runner::signal(Thread& thread, const Item& item, const Step& step, int target) {
  const int counter = static_cast<int>(step.counter);
  const int64_t value = base_[item.operation][counter] + step.value;
  Word& word = words_[{operation(item.operation).group, counter, target, item.rank}];
  if (word.writer >= 0 && thread.clocks[word.writer] < word.written) {
    error_ = "signals a counter while another queue may still signal it";
  } else if (!word.signals.empty() && value <= word.signals.back().value) {
    error_ = "sets a counter from " + std::to_string(word.signals.back().value) + " to " + std::to_string(value);
  } else if (step.value > operation(item.operation).programs[item.rank]->advance[counter]) {
    error_ = "signals past the operation's advance";
  }
  word.writer = static_cast<int>(&thread - threads_.data());
  word.written = thread.clocks[word.writer];
  word.signals.push_back({value, release(thread)});
}

bool Runner::run_script(Thread& thread, const Item& item) {
  const Actor by = actor(thread, item);
  switch (sequence_.script[item.index].action) {
    case Action::kIssue: progress_[item.operation][item.rank].issued = release(thread); break;
    case Action::kWait: return join_points(thread, item.operation, item.rank, false);
    case Action::kWaitRead: return join_points(thread, item.operation, item.rank, true);
    case Action::kUseGathered: error_ = memory_.use_gathered(by, item.operation, item.rank); break;
    case Action::kWriteGradients: error_ = memory_.write_gradients(by, item.operation, item.rank); break;
    case Action::kMoveGradients: error_ = memory_.move_gradients(by, item.operation, item.rank); break;
    case Action::kReadSummed: error_ = memory_.read_summed(by, item.operation, item.rank); break;
    case Action::kUpdateShards: error_ = memory_.update_shards(by, item.operation, item.rank); break;
  }
  return true;
}

std::string Runner::describe(const Thread& thread) const {
  const Item& item = thread.items[thread.next];
  std::string text = "process " + std::to_string(thread.process) + ", operation " + std::to_string(item.operation) +
                     ", rank " + std::to_string(item.rank);
  switch (item.kind) {
    case Item::Kind::kBegin: return text + ", start of " + queue_name(static_cast<Queue>(item.queue));
    case Item::Kind::kStep:
      return text + ", step " + std::to_string(item.index) + ", " +
             to_string(operation(item.operation).programs[item.rank]->steps[item.index]);
    case Item::Kind::kScript: return text + ", script item " + std::to_string(item.index);
    default: return text;
  }
}

std::string Runner::describe_deadlock() const {
  std::string text;
  for (const Thread& thread : threads_) {
    if (!thread.finished()) text += (text.empty() ? "deadlock: " : "; ") + describe(thread);
  }
  return text;
}

std::string Runner::check_counters() const {
  std::map<std::tuple<int, int, int, int>, int64_t> finals;
  for (int o = 0; o < static_cast<int>(sequence_.operations.size()); ++o) {
    const int ranks = static_cast<int>(operation(o).programs.size());
    for (int c = 0; c < kCounterCount; ++c) {
      const int64_t advance = operation(o).programs.front()->advance[c];
      for (int rank = 0; rank < ranks; ++rank) {
        if (operation(o).programs[rank]->advance[c] != advance) return "ranks disagree about advance";
      }
      if (advance == 0) continue;
      for (int owner = 0; owner < ranks; ++owner) {
        for (int writer = 0; writer < ranks; ++writer) {
          if ((owner == writer) != (static_cast<Counter>(c) == Counter::kCast)) continue;
          const auto word = words_.find({operation(o).group, c, owner, writer});
          const int64_t wanted = base_[o][c] + advance;
          const bool reached = word != words_.end() &&
                               std::any_of(word->second.signals.begin(), word->second.signals.end(),
                                           [&](const Word::Signal& signal) { return signal.value == wanted; });
          if (!reached) {
            return "operation " + std::to_string(o) + ": " + counter_name(static_cast<Counter>(c)) + " of rank " +
                   std::to_string(owner) + " from rank " + std::to_string(writer) + " never ends at base + " +
                   std::to_string(advance);
          }
        }
      }
    }
  }
  return "";
}

std::string check_shape(const CheckedSequence& sequence) {
  for (size_t o = 0; o < sequence.operations.size(); ++o) {
    const CheckedOperation& checked = sequence.operations[o];
    const size_t ranks = sequence.groups[checked.group].size();
    if (checked.programs.size() != ranks || checked.layout->ranks() != static_cast<int>(ranks)) {
      return "operation " + std::to_string(o) + ": one program per rank is wanted";
    }
    for (const auto& program : checked.programs) {
      if (program->hash != checked.programs.front()->hash) return "programs of different collectives";
    }
  }
  return "";
}

}  // namespace

CheckReport check(const CheckedSequence& sequence, const Schedule& schedule) {
  if (std::string error = check_shape(sequence); !error.empty()) return {error, 0, {}};
  return Runner(sequence, schedule).run();
}

std::vector<Schedule> schedules_for(const CheckedSequence& sequence, int random_orders) {
  std::vector<Schedule> schedules;
  for (bool fifo : {false, true}) {
    schedules.push_back({Schedule::Kind::kForward, 0, fifo});
    schedules.push_back({Schedule::Kind::kBackward, 0, fifo});
    for (int process = 0; process < sequence.processes; ++process) {
      schedules.push_back({Schedule::Kind::kStarveProcess, process, fifo});
    }
    for (int queue = 0; queue <= kQueueCount && !fifo; ++queue) {
      schedules.push_back({Schedule::Kind::kStarveQueue, queue, fifo});
    }
    for (int seed = 1; seed <= random_orders; ++seed) schedules.push_back({Schedule::Kind::kRandom, seed, fifo});
  }
  return schedules;
}

CheckReport check_all(const CheckedSequence& sequence, int random_orders) {
  CheckReport first;
  bool any = false;
  for (const Schedule& schedule : schedules_for(sequence, random_orders)) {
    CheckReport report = check(sequence, schedule);
    if (!report.is_ok()) return report;
    if (!any) first = report;
    any = true;
    if (report.canonical != first.canonical || report.pushed_bytes != first.pushed_bytes) {
      report.error = "two orders of the same programs touch memory differently";
      return report;
    }
  }
  return first;
}

}  // namespace tide
