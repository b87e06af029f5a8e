// The group's first error: set once, kept for good, looked at by every wait.
//
// Thread-safe. The flag is what WaitGuard::failed points to; it is set after the status can be
// read, sequentially consistent: a waiter announces itself before it loads the flag, break_group()
// looks for waiters after it stored the flag (transports/host/doorbell.h).
#pragma once

#include <atomic>
#include <mutex>

#include "backend/base/status.h"

namespace tide {

class Failure {
 public:
  // Keeps `reason` (not OK) when it is the first one; whether it was.
  bool set(const Status& reason);

  // OK until set.
  Status status() const;
  bool is_set() const { return flag_.load(std::memory_order_acquire); }
  const std::atomic<bool>* flag() const { return &flag_; }

 private:
  mutable std::mutex mutex_;
  Status first_;
  std::atomic<bool> flag_{false};
};

}  // namespace tide
