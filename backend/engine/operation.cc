#include "backend/engine/operation.h"

#include <sched.h>

#include <utility>

#include "backend/engine/operation_state.h"

namespace tide {
namespace {

constexpr std::chrono::microseconds kSpin{30};

}  // namespace

OperationState::OperationState(CallRecord record, std::string subject,
                               std::shared_ptr<CompletionThread> completion)
    : record_(record), subject_(std::move(subject)), completion_(std::move(completion)) {}

std::string OperationState::name() const {
  return std::string(call_kind_name(record_.kind)) + " " + std::to_string(record_.sequence) +
         " of " + subject_;
}

Status OperationState::status() const {
  if (!is_done()) return Status::ok();
  std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

Status OperationState::wait(std::optional<std::chrono::milliseconds> timeout) {
  spin_until_done();
  std::unique_lock<std::mutex> lock(mutex_);
  const auto done = [this] { return done_.load(std::memory_order_relaxed); };
  if (!timeout) {
    changed_.wait(lock, done);
  } else if (!changed_.wait_for(lock, *timeout, done)) {
    return Status(ErrorKind::kTimeout, name() + " is not done yet; it goes on");
  }
  return status_;
}

// An operation that is nearly done costs no sleep and its lane no wake-up; the yields let the lane
// have this core.
void OperationState::spin_until_done() const {
  const Deadline until = Clock::now() + kSpin;
  while (!is_done() && Clock::now() < until) sched_yield();
}

Status OperationState::wait_read(std::optional<std::chrono::milliseconds> timeout) {
  if (read_.load(std::memory_order_acquire) && !is_done()) return Status::ok();
  std::unique_lock<std::mutex> lock(mutex_);
  const auto read = [this] {
    return done_.load(std::memory_order_relaxed) || read_.load(std::memory_order_relaxed);
  };
  if (!timeout) {
    changed_.wait(lock, read);
  } else if (!changed_.wait_for(lock, *timeout, read)) {
    return Status(ErrorKind::kTimeout, name() + " has not read its inputs yet; it goes on");
  }
  return status_;
}

Status OperationState::release(void* user_stream) {
  if (!is_enqueued_) return wait(std::nullopt);
  if (is_done()) return status();
  for (const QueuePoint& end : ends_) TIDE_RETURN_IF_ERROR(end.point->release(user_stream));
  return Status::ok();
}

Status OperationState::release_read(void* user_stream) {
  if (!is_enqueued_) return wait_read(std::nullopt);
  if (is_done()) return status();
  for (const QueuePoint& read : reads_) TIDE_RETURN_IF_ERROR(read.point->release(user_stream));
  return Status::ok();
}

void OperationState::set_points(std::vector<QueuePoint> ends, std::vector<QueuePoint> reads) {
  is_enqueued_ = true;
  ends_ = std::move(ends);
  reads_ = std::move(reads);
}

std::vector<OperationState::QueuePoint> OperationState::ends() const {
  return is_done() ? std::vector<QueuePoint>() : ends_;
}

void OperationState::on_done(std::function<void(const Status&)> callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!done_.load(std::memory_order_relaxed)) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback(status());
}

void OperationState::expect(int lanes, int reading_lanes) {
  lanes_left_ = lanes;
  readers_left_ = reading_lanes;
  times_.queued = Clock::now();
}

void OperationState::lane_passed_reads() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--readers_left_ > 0) return;
    read_.store(true, std::memory_order_release);
  }
  changed_.notify_all();  // outside the lock: who wakes need not sleep again for it
}

void OperationState::lane_moved() {
  std::lock_guard<std::mutex> lock(mutex_);
  moved_ = true;
  changed_.notify_all();
}

void OperationState::wait_moved() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return moved_; });
}

void OperationState::lane_done(const Status& status) {
  Binding dropped;  // destroyed outside the lock
  std::vector<std::function<void(const Status&)>> callbacks;
  Status result;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!status.is_ok() && status_.is_ok()) status_ = status;
    if (--lanes_left_ > 0) return;
    dropped = std::move(binding_);
    callbacks.swap(callbacks_);
    result = status_;
    times_.done = Clock::now();
    read_.store(true, std::memory_order_release);
    done_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
  if (is_enqueued_) {
    // On a thread of the fabric: memory that ends with the binding is unmapped elsewhere.
    completion_->post([kept = std::make_shared<Binding>(std::move(dropped))] {});
  }
  for (std::function<void(const Status&)>& callback : callbacks) {
    completion_->post([callback = std::move(callback), result] { callback(result); });
  }
}

// One word: counter + 1 in 8 bits, rank in 24, value in 32.
void OperationState::set_waiting(const WaitingFor& waiting) {
  waiting_.store(static_cast<uint64_t>(waiting.counter + 1) << 56 |
                     static_cast<uint64_t>(waiting.from) << 32 | waiting.value,
                 std::memory_order_relaxed);
}

WaitingFor OperationState::waiting() const {
  const uint64_t word = waiting_.load(std::memory_order_relaxed);
  return {static_cast<int>(word >> 56) - 1, static_cast<int>(word >> 32 & 0xffffff),
          static_cast<uint32_t>(word)};
}

void OperationState::set_rail_wait(const std::optional<RailWait>& wait) {
  std::lock_guard<std::mutex> lock(mutex_);
  rail_wait_ = wait;
}

std::optional<RailWait> OperationState::rail_wait() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return rail_wait_;
}

void OperationState::add_wait(int from, uint64_t microseconds) {
  waited_.fetch_add(microseconds, std::memory_order_relaxed);
  const uint64_t word = microseconds << 24 | static_cast<uint64_t>(from);
  uint64_t longest = longest_wait_.load(std::memory_order_relaxed);
  while (word > longest && !longest_wait_.compare_exchange_weak(longest, word)) {
  }
}

OperationState::Waited OperationState::waited() const {
  const uint64_t all = waited_.load(std::memory_order_relaxed);
  if (all == 0) return {};
  return {all, static_cast<int>(longest_wait_.load(std::memory_order_relaxed) & 0xffffff)};
}

OperationState::Phase OperationState::phase() const {
  if (is_done()) return status().is_ok() ? Phase::kDone : Phase::kFailed;
  return started_.load(std::memory_order_relaxed) ? Phase::kRunning : Phase::kQueued;
}

OperationState::Times OperationState::times() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return times_;
}

}  // namespace tide
