// The rules by which threads go on: what each item waits for, and what it learns there.
#include "backend/plan/checker_runner.h"

namespace tide::checking {

// Runs items of the preferred threads that can go on; false when none can.
bool CheckerRunner::run_some() {
  // With many threads most are blocked, and asking all of them again after every burst would cost
  // more than the burst: then each is asked once before the first is asked again.
  constexpr size_t kManyThreads = 100;
  const bool many = order_.size() > kManyThreads;
  if (schedule_.kind == Schedule::Kind::kRandom) {
    std::shuffle(order_.begin(), order_.end(), random_);
    bool went_on = false;
    for (size_t i : order_) {
      const uint32_t burst = 1 + random_() % 4;
      for (uint32_t k = 0; k < burst && run_item(threads_[i]); ++k) went_on = true;
      if (!error_.empty() || (went_on && !many)) return true;
    }
    return went_on;
  }
  // A starved thread takes one item, then the others are asked again.
  bool went_on = false;
  for (size_t k = 0; k < order_.size() && !(went_on && k >= first_starved_); ++k) {
    while (run_item(threads_[order_[k]])) {
      went_on = true;
      if (k >= first_starved_) break;
    }
    if (!error_.empty() || (went_on && !many)) return true;
  }
  return went_on;
}

bool CheckerRunner::run_item(Thread& thread) {
  if (thread.finished() || !error_.empty()) return false;
  const Item& item = thread.items[thread.next];
  Progress& progress = progress_[item.operation][item.rank];
  bool went_on = true;
  switch (item.kind) {
    case Item::Kind::kBegin:
      went_on = begin(thread, item);
      break;
    case Item::Kind::kStep:
      went_on = run_step(thread, item);
      break;
    case Item::Kind::kReadPoint:
      progress.read[item.queue] = release(thread);
      break;
    case Item::Kind::kEnd:
      progress.ended[item.queue] = release(thread);
      break;
    case Item::Kind::kScript:
      went_on = run_script(thread, item);
      break;
    case Item::Kind::kHead:
      went_on = land_head(thread, item);
      break;
    case Item::Kind::kTail:
      land_tail(thread, item);
      break;
  }
  if (!error_.empty()) error_ = describe(thread) + ": " + error_;
  if (went_on) ++thread.next;
  return went_on;
}

bool CheckerRunner::begin(Thread& thread, const Item& item) {
  const Progress& progress = progress_[item.operation][item.rank];
  if (!progress.issued) return false;
  join_clocks(&thread.clocks, *progress.issued);
  // Dependencies join only what they need: all of them must be there first.
  for (const Dependency& dependency : operation(item.operation).after) {
    const Progress& earlier =
        progress_[dependency.operation][rank_of(dependency.operation, thread.process)];
    const int sum = static_cast<int>(Queue::kSum);
    if (dependency.until == Dependency::Until::kSummed) {
      if (!earlier.used[sum]) continue;
      if (!earlier.ended[sum]) return false;
      join_clocks(&thread.clocks, *earlier.ended[sum]);
    } else if (!join_points(thread, dependency.operation,
                            rank_of(dependency.operation, thread.process), true)) {
      return false;
    }
  }
  return true;
}

// Of all queues that the operation uses; its gradients (or shards) were read, or it is done.
bool CheckerRunner::join_points(Thread& thread, int index, int rank, bool read_only) {
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

bool CheckerRunner::run_step(Thread& thread, const Item& item) {
  const Program& program = *operation(item.operation).programs[item.rank];
  const Step& step = program.steps[item.index];
  if (is_network_step(step.op)) return run_network(thread, item, step);
  const std::vector<int> targets = targets_of(program, step.peer);
  if (targets.empty() && step.peer != kAllPeers) {
    error_ = "names a peer that does not exist, or not in this node";
    return true;
  }
  if ((step.peer == kAllRanks && step.op != Op::kCopy) ||
      (step.peer == kAllPeers && step.op != Op::kSignal)) {
    error_ = "copies to all ranks and signals to all peers, not the other way round";
    return true;
  }
  if (step.op == Op::kWait) return wait_for(thread, item, step);
  if (step.op == Op::kSignal) {
    for (int target : targets) signal(thread, item, step, target);
    return true;
  }
  error_ = memory_.run(actor(thread, item), item.operation, item.rank, step);
  return true;
}

bool CheckerRunner::wait_for(Thread& thread, const Item& item, const Step& step) {
  const int counter = static_cast<int>(step.counter);
  const int writer = step.peer == kSelf ? item.rank : step.peer;
  if (step.value > operation(item.operation).programs[item.rank]->advance[counter]) {
    error_ = "waits past the operation's advance";
    return true;
  }
  const int64_t value = base_[item.operation][counter] + step.value;
  const Word& word = words_[{operation(item.operation).group, counter, item.rank, writer}];
  // The first signal that satisfies the wait: later ones may not have come yet on another day.
  const auto enough =
      std::find_if(word.signals.begin(), word.signals.end(),
                   [&](const Word::Signal& signal) { return signal.value >= value; });
  if (value <= 0) return true;
  if (enough == word.signals.end()) return false;
  join_clocks(&thread.clocks, enough->clocks);
  return true;
}

void CheckerRunner::signal(Thread& thread, const Item& item, const Step& step, int target) {
  const int counter = static_cast<int>(step.counter);
  const int64_t value = base_[item.operation][counter] + step.value;
  Word& word = words_[{operation(item.operation).group, counter, target, item.rank}];
  if (word.writer >= 0 && thread.clocks[word.writer] < word.written) {
    error_ = "signals a counter while another queue may still signal it";
  } else if (!word.signals.empty() && value <= word.signals.back().value) {
    error_ = "sets a counter from " + std::to_string(word.signals.back().value) + " to " +
             std::to_string(value);
  } else if (step.value > operation(item.operation).programs[item.rank]->advance[counter]) {
    error_ = "signals past the operation's advance";
  }
  word.writer = static_cast<int>(&thread - threads_.data());
  word.written = thread.clocks[word.writer];
  word.signals.push_back({value, release(thread)});
}

bool CheckerRunner::run_script(Thread& thread, const Item& item) {
  const Actor by = actor(thread, item);
  switch (sequence_.script[item.index].action) {
    case Action::kIssue:
      progress_[item.operation][item.rank].issued = release(thread);
      break;
    case Action::kWait:
      return join_points(thread, item.operation, item.rank, false);
    case Action::kWaitRead:
      return join_points(thread, item.operation, item.rank, true);
    case Action::kUseGathered:
      error_ = memory_.use_gathered(by, item.operation, item.rank);
      break;
    case Action::kWriteGradients:
      error_ = memory_.write_gradients(by, item.operation, item.rank);
      break;
    case Action::kMoveGradients:
      error_ = memory_.move_gradients(by, item.operation, item.rank);
      break;
    case Action::kReadSummed:
      error_ = memory_.read_summed(by, item.operation, item.rank);
      break;
    case Action::kUpdateShards:
      error_ = memory_.update_shards(by, item.operation, item.rank);
      break;
  }
  return true;
}

}  // namespace tide::checking
