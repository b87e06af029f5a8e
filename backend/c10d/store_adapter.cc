#include "backend/c10d/store_adapter.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace tide {
namespace {

constexpr std::chrono::milliseconds kShortestPause{1};
constexpr std::chrono::milliseconds kLongestPause{50};

}  // namespace

StoreAdapter::StoreAdapter(const c10::intrusive_ptr<c10d::Store>& store,
                           std::function<void()> check_signals)
    : store_(store), check_signals_(std::move(check_signals)) {}

c10d::Store& StoreAdapter::clone() {
  std::call_once(cloned_, [this] { clone_ = store_->clone(); });
  return *clone_;
}

void StoreAdapter::stop(const Status& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = reason;
}

std::exception_ptr StoreAdapter::take_interruption() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(interruption_, nullptr);
}

Status StoreAdapter::look_for_interrupt() {
  if (!check_signals_) return Status::ok();
  try {
    check_signals_();
    return Status::ok();
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex_);
    interruption_ = std::current_exception();
    return Status(ErrorKind::kInterrupted, "a signal handler of this rank's program raised");
  }
}

Status StoreAdapter::set(const std::string& key, const std::string& value) {
  try {
    clone().set(key, value);
    return Status::ok();
  } catch (const std::exception& error) {
    return Status(ErrorKind::kSystem, "the store refused key '" + key + "': " + error.what());
  }
}

Result<std::string> StoreAdapter::get(const std::string& key, Deadline deadline) {
  try {
    std::chrono::milliseconds pause = kShortestPause;
    while (!clone().check({key})) {
      if (Clock::now() >= deadline) {
        return Status(ErrorKind::kTimeout,
                      "no rank has set key '" + key + "' in the store in time");
      }
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!stopped_.is_ok()) return stopped_;
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, kLongestPause);
      TIDE_RETURN_IF_ERROR(look_for_interrupt());
    }
    return clone().get_to_str(key);
  } catch (const std::exception& error) {
    return Status(ErrorKind::kSystem, "the store failed at key '" + key + "': " + error.what());
  }
}

}  // namespace tide
