#include "transports/host/blocking_fabric.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "kernels/accumulate.h"
#include "kernels/cast.h"
#include "kernels/copy.h"

namespace tide {
namespace {

// A peer that is about to signal does so within this time, if it has a core; with fewer cores than
// ranks the yields let it have this one.
constexpr std::chrono::microseconds kSpin{20};
constexpr std::chrono::milliseconds kSlice{100};
// Longer timeouts mean the same and would leave the clock's range.
constexpr std::chrono::hours kForever{24 * 365 * 10};

std::atomic_ref<uint32_t> as_atomic(const uint32_t* word) {
  return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(word));
}

// Other side: the store in signal(), after the copies of that queue.
bool reached(const uint32_t* word, uint32_t value) {
  return static_cast<int32_t>(as_atomic(word).load(std::memory_order_seq_cst) - value) >= 0;
}

bool spin_until_reached(const uint32_t* word, uint32_t value, Deadline until) {
  do {
    for (int i = 0; i < 16; ++i) {
      if (reached(word, value)) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    sched_yield();
  } while (Clock::now() < until);
  return reached(word, value);
}

bool has_failed(const WaitGuard& guard) {
  return guard.failed != nullptr && guard.failed->load(std::memory_order_seq_cst);
}

}  // namespace

BlockingFabric::BlockingFabric(int rank, int size, Capabilities capabilities, std::string label,
                               RankNames names)
    : rank_(rank),
      size_(size),
      capabilities_(std::move(capabilities)),
      label_(std::move(label)),
      names_(std::move(names)),
      window_map_(std::make_shared<WindowMap>()),
      peers_(static_cast<size_t>(size)) {}

void BlockingFabric::set_doorbells(std::shared_ptr<Window> window) {
  doorbells_ = std::move(window);
  own_doorbells_.store(&doorbells_of(rank_), std::memory_order_release);
}

DoorbellPage& BlockingFabric::doorbells_of(int rank) const {
  return *static_cast<DoorbellPage*>(doorbells_->peer(rank));
}

Status BlockingFabric::copy(int, const CopyBlock* blocks, int count) {
  TIDE_RETURN_IF_ERROR(usable());
  for (int i = 0; i < count; ++i) copy_block(blocks[i]);
  return Status::ok();
}

Status BlockingFabric::cast(int, const CastBlock* blocks, int count) {
  TIDE_RETURN_IF_ERROR(usable());
  for (int i = 0; i < count; ++i) TIDE_RETURN_IF_ERROR(cast_block(blocks[i]));
  return Status::ok();
}

Status BlockingFabric::accumulate(int, const AccumulateBlock* blocks, int count,
                                  const AccumulateOptions& options) {
  TIDE_RETURN_IF_ERROR(usable());
  for (int i = 0; i < count; ++i) TIDE_RETURN_IF_ERROR(accumulate_block(blocks[i], options));
  return Status::ok();
}

Status BlockingFabric::signal(int, uint32_t* word, uint32_t value) {
  TIDE_RETURN_IF_ERROR(usable());
  const auto place = window_map_->find(word, sizeof(*word));
  if (!place) return {ErrorKind::kInternal, label_ + ": signal to a word outside every window"};
  // Sequentially consistent, so it also releases the copies before it. Other side: reached(), and
  // doorbell.h.
  as_atomic(word).store(value, std::memory_order_seq_cst);
  ring(doorbells_of(place->rank).of(place->offset));
  return Status::ok();
}

Status BlockingFabric::wait(int, const uint32_t* word, uint32_t value, const WaitGuard& guard) {
  TIDE_RETURN_IF_ERROR(usable());
  if (reached(word, value)) return Status::ok();
  const Deadline begin = Clock::now();
  const Deadline deadline = begin + std::min<std::chrono::milliseconds>(guard.timeout, kForever);
  if (spin_until_reached(word, value, std::min(deadline, begin + kSpin))) return Status::ok();

  const auto place = window_map_->find(word, sizeof(*word));
  if (!place || place->rank != rank_) {
    return {ErrorKind::kInternal,
            label_ + ": wait for a word outside its own windows (" + guard.what + ")"};
  }
  Sleeper sleeper(doorbells_of(rank_).of(place->offset));
  while (true) {
    const uint32_t ticket = sleeper.ticket();
    // The ticket is older than all looks below: what changes after them rings, and the sleep ends
    // at once.
    if (reached(word, value)) return Status::ok();
    if (has_failed(guard)) {
      return {ErrorKind::kPeerLost,
              label_ + ": the group failed while waiting (" + guard.what + ")"};
    }
    if (guard.check) {
      const Status checked = guard.check();
      if (!checked.is_ok()) return reached(word, value) ? Status::ok() : checked;
    }
    const Deadline now = Clock::now();
    if (now >= deadline) {
      const uint32_t got = as_atomic(word).load(std::memory_order_relaxed);
      return {ErrorKind::kTimeout, label_ + ": waited " + std::to_string(guard.timeout.count()) +
                                       " ms for " + guard.what + ", wanted counter " +
                                       std::to_string(value) + ", got " + std::to_string(got)};
    }
    sleeper.sleep(ticket, std::min<std::chrono::nanoseconds>(kSlice, deadline - now));
  }
}

Status BlockingFabric::peer_status(int rank) const {
  std::lock_guard lock(mutex_);
  return peers_.at(static_cast<size_t>(rank)).status;
}

void BlockingFabric::on_peer_failure(std::function<void(int rank, const Status& reason)> listener) {
  {
    std::lock_guard lock(mutex_);
    listener_ = std::move(listener);
  }
  poke_service();  // a peer may have been lost before anybody listened
}

void BlockingFabric::wake_all() {
  if (DoorbellPage* page = own_doorbells_.load(std::memory_order_acquire)) ring_all(*page);
}

void BlockingFabric::mark_left(int rank) {
  {
    std::lock_guard lock(mutex_);
    Status& status = peers_.at(static_cast<size_t>(rank)).status;
    if (!status.is_ok()) return;
    status = {ErrorKind::kPeerLost, label_ + ": " + name_of(rank) + " has closed the group"};
  }
  wake_all();
}

void BlockingFabric::mark_lost(int rank, const Status& reason) {
  {
    std::lock_guard lock(mutex_);
    Peer& peer = peers_.at(static_cast<size_t>(rank));
    if (!peer.status.is_ok()) return;
    peer.status = reason;
    peer.to_report = true;
  }
  wake_all();
  poke_service();
}

void BlockingFabric::deliver_losses() {
  std::vector<std::pair<int, Status>> losses;
  std::function<void(int, const Status&)> listener;
  {
    std::lock_guard lock(mutex_);
    if (!listener_) return;
    listener = listener_;
    for (int rank = 0; rank < size_; ++rank) {
      Peer& peer = peers_[static_cast<size_t>(rank)];
      if (std::exchange(peer.to_report, false)) losses.emplace_back(rank, peer.status);
    }
  }
  for (const auto& [rank, reason] : losses) listener(rank, reason);
}

Status BlockingFabric::first_missing_peer() const {
  std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) {
    if (!peer.status.is_ok()) return peer.status;
  }
  return Status::ok();
}

}  // namespace tide
