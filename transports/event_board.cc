#include "transports/event_board.h"

#include <algorithm>

namespace tide {
namespace {

constexpr std::chrono::milliseconds kSlice{100};
// A peer can be ahead of this node by what its queues hold. Far beyond that, the message is not one
// of ours.
constexpr uint64_t kOperationsAhead = 1 << 16;

uint64_t key_of(int node, const Event& event) {
  return static_cast<uint64_t>(node) << 40 | static_cast<uint64_t>(event.kind) << 32 |
         static_cast<uint64_t>(event.round) << 16 | event.part;
}

bool has_failed(const WaitGuard& guard) {
  return guard.failed != nullptr && guard.failed->load(std::memory_order_seq_cst);
}

std::string hex(uint64_t value) {
  static const char* const kDigits = "0123456789abcdef";
  std::string text(16, '0');
  for (int i = 15; i >= 0; --i, value >>= 4) text[static_cast<size_t>(i)] = kDigits[value & 15];
  return text;
}

}  // namespace

const char* event_kind_name(EventKind kind) {
  switch (kind) {
    case EventKind::kHead:
      return "head";
    case EventKind::kArrival:
      return "arrival";
    case EventKind::kConfirm:
      return "confirm";
    case EventKind::kGrant:
      return "grant";
  }
  return "unknown event";
}

std::string to_string(const Event& event) {
  return std::string(event_kind_name(event.kind)) + " of operation " +
         std::to_string(event.operation) + ", round " + std::to_string(event.round) + ", part " +
         std::to_string(event.part);
}

Result<int64_t> checked_put_bytes(const std::string& label, const Put& put, int64_t region_bytes) {
  if (region_bytes < 0) {
    return Status(
        ErrorKind::kInvalidUse,
        label + ": a put into region " + std::to_string(put.region) + ", which is not registered");
  }
  int64_t total = 0;
  for (const Segment& segment : put.segments) {
    const bool fits = segment.bytes >= 0 && segment.to_offset >= 0 &&
                      segment.to_offset <= region_bytes &&
                      segment.bytes <= region_bytes - segment.to_offset;
    if (!fits || (segment.from == nullptr && segment.bytes > 0)) {
      return Status(ErrorKind::kInvalidUse, label + ": a put of " + std::to_string(segment.bytes) +
                                                " bytes to offset " +
                                                std::to_string(segment.to_offset) + " of region " +
                                                std::to_string(put.region) + " with " +
                                                std::to_string(region_bytes) + " bytes");
    }
    total += segment.bytes;
  }
  if (put.head_bytes < 0) {
    return Status(ErrorKind::kInvalidUse,
                  label + ": a put with a head of " + std::to_string(put.head_bytes) + " bytes");
  }
  return total;
}

EventBoard::EventBoard(int node, int nodes, std::string label, NodeNames names)
    : node_(node),
      nodes_(nodes),
      label_(std::move(label)),
      names_(std::move(names)),
      left_(static_cast<size_t>(nodes), false) {
  operations_[0].begun = true;
  operations_[0].what = "the network's own messages";
}

Status EventBoard::mismatch(int node, uint64_t operation, const OperationState& state,
                            uint64_t hash) const {
  return {ErrorKind::kInvalidUse,
          label_ + ": operation " + std::to_string(operation) + " differs: it is '" + state.what +
              "' with program " + hex(state.hash) + " here, and " + name_of(node) +
              " runs program " + hex(hash) +
              " under this number; all ranks must make the same calls in the same order, with the "
              "same sizes"};
}

Status EventBoard::begin(uint64_t operation, uint64_t hash, const std::string& what) {
  std::lock_guard lock(mutex_);
  if (!error_.is_ok()) return error_;
  if (operation <= last_begun_) {
    return {ErrorKind::kInvalidUse, label_ + ": operation " + std::to_string(operation) +
                                        " begins after operation " + std::to_string(last_begun_)};
  }
  last_begun_ = operation;
  OperationState& state = operations_[operation];
  state.begun = true;
  state.hash = hash;
  state.what = what;
  for (const auto& [node, early] : state.hashes) {
    if (early != hash) return mismatch(node, operation, state, early);
  }
  state.hashes.clear();
  return Status::ok();
}

void EventBoard::end(uint64_t operation) {
  std::lock_guard lock(mutex_);
  const auto found = operations_.find(operation);
  if (operation == 0 || found == operations_.end()) return;
  open_posts_ -= found->second.open_posts;
  operations_.erase(found);
}

int64_t EventBoard::count(int node, const Event& event) const {
  std::lock_guard lock(mutex_);
  const auto found = operations_.find(event.operation);
  if (found == operations_.end()) return 0;
  const auto counter = found->second.counts.find(key_of(node, event));
  return counter == found->second.counts.end() ? 0 : counter->second;
}

Result<uint64_t> EventBoard::open_post(int node, uint64_t operation) {
  std::lock_guard lock(mutex_);
  if (!error_.is_ok()) return error_;
  if (node < 0 || node >= nodes_ || node == node_) {
    return Status(ErrorKind::kInvalidUse, label_ + ": there is no peer node " +
                                              std::to_string(node) + " among " +
                                              std::to_string(nodes_));
  }
  const auto found = operations_.find(operation);
  if (found == operations_.end() || !found->second.begun) {
    return Status(ErrorKind::kInvalidUse, label_ + ": operation " + std::to_string(operation) +
                                              " posts before its begin or after its end");
  }
  if (left_[static_cast<size_t>(node)]) return gone(node);
  ++found->second.open_posts;
  ++open_posts_;
  return found->second.hash;
}

void EventBoard::post_over(uint64_t operation) {
  std::lock_guard lock(mutex_);
  const auto found = operations_.find(operation);
  if (found == operations_.end() || found->second.open_posts == 0) return;
  --open_posts_;
  if (--found->second.open_posts == 0) changed_.notify_all();
}

Status EventBoard::counted(int node, const Event& event, int64_t amount, uint64_t hash) {
  std::lock_guard lock(mutex_);
  const uint64_t operation = event.operation;
  if (node < 0 || node >= nodes_ || node == node_ || amount < 0 || event.kind > EventKind::kGrant) {
    return {ErrorKind::kInternal,
            label_ + ": a message that is not from this group: " + to_string(event) + " from " +
                name_of(node) + ", amount " + std::to_string(amount)};
  }
  if (operation > last_begun_ + kOperationsAhead) {
    return {ErrorKind::kInvalidUse, label_ + ": " + name_of(node) + " sent " + to_string(event) +
                                        ", this node is at operation " +
                                        std::to_string(last_begun_)};
  }
  auto found = operations_.find(operation);
  if (found == operations_.end()) {
    if (operation <= last_begun_) return Status::ok();  // ended here: nobody waits for it
    found = operations_.emplace(operation, OperationState()).first;
  }
  OperationState& state = found->second;
  if (!state.begun) {
    state.hashes.emplace(node, hash);
  } else if (state.hash != hash) {
    return mismatch(node, operation, state, hash);
  }
  state.counts[key_of(node, event)] += amount;
  changed_.notify_all();
  return Status::ok();
}

Status EventBoard::gone(int node) const {
  return {ErrorKind::kPeerLost, label_ + ": " + name_of(node) + " has finished and left the group"};
}

template <class Reached, class Describe>
Status EventBoard::wait_until(const WaitGuard& guard, int node, Reached reached,
                              Describe describe) {
  const Deadline deadline = Clock::now() + guard.timeout;
  std::unique_lock lock(mutex_);
  while (true) {
    if (reached()) return Status::ok();
    if (!error_.is_ok()) return error_;
    if (node >= 0 && left_[static_cast<size_t>(node)]) {
      Status status = gone(node);
      return {status.kind(), status.message() + " while waiting for " + guard.what + describe()};
    }
    if (has_failed(guard)) {
      return {ErrorKind::kPeerLost,
              label_ + ": the group failed while waiting for " + guard.what + describe()};
    }
    if (guard.check) {
      lock.unlock();
      const Status checked = guard.check();
      lock.lock();
      if (reached()) return Status::ok();
      if (!checked.is_ok()) return checked;
    }
    const Deadline now = Clock::now();
    if (now >= deadline) {
      return {ErrorKind::kTimeout, label_ + ": waited " + std::to_string(guard.timeout.count()) +
                                       " ms for " + guard.what + describe()};
    }
    changed_.wait_until(lock, std::min(deadline, now + kSlice));
  }
}

Status EventBoard::wait(int node, const Event& event, int64_t amount, const WaitGuard& guard) {
  if (node < 0 || node >= nodes_) {
    return {ErrorKind::kInvalidUse,
            label_ + ": a wait for " + name_of(node) + " (" + guard.what + ")"};
  }
  const auto arrived = [&]() -> int64_t {
    const auto found = operations_.find(event.operation);
    if (found == operations_.end()) return 0;
    const auto counter = found->second.counts.find(key_of(node, event));
    return counter == found->second.counts.end() ? 0 : counter->second;
  };
  return wait_until(
      guard, node, [&] { return arrived() >= amount; },
      [&] {
        return " (" + to_string(event) + " from " + name_of(node) + "): wanted " +
               std::to_string(amount) + ", got " + std::to_string(arrived());
      });
}

Status EventBoard::drain(uint64_t operation, const WaitGuard& guard) {
  const auto open = [&] {
    const auto found = operations_.find(operation);
    return found == operations_.end() ? 0 : found->second.open_posts;
  };
  return wait_until(
      guard, -1, [&] { return open() == 0; },
      [&] {
        return ": " + std::to_string(open()) + " posts of operation " + std::to_string(operation) +
               " are not over";
      });
}

Status EventBoard::drain_all(const WaitGuard& guard) {
  return wait_until(
      guard, -1, [&] { return open_posts_ == 0; },
      [&] { return ": " + std::to_string(open_posts_) + " posts are not over"; });
}

Status EventBoard::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

Status EventBoard::peer_status(int node) const {
  std::lock_guard lock(mutex_);
  if (node < 0 || node >= nodes_) {
    return {ErrorKind::kInvalidUse, label_ + ": there is no node " + std::to_string(node)};
  }
  if (!error_.is_ok() && error_node_ == node) return error_;
  return left_[static_cast<size_t>(node)] ? gone(node) : Status::ok();
}

void EventBoard::wake_all() {
  std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void EventBoard::left(int node) {
  std::lock_guard lock(mutex_);
  if (node < 0 || node >= nodes_) return;
  left_[static_cast<size_t>(node)] = true;
  changed_.notify_all();
}

bool EventBoard::has_left(int node) const {
  std::lock_guard lock(mutex_);
  return left_[static_cast<size_t>(node)];
}

bool EventBoard::break_with(const Status& reason, int node) {
  std::lock_guard lock(mutex_);
  if (!error_.is_ok()) return false;
  error_ = reason;
  error_node_ = node;
  changed_.notify_all();
  return true;
}

bool EventBoard::wait_for_goodbyes(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const auto all_left = [&] {
    for (int node = 0; node < nodes_; ++node) {
      if (node != node_ && !left_[static_cast<size_t>(node)]) return false;
    }
    return true;
  };
  changed_.wait_until(lock, deadline, [&] { return all_left() || !error_.is_ok(); });
  return all_left();
}

}  // namespace tide
