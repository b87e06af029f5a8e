#include "transports/cuda/wait_watch.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>

namespace tide::cuda {
namespace {

constexpr std::chrono::milliseconds kLook{
    1};  // between looks at the progress words while something is pending
constexpr std::chrono::milliseconds kCheck{100};  // between calls of a guard's check
constexpr std::chrono::milliseconds kRepeat{10};  // between writes of poison
constexpr size_t kMostWords = 256;                // poisoned at once

bool has_failed(const WaitGuard& guard) {
  return guard.failed != nullptr && guard.failed->load(std::memory_order_seq_cst);
}

}  // namespace

WaitWatch::WaitWatch(Options options)
    : options_(std::move(options)), queues_(static_cast<size_t>(options_.queues)) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);  // the program's signal handlers belong on the program's threads
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

WaitWatch::~WaitWatch() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

uint32_t WaitWatch::add(int queue, DevicePointer word, uint32_t value, WaitGuard guard,
                        std::function<void(bool)> passed) {
  auto entry = std::make_shared<Entry>();
  entry->word = word;
  entry->value = value;
  entry->guard = std::move(guard);
  entry->passed = std::move(passed);
  std::lock_guard lock(mutex_);
  Queue& to = queues_.at(static_cast<size_t>(queue));
  entry->step = ++to.steps;
  to.entries.push_back(std::move(entry));
  if (idle_) changed_.notify_all();  // else it looks soon by itself
  return to.steps;
}

void WaitWatch::take_back(int queue) {
  std::lock_guard lock(mutex_);
  Queue& from = queues_.at(static_cast<size_t>(queue));
  if (!from.entries.empty()) from.entries.pop_back();
  changed_.notify_all();
}

void WaitWatch::poison() {
  std::lock_guard lock(mutex_);
  poisoned_ = true;
  changed_.notify_all();
}

bool WaitWatch::is_poisoned() const {
  std::lock_guard lock(mutex_);
  return poisoned_;
}

bool WaitWatch::is_drained() const {
  std::lock_guard lock(mutex_);
  return std::all_of(queues_.begin(), queues_.end(),
                     [](const Queue& queue) { return queue.entries.empty(); });
}

bool WaitWatch::wait_drained(std::chrono::milliseconds timeout) const {
  const Deadline deadline = Clock::now() + timeout;
  while (!is_drained()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kLook);
  }
  return true;
}

std::vector<std::string> WaitWatch::standing_in() const {
  std::vector<std::string> result;
  std::lock_guard lock(mutex_);
  for (size_t q = 0; q < queues_.size(); ++q) {
    for (const std::shared_ptr<Entry>& entry : queues_[q].entries) {
      const uint32_t at = progress_of(static_cast<int>(q));
      if (static_cast<int32_t>(at - 2 * entry->step) >= 0) continue;  // passed, not retired yet
      if (entry->word != 0 && at == 2 * entry->step - 1) result.push_back(entry->guard.what);
      break;
    }
  }
  return result;
}

void WaitWatch::wake() {
  std::lock_guard lock(mutex_);
  woken_ = true;
  changed_.notify_all();
}

uint64_t WaitWatch::poison_writes() const {
  std::lock_guard lock(mutex_);
  return poison_writes_;
}

void WaitWatch::run() {
  (void)options_.device->api().context_set_current(options_.device->context());
  std::unique_lock lock(mutex_);
  Deadline next_poison{};
  while (true) {
    retire(lock);
    const bool pending = std::any_of(queues_.begin(), queues_.end(),
                                     [](const Queue& queue) { return !queue.entries.empty(); });
    if (ending_) return;
    if (!pending) {
      idle_ = true;
      changed_.wait(lock);
      idle_ = false;
      continue;
    }
    if (!poisoned_) {
      const Status status = look(lock);
      if (!status.is_ok()) {
        poisoned_ = true;
        if (!std::exchange(reported_, true) && options_.on_failure) {
          lock.unlock();
          options_.on_failure(status);
          lock.lock();
        }
      }
    }
    if (poisoned_ && Clock::now() >= next_poison) {
      retire(lock);  // what has passed by itself
      is_clean_ = false;
      write_poison(lock);
      next_poison = Clock::now() + kRepeat;
    }
    changed_.wait_for(lock, kLook);
  }
}

// Drops what the queues have passed.
void WaitWatch::retire(std::unique_lock<std::mutex>& lock) {
  std::vector<std::function<void(bool)>> passed;
  const bool clean = is_clean_;
  for (size_t q = 0; q < queues_.size(); ++q) {
    Queue& queue = queues_[q];
    while (!queue.entries.empty()) {
      Entry& entry = *queue.entries.front();
      // 2n passes step n; a new queue's word is 0. Cyclic, as the device compares.
      if (static_cast<int32_t>(progress_of(static_cast<int>(q)) - 2 * entry.step) < 0) break;
      if (entry.passed) passed.push_back(std::move(entry.passed));
      queue.entries.pop_front();
    }
  }
  if (passed.empty()) return;
  lock.unlock();
  for (const auto& call : passed) call(clean);
  lock.lock();
}

// The first error among the waits that are reached.
Status WaitWatch::look(std::unique_lock<std::mutex>& lock) {
  const bool woken = std::exchange(woken_, false);
  const Deadline now = Clock::now();
  for (size_t q = 0; q < queues_.size(); ++q) {
    if (queues_[q].entries.empty()) continue;
    const std::shared_ptr<Entry> entry = queues_[q].entries.front();
    const std::string label = options_.label + ": ";
    if (has_failed(entry->guard)) {
      return {ErrorKind::kPeerLost,
              label + "the group failed while waiting (" + entry->guard.what + ")"};
    }
    if (entry->word == 0) continue;  // marks wait for nothing
    if (progress_of(static_cast<int>(q)) != 2 * entry->step - 1) continue;
    if (!entry->reached) {
      entry->reached = true;
      entry->since = now;
      entry->next_check = now + kCheck;
    }
    if (entry->guard.check && (woken || now >= entry->next_check)) {
      entry->next_check = now + kCheck;
      lock.unlock();
      const Status checked = entry->guard.check();
      lock.lock();
      // A signal that came before the peer's end counts: the queue has then moved on.
      if (!checked.is_ok() && progress_of(static_cast<int>(q)) == 2 * entry->step - 1)
        return checked;
      continue;
    }
    if (now - entry->since >= entry->guard.timeout) {
      return {ErrorKind::kTimeout,
              label + "waited " + std::to_string(entry->guard.timeout.count()) + " ms for " +
                  entry->guard.what + ", wanted counter " + std::to_string(entry->value)};
    }
  }
  return Status::ok();
}

void WaitWatch::write_poison(std::unique_lock<std::mutex>& lock) {
  std::vector<std::pair<DevicePointer, uint32_t>> words;
  for (const Queue& queue : queues_) {
    for (const std::shared_ptr<Entry>& entry : queue.entries) {
      if (entry->word == 0) continue;
      const auto known = std::find_if(words.begin(), words.end(),
                                      [&](const auto& w) { return w.first == entry->word; });
      if (known == words.end()) words.emplace_back(entry->word, entry->value + kPoisonDistance);
      if (words.size() >= kMostWords) break;
    }
  }
  poison_writes_ += words.size() + 1;
  lock.unlock();
  const DriverApi& api = options_.device->api();
  (void)api.write_value(options_.poison_stream, options_.poison_flag, 1, 0);
  for (const auto& [word, value] : words)
    (void)api.write_value(options_.poison_stream, word, value, 0);
  lock.lock();
}

}  // namespace tide::cuda
