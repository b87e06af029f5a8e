#include "backend/engine/failure.h"

namespace tide {

bool Failure::set(const Status& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!first_.is_ok()) return false;
  first_ = reason;
  flag_.store(true, std::memory_order_seq_cst);
  return true;
}

Status Failure::status() const {
  if (!is_set()) return Status::ok();
  std::lock_guard<std::mutex> lock(mutex_);
  return first_;
}

}  // namespace tide
