// Setting a sequence up as threads, and what is said and checked when they have come to an end.
#include "backend/plan/checker_runner.h"

namespace tide::checking {
namespace {

// Whether a queue reads what the caller handed in: own shards, or gradients.
bool reads_sources(Direction direction, int queue_index) {
  const Queue queue = static_cast<Queue>(queue_index);
  if (direction == Direction::kReduce) return queue == Queue::kReducePush || queue == Queue::kSum;
  return queue == Queue::kOwn || queue == Queue::kGatherPush || queue == Queue::kRail;
}

// The queue of the first put of a program; each direction has as many as any program needs.
int first_delivery(Direction direction, int most_puts) {
  return kDeliveryQueue + (direction == Direction::kReduce ? most_puts : 0);
}

// Whether a rank signals the counter to itself, and whether to others.
bool to_itself(Counter counter) { return counter >= Counter::kCast; }
bool to_others(Counter counter) {
  return counter < Counter::kCast || counter >= Counter::kBlockArrival;
}

}  // namespace

void CheckerRunner::number_counters() {
  base_.resize(sequence_.operations.size());
  std::map<int, std::array<int64_t, kCounterCount>> sums;
  for (const ScriptItem& item : sequence_.script) {
    if (item.action != Action::kIssue) continue;
    std::array<int64_t, kCounterCount>& sum = sums[operation(item.operation).group];
    base_[item.operation] = sum;
    for (int c = 0; c < kCounterCount; ++c)
      sum[c] += operation(item.operation).programs.front()->advance[c];
  }
}

// A queue from kDeliveryQueue on is that of the process's first, second, ... puts.
Thread* CheckerRunner::thread_of(int process, int group, int queue) {
  const bool merged = schedule_.fifo && queue < kScriptQueue;
  const auto key =
      merged ? std::make_tuple(process, -1, 0) : std::make_tuple(process, group, queue);
  const auto found = index_.find(key);
  if (found != index_.end()) return &threads_[found->second];
  index_[key] = threads_.size();
  Thread& thread = threads_.emplace_back();
  thread.process = process;
  thread.queue = merged ? 0 : std::min(queue, kDeliveryQueue);
  thread.name = queue == kScriptQueue     ? "the script"
                : queue >= kDeliveryQueue ? "put " + std::to_string(queue - kDeliveryQueue)
                : merged                  ? "the queues"
                                          : queue_name(Queue(queue));
  thread.name += " of process " + std::to_string(process);
  return &thread;
}

// Puts of one operation, in the order of its program.
void CheckerRunner::append_deliveries(int index, int rank) {
  const Program& program = *operation(index).programs[rank];
  int queue = first_delivery(program.direction, most_puts_[operation(index).group]);
  for (int i = 0; i < static_cast<int>(program.steps.size()); ++i) {
    if (program.steps[i].op != Op::kPut) continue;
    Thread* thread = thread_of(processes(index)[rank], operation(index).group, queue++);
    thread->items.push_back({Item::Kind::kHead, index, rank, kDeliveryQueue, i});
    thread->items.push_back({Item::Kind::kTail, index, rank, kDeliveryQueue, i});
  }
}

void CheckerRunner::append_operation(int index, int rank, const std::vector<Thread*>& queues) {
  const Program& program = *operation(index).programs[rank];
  std::array<int, kQueueCount> last = {};
  std::array<int, kQueueCount> last_read = {};
  last.fill(-1);
  last_read.fill(-1);
  for (int i = 0; i < static_cast<int>(program.steps.size()); ++i) {
    const int queue = static_cast<int>(program.steps[i].queue);
    last[queue] = i;
    if (program.direction == Direction::kGather || i <= program.last_gradient_read)
      last_read[queue] = i;
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

void CheckerRunner::make_threads() {
  for (const CheckedOperation& checked : sequence_.operations)
    progress_.emplace_back(checked.programs.size());
  most_puts_.assign(sequence_.groups.size(), 0);
  for (const CheckedOperation& checked : sequence_.operations) {
    for (const auto& program : checked.programs) {
      const auto count = std::count_if(program->steps.begin(), program->steps.end(),
                                       [](const Step& step) { return step.op == Op::kPut; });
      most_puts_[checked.group] = std::max(most_puts_[checked.group], static_cast<int>(count));
    }
  }
  // No thread is made after the first pointer was taken, so pointers into threads_ stay valid.
  for (int process = 0; process < sequence_.processes; ++process) {
    thread_of(process, -1, kScriptQueue);
    for (int group = 0; group < static_cast<int>(sequence_.groups.size()); ++group) {
      for (int queue = 0; queue < kQueueCount; ++queue) thread_of(process, group, queue);
      for (int put = 0; put < 2 * most_puts_[group]; ++put)
        thread_of(process, group, kDeliveryQueue + put);
    }
  }
  for (int process = 0; process < sequence_.processes; ++process) {
    Thread* script = thread_of(process, -1, kScriptQueue);
    for (size_t i = 0; i < sequence_.script.size(); ++i) {
      const int index = sequence_.script[i].operation;
      const int rank = rank_of(index, process);
      if (rank < 0) continue;
      script->items.push_back(
          {Item::Kind::kScript, index, rank, kScriptQueue, static_cast<int>(i)});
      if (sequence_.script[i].action != Action::kIssue) continue;
      std::vector<Thread*> queues;
      for (int queue = 0; queue < kQueueCount; ++queue) {
        queues.push_back(thread_of(process, operation(index).group, queue));
      }
      append_operation(index, rank, queues);
      append_deliveries(index, rank);
    }
  }
  std::erase_if(threads_, [](const Thread& thread) { return thread.items.empty(); });
  index_.clear();
  std::vector<std::string> names;
  for (const Thread& thread : threads_) names.push_back(thread.name);
  memory_.name_threads(std::move(names));
  for (size_t i = 0; i < threads_.size(); ++i) {
    threads_[i].clocks.assign(threads_.size(), 0);
    threads_[i].clocks[i] = 1;
    order_.push_back(i);
    for (const Item& item : threads_[i].items) {
      if (item.kind == Item::Kind::kHead)
        progress_[item.operation][item.rank].puts[item.index].thread = i;
    }
  }
  if (schedule_.kind == Schedule::Kind::kBackward) std::reverse(order_.begin(), order_.end());
  const auto starved = [&](size_t i) {
    if (schedule_.kind == Schedule::Kind::kStarveQueue) return threads_[i].queue == schedule_.which;
    return schedule_.kind == Schedule::Kind::kStarveProcess &&
           threads_[i].process == schedule_.which;
  };
  const auto first =
      std::stable_partition(order_.begin(), order_.end(), [&](size_t i) { return !starved(i); });
  first_starved_ = static_cast<size_t>(first - order_.begin());
}

std::string CheckerRunner::describe(const Thread& thread) const {
  const Item& item = thread.items[thread.next];
  std::string text = "process " + std::to_string(thread.process) + ", operation " +
                     std::to_string(item.operation) + ", rank " + std::to_string(item.rank);
  switch (item.kind) {
    case Item::Kind::kBegin:
      return text + ", start of " + queue_name(static_cast<Queue>(item.queue));
    case Item::Kind::kStep:
    case Item::Kind::kHead:
    case Item::Kind::kTail:
      return text + ", step " + std::to_string(item.index) + ", " +
             to_string(operation(item.operation).programs[item.rank]->steps[item.index]);
    case Item::Kind::kScript:
      return text + ", script item " + std::to_string(item.index);
    default:
      return text;
  }
}

std::string CheckerRunner::describe_deadlock() const {
  std::string text;
  for (const Thread& thread : threads_) {
    if (!thread.finished()) text += (text.empty() ? "deadlock: " : "; ") + describe(thread);
  }
  return text;
}

std::string CheckerRunner::check_counters() const {
  std::map<std::tuple<int, int, int, int>, int64_t> finals;
  for (int o = 0; o < static_cast<int>(sequence_.operations.size()); ++o) {
    const int ranks = static_cast<int>(operation(o).programs.size());
    for (int c = 0; c < kCounterCount; ++c) {
      const int64_t advance = operation(o).programs.front()->advance[c];
      for (int rank = 0; rank < ranks; ++rank) {
        if (operation(o).programs[rank]->advance[c] != advance)
          return "ranks disagree about advance";
      }
      if (advance == 0) continue;
      for (int owner = 0; owner < ranks; ++owner) {
        for (int writer = 0; writer < ranks; ++writer) {
          const Counter counter = static_cast<Counter>(c);
          if (!(owner == writer ? to_itself(counter) : to_others(counter))) continue;
          if (!operation(o).programs[owner]->is_local(writer)) continue;
          const auto word = words_.find({operation(o).group, c, owner, writer});
          const int64_t wanted = base_[o][c] + advance;
          const bool reached =
              word != words_.end() &&
              std::any_of(word->second.signals.begin(), word->second.signals.end(),
                          [&](const Word::Signal& signal) { return signal.value == wanted; });
          if (!reached) {
            return "operation " + std::to_string(o) + ": " + counter_name(static_cast<Counter>(c)) +
                   " of rank " + std::to_string(owner) + " from rank " + std::to_string(writer) +
                   " never ends at base + " + std::to_string(advance);
          }
        }
      }
    }
  }
  return "";
}

}  // namespace tide::checking
