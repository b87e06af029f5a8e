#include "transports/host/mailbox.h"

#include <algorithm>
#include <string>

namespace tide {

void Mailbox::put(Message message) {
  std::lock_guard lock(mutex_);
  if (message.sequence <= finished_ || message.rank < 0 || message.rank >= size_) return;
  Row& row = rows_[{message.sequence, message.kind}];
  row.resize(static_cast<size_t>(size_));
  row[static_cast<size_t>(message.rank)] = std::move(message);
  changed_.notify_all();
}

void Mailbox::wake() {
  std::lock_guard lock(mutex_);
  changed_.notify_all();
}

Result<std::vector<Message>> Mailbox::take_all(MessageKind kind, int64_t sequence,
                                               Deadline deadline,
                                               const std::function<Status(int rank)>& missing,
                                               const std::function<Status()>& interrupted) {
  constexpr std::chrono::milliseconds kSlice{100};
  std::unique_lock lock(mutex_);
  while (true) {
    Row& row = rows_[{sequence, kind}];
    row.resize(static_cast<size_t>(size_));
    std::string absent;
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != own_rank_ && !row[static_cast<size_t>(rank)])
        absent += " " + std::to_string(names_.number(rank));
    }
    if (absent.empty()) {
      std::vector<Message> all(static_cast<size_t>(size_));
      for (size_t i = 0; i < all.size(); ++i) {
        if (row[i]) all[i] = std::move(*row[i]);
      }
      rows_.erase({sequence, kind});
      return all;
    }
    // A rank that has sent its message may leave as soon as it has the others'.
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != own_rank_ && !row[static_cast<size_t>(rank)]) TIDE_RETURN_IF_ERROR(missing(rank));
    }
    const Deadline now = Clock::now();
    if (now >= deadline) {
      return Status(
          ErrorKind::kTimeout,
          label_ + ": ranks" + absent + " did not come to create a window before the deadline");
    }
    changed_.wait_until(lock, std::min(deadline, now + kSlice));
    if (!interrupted) continue;
    lock.unlock();
    TIDE_RETURN_IF_ERROR(interrupted());
    lock.lock();
  }
}

void Mailbox::finish(int64_t sequence) {
  std::lock_guard lock(mutex_);
  finished_ = std::max(finished_, sequence);
  std::erase_if(rows_, [this](const auto& entry) { return entry.first.first <= finished_; });
}

}  // namespace tide
