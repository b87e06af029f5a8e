// Where the monitor leaves the peers' window messages and create_window takes them: one row per
// window begun anywhere. Thread-safe.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transports/fabric.h"
#include "transports/host/message.h"
#include "transports/host/rank_names.h"

namespace tide {

class Mailbox {
 public:
  Mailbox(int own_rank, int size, std::string label, RankNames names)
      : own_rank_(own_rank), size_(size), label_(std::move(label)), names_(std::move(names)) {}

  // Monitor: a kWindowOffer or kWindowVerdict. One whose window has been given up is dropped.
  void put(Message message);
  // Monitor: a peer left; waits look at `missing` again.
  void wake();

  // Waits until every other rank has sent this kind for this window, and returns them by rank (the
  // own place empty). An error of `missing`, asked about those still to come, or kTimeout naming
  // them ends the wait; so does one of `interrupted`, asked about every 100 ms without the lock
  // (null: never).
  Result<std::vector<Message>> take_all(MessageKind kind, int64_t sequence, Deadline deadline,
                                        const std::function<Status(int rank)>& missing,
                                        const std::function<Status()>& interrupted = nullptr);
  // Windows up to this one are done: their messages are dropped, with the descriptors in them.
  void finish(int64_t sequence);

 private:
  using Row = std::vector<std::optional<Message>>;

  const int own_rank_;
  const int size_;
  const std::string label_;
  const RankNames names_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int64_t, MessageKind>, Row> rows_;
  int64_t finished_ = 0;
};

}  // namespace tide
