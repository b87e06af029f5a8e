#include "backend/c10d/work_received.h"

namespace tide {

bool WorkReceived::isCompleted() {
  std::lock_guard<std::mutex> lock(mutex_);
  return host_.empty();
}

bool WorkReceived::wait(std::chrono::milliseconds timeout) {
  const bool received = work_->wait(timeout);
  std::lock_guard<std::mutex> lock(mutex_);
  at::NoGradGuard no_grad;
  // A copy from pageable memory has been read when the call returns.
  for (size_t i = 0; i < host_.size(); ++i) at::Tensor(device_[i]).copy_(host_[i]);
  host_.clear();
  return received;
}

}  // namespace tide
