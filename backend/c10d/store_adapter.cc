#include "backend/c10d/store_adapter.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace tide {
namespace {

constexpr std::chrono::milliseconds kShortestPause{1};
constexpr std::chrono::milliseconds kLongestPause{50};
constexpr std::chrono::seconds kRefusalPatience{1};

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

void StoreAdapter::remove(const std::string& key) {
  try {
    clone().deleteKey(key);
  } catch (const std::exception&) {  // some stores keep what they have
  }
}

void StoreAdapter::start_round(int groups_made) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (std::exchange(round_, groups_made) != groups_made) refusals_ = 0;
}

std::string StoreAdapter::refusal_key(int further) {
  std::lock_guard<std::mutex> lock(mutex_);
  return "refused/" + std::to_string(round_) + "/" + std::to_string(refusals_ + further);
}

void StoreAdapter::refuse(const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++refusals_;
  }
  (void)set(refusal_key(0), reason);
}

std::string StoreAdapter::refused_elsewhere() {
  const std::string key = refusal_key(1);
  return clone().check({key}) ? clone().get_to_str(key) : "";
}

Result<std::string> StoreAdapter::get(const std::string& key, Deadline deadline) {
  try {
    std::chrono::milliseconds pause = kShortestPause;
    Deadline next_look = Clock::now() + kRefusalPatience;
    std::string refused;
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
      if (Clock::now() < next_look) continue;
      // Twice the same: a caller may catch the error and come with a better call.
      const std::string before = std::exchange(refused, refused_elsewhere());
      if (!refused.empty() && refused == before) {
        return Status(ErrorKind::kInvalidUse,
                      "a rank has refused a call instead of making this one: " + refused);
      }
      next_look = Clock::now() + kRefusalPatience;
    }
    return clone().get_to_str(key);
  } catch (const std::exception& error) {
    return Status(ErrorKind::kSystem, "the store failed at key '" + key + "': " + error.what());
  }
}

}  // namespace tide
