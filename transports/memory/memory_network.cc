#include "transports/memory/memory_network.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <queue>
#include <random>
#include <thread>

#include "transports/event_board.h"

namespace tide {
namespace {

constexpr std::chrono::milliseconds kSlice{100};

class MemoryNetwork;

struct Delivery {
  enum class Kind : uint8_t { kMessage, kFailure, kLost, kGoodbye, kTellListener };
  Deadline due;
  uint64_t sequence = 0;
  Kind kind = Kind::kMessage;
  int from = 0;
  int to = 0;
  Event event;
  int64_t amount = 0;
  uint64_t hash = 0;
  int region = 0;
  std::vector<Segment> segments;
  bool ends_post = true;
  Status reason;
};
struct Later {
  bool operator()(const Delivery& a, const Delivery& b) const {
    return a.due != b.due ? a.due > b.due : a.sequence > b.sequence;
  }
};

// One collective add_region: the nodes meet, the last one (or the first to give up) decides for
// all.
struct RegionMeeting {
  int arrived = 0;
  int id = 0;
  int64_t bytes = 0;
  Status refusal;
  int refusing_node = -1;
  std::optional<Status> decision;

  void refuse(int node, const Status& reason) {
    if (refusing_node >= 0 && refusing_node < node) return;
    refusing_node = node;
    refusal = {reason.kind(), "node " + std::to_string(node) + ": " + reason.message()};
  }
};

// What the nodes share. The wire thread runs from make_memory_networks until the last network is
// destroyed.
class Wire {
 public:
  explicit Wire(MemoryNetworkOptions options) : options(std::move(options)) {
    thread_ = std::thread([this] { run(); });
  }
  ~Wire() {
    {
      std::lock_guard lock(mutex);
      ending_ = true;
      wake.notify_all();
    }
    thread_.join();
  }
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  // mutex held. Messages of one pair keep their order if `ordered`.
  void send(Delivery delivery, bool ordered = false) {
    delivery.sequence = next_sequence_++;
    Deadline& last = last_due_[{delivery.from, delivery.to}];
    if (ordered) delivery.due = std::max(delivery.due, last);
    last = std::max(last, delivery.due);
    queue_.push(std::move(delivery));
    wake.notify_all();
  }

  const MemoryNetworkOptions options;
  std::mutex mutex;
  std::condition_variable wake;         // the wire has something to do
  std::condition_variable changed;      // meetings, the end of a listener's call
  std::vector<MemoryNetwork*> members;  // null once closed or broken
  std::map<int64_t, std::shared_ptr<RegionMeeting>> meetings;
  int calling_listener_of = -1;

 private:
  void run();
  void deliver(const Delivery& delivery, std::unique_lock<std::mutex>& lock);

  std::priority_queue<Delivery, std::vector<Delivery>, Later> queue_;
  std::map<std::pair<int, int>, Deadline> last_due_;
  uint64_t next_sequence_ = 0;
  bool ending_ = false;
  std::thread thread_;
};

class MemoryNetwork : public Network {
 public:
  MemoryNetwork(std::shared_ptr<Wire> wire, int node, int nodes)
      : wire_(std::move(wire)),
        board_(node, nodes,
               "node " + std::to_string(node) + " of group '" + wire_->options.name + "'") {
    capabilities_.kind = "memory";
    capabilities_.transport = "memory";
    capabilities_.device = "memory";
    capabilities_.version = "memory";
    capabilities_.cuda_memory = wire_->options.cuda_memory;
    capabilities_.window_bytes = int64_t{1} << 40;
  }
  ~MemoryNetwork() override { leave(Delivery::Kind::kLost); }

  const NetworkCapabilities& capabilities() const override { return capabilities_; }
  int node() const override { return board_.node(); }
  int nodes() const override { return board_.nodes(); }

  Status add_region(int id, const MemoryBlock& block, Deadline deadline) override;
  Status remove_region(int id, Deadline deadline) override;
  Status add_source(const MemoryBlock&) override { return board_.error(); }
  void remove_source(const void*) override {}

  Status begin(uint64_t operation, uint64_t hash, const std::string& what) override;
  Status put(const Put& put) override;
  Status signal(int node, const Event& event, int64_t amount) override;
  int64_t count(int node, const Event& event) const override { return board_.count(node, event); }
  Status wait(int node, const Event& event, int64_t amount, const WaitGuard& guard) override {
    return board_.wait(node, event, amount, guard);
  }
  Status drain(uint64_t operation, const WaitGuard& guard) override {
    return board_.drain(operation, guard);
  }
  void end(uint64_t operation) override { board_.end(operation); }
  Status quiesce(Deadline deadline) override;

  Status error() const override { return board_.error(); }
  Status peer_status(int node) const override { return board_.peer_status(node); }
  void on_failure(std::function<void(int, const Status&)> listener) override {
    listener_ = std::move(listener);
  }
  void wake_all() override { board_.wake_all(); }
  void fail(const Status& reason) override;
  Status close(Deadline deadline) override;

  void die() {
    broke(-1, {ErrorKind::kPeerLost, board_.label() + ": the network was broken on purpose"});
    leave(Delivery::Kind::kLost);
  }

 private:
  friend class Wire;

  Delivery message(int to, const Event& event, int64_t amount, uint64_t hash) const {
    Delivery delivery;
    delivery.due = Clock::now();
    delivery.from = node();
    delivery.to = to;
    delivery.event = event;
    delivery.amount = amount;
    delivery.hash = hash;
    return delivery;
  }
  // False when the fate drops it.
  bool meets_fate(Delivery& delivery) const {
    if (!wire_->options.fate || delivery.event.operation == 0) return true;
    const MemoryFate fate =
        wire_->options.fate({delivery.from, delivery.to, delivery.event, delivery.amount});
    delivery.due += fate.delay;
    return !fate.drop;
  }
  // wire mutex held
  void tell_peers(Delivery::Kind kind, const Status& reason) {
    for (int peer = 0; peer < nodes(); ++peer) {
      if (peer == node()) continue;
      Delivery delivery = message(peer, {}, 0, 0);
      delivery.kind = kind;
      delivery.reason = reason;
      wire_->send(std::move(delivery), kind == Delivery::Kind::kGoodbye);
    }
  }
  bool broke(int node, const Status& reason) { return board_.break_with(reason, node); }
  // An error found on a thread of the engine: peers hear of it, the listener by the wire thread.
  void break_here(const Status& reason) {
    if (!broke(-1, reason)) return;
    std::lock_guard lock(wire_->mutex);
    tell_peers(Delivery::Kind::kFailure, reason);
    Delivery self = message(node(), {}, 0, 0);
    self.kind = Delivery::Kind::kTellListener;
    self.from = -1;
    self.reason = reason;
    wire_->send(std::move(self));
  }
  void leave(Delivery::Kind news) {
    std::unique_lock lock(wire_->mutex);
    if (wire_->members[static_cast<size_t>(node())] == nullptr) return;
    wire_->changed.wait(lock, [&] { return wire_->calling_listener_of != node(); });
    wire_->members[static_cast<size_t>(node())] = nullptr;
    tell_peers(news, {});
    wire_->changed.notify_all();
  }
  int64_t region_bytes(int id) const {
    const auto found = regions_.find(id);
    return found == regions_.end() ? -1 : found->second.bytes;
  }

  const std::shared_ptr<Wire> wire_;
  EventBoard board_;
  NetworkCapabilities capabilities_;
  std::function<void(int, const Status&)> listener_;
  std::map<int, MemoryBlock> regions_;  // under the wire's mutex
  int64_t next_meeting_ = 0;
  int64_t barriers_ = 0;
};

void Wire::run() {
  std::unique_lock lock(mutex);
  while (!ending_) {
    if (queue_.empty()) {
      wake.wait(lock);
    } else if (queue_.top().due > Clock::now()) {
      const Deadline due = queue_.top().due;
      wake.wait_until(lock, due);
    } else {
      const Delivery delivery = queue_.top();
      queue_.pop();
      deliver(delivery, lock);
    }
  }
}

void Wire::deliver(const Delivery& delivery, std::unique_lock<std::mutex>& lock) {
  MemoryNetwork* to = members[static_cast<size_t>(delivery.to)];
  if (to == nullptr) return;
  const std::string sender = to->board_.label() + ": node " + std::to_string(delivery.from);
  Status trouble;
  switch (delivery.kind) {
    case Delivery::Kind::kMessage: {
      MemoryNetwork* from = members[static_cast<size_t>(delivery.from)];
      if (from == nullptr || !to->board_.error().is_ok()) return;
      const auto region = to->regions_.find(delivery.region);
      for (const Segment& segment : delivery.segments) {
        if (segment.bytes == 0 || region == to->regions_.end()) continue;
        std::memcpy(static_cast<char*>(region->second.base) + segment.to_offset, segment.from,
                    static_cast<size_t>(segment.bytes));
      }
      trouble = to->board_.counted(delivery.from, delivery.event, delivery.amount, delivery.hash);
      if (delivery.ends_post) from->board_.post_over(delivery.event.operation);
      break;
    }
    case Delivery::Kind::kFailure:
      trouble = {ErrorKind::kPeerLost, sender + " reported: " + delivery.reason.to_string()};
      break;
    case Delivery::Kind::kLost:
      if (!to->board_.has_left(delivery.from)) trouble = {ErrorKind::kPeerLost, sender + " died"};
      break;
    case Delivery::Kind::kGoodbye:
      to->board_.left(delivery.from);
      break;
    case Delivery::Kind::kTellListener:
      trouble = delivery.reason;
      break;
  }
  if (trouble.is_ok()) return;
  if (delivery.kind != Delivery::Kind::kTellListener) {
    if (!to->broke(delivery.from, trouble)) return;
    if (delivery.kind == Delivery::Kind::kMessage)
      to->tell_peers(Delivery::Kind::kFailure, trouble);
  }
  changed.notify_all();
  if (!to->listener_) return;
  calling_listener_of = delivery.to;
  lock.unlock();
  to->listener_(delivery.from, trouble);
  lock.lock();
  calling_listener_of = -1;
  changed.notify_all();
}

Status MemoryNetwork::add_region(int id, const MemoryBlock& block, Deadline deadline) {
  TIDE_RETURN_IF_ERROR(board_.error());
  const auto& refuse = wire_->options.refuse_region;
  const Status own = refuse ? refuse(node(), block) : Status::ok();
  std::unique_lock lock(wire_->mutex);
  const int64_t number = next_meeting_++;
  auto& entry = wire_->meetings[number];
  if (!entry) entry = std::make_shared<RegionMeeting>();
  const std::shared_ptr<RegionMeeting> meeting = entry;
  if (meeting->arrived++ == 0) {
    meeting->id = id;
    meeting->bytes = block.bytes;
  }
  if (!own.is_ok()) meeting->refuse(node(), own);
  if (meeting->id != id || meeting->bytes != block.bytes) {
    meeting->refuse(node(),
                    {ErrorKind::kInvalidUse,
                     "wants region " + std::to_string(id) + " of " + std::to_string(block.bytes) +
                         " bytes where another node wants region " + std::to_string(meeting->id) +
                         " of " + std::to_string(meeting->bytes)});
  }
  if (block.base == nullptr || block.bytes <= 0 || regions_.count(id) != 0) {
    meeting->refuse(node(), {ErrorKind::kInvalidUse,
                             "region " + std::to_string(id) + " of " + std::to_string(block.bytes) +
                                 " bytes has no memory or is registered already"});
  }
  if (block.kind == MemoryKind::kCuda && !capabilities_.cuda_memory) {
    meeting->refuse(node(), {ErrorKind::kUnsupported, "this network cannot register CUDA memory"});
  }
  // Registered before the decision, so that no peer's put can come too early; undone if it is a
  // refusal.
  const bool placed =
      block.base != nullptr && block.bytes > 0 && regions_.emplace(id, block).second;
  if (meeting->arrived == nodes() && !meeting->decision) meeting->decision = meeting->refusal;
  while (!meeting->decision) {
    const Deadline now = Clock::now();
    const Status broken = board_.error();
    if (!broken.is_ok()) {
      meeting->decision = broken;
    } else if (now >= deadline) {
      meeting->decision = Status(ErrorKind::kTimeout,
                                 board_.label() + ": " + std::to_string(meeting->arrived) + " of " +
                                     std::to_string(nodes()) + " nodes came to add region " +
                                     std::to_string(id) + " before the deadline");
    } else {
      wire_->changed.wait_until(lock, std::min(deadline, now + kSlice));
    }
  }
  wire_->changed.notify_all();
  if (meeting->arrived == nodes()) wire_->meetings.erase(number);
  if (!meeting->decision->is_ok() && placed) regions_.erase(id);
  return *meeting->decision;
}

Status MemoryNetwork::remove_region(int id, Deadline deadline) {
  TIDE_RETURN_IF_ERROR(quiesce(deadline));
  std::lock_guard lock(wire_->mutex);
  regions_.erase(id);
  return Status::ok();
}

Status MemoryNetwork::begin(uint64_t operation, uint64_t hash, const std::string& what) {
  const Status begun = board_.begin(operation, hash, what);
  if (!begun.is_ok()) break_here(begun);
  return begun;
}

Status MemoryNetwork::put(const Put& put) {
  std::lock_guard lock(wire_->mutex);
  const Result<int64_t> total = checked_put_bytes(board_.label(), put, region_bytes(put.region));
  if (!total.is_ok()) return total.status();
  if (total.value() == 0) return board_.error();
  const Result<uint64_t> hash = board_.open_post(put.node, put.operation);
  if (!hash.is_ok()) return hash.status();

  const int64_t head_bytes = std::min(put.head_bytes, total.value());
  Delivery head = message(put.node, {EventKind::kHead, put.operation, put.round, put.part},
                          head_bytes, hash.value());
  Delivery rest = message(put.node, {EventKind::kArrival, put.operation, put.round, put.part},
                          total.value(), hash.value());
  head.region = rest.region = put.region;
  head.ends_post = false;
  int64_t left = head_bytes;
  for (const Segment& segment : put.segments) {
    const int64_t first = std::min(left, segment.bytes);
    left -= first;
    if (first > 0) head.segments.push_back({segment.from, segment.to_offset, first});
    if (first < segment.bytes) {
      rest.segments.push_back({static_cast<const char*>(segment.from) + first,
                               segment.to_offset + first, segment.bytes - first});
    }
  }
  const bool head_goes = head_bytes == 0 || meets_fate(head);
  const bool rest_goes = meets_fate(rest) && head_goes;
  rest.due = std::max(rest.due, head.due);
  if (head_bytes > 0 && head_goes) wire_->send(std::move(head));
  if (rest_goes) wire_->send(std::move(rest));
  return Status::ok();
}

Status MemoryNetwork::signal(int to, const Event& event, int64_t amount) {
  const Result<uint64_t> hash = board_.open_post(to, event.operation);
  if (!hash.is_ok()) return hash.status();
  Delivery delivery = message(to, event, amount, hash.value());
  std::lock_guard lock(wire_->mutex);
  if (meets_fate(delivery)) wire_->send(std::move(delivery));
  return Status::ok();
}

Status MemoryNetwork::quiesce(Deadline deadline) {
  WaitGuard guard;
  guard.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
  guard.what = "the end of all puts";
  TIDE_RETURN_IF_ERROR(board_.drain_all(guard));
  const Event meeting{EventKind::kConfirm, 0, 0, 0};
  ++barriers_;
  for (int peer = 0; peer < nodes(); ++peer) {
    if (peer != node()) TIDE_RETURN_IF_ERROR(signal(peer, meeting, 1));
  }
  for (int peer = 0; peer < nodes(); ++peer) {
    if (peer != node()) TIDE_RETURN_IF_ERROR(board_.wait(peer, meeting, barriers_, guard));
  }
  return Status::ok();
}

void MemoryNetwork::fail(const Status& reason) {
  if (!broke(-1, reason)) return;
  std::lock_guard lock(wire_->mutex);
  tell_peers(Delivery::Kind::kFailure, reason);
}

Status MemoryNetwork::close(Deadline deadline) {
  if (board_.error().is_ok()) {
    {
      std::lock_guard lock(wire_->mutex);
      if (wire_->members[static_cast<size_t>(node())] == nullptr) return Status::ok();
      tell_peers(Delivery::Kind::kGoodbye, {});
    }
    board_.wait_for_goodbyes(deadline);
  }
  leave(Delivery::Kind::kGoodbye);
  broke(-1, {ErrorKind::kInvalidUse, board_.label() + ": the network is closed"});
  return Status::ok();
}

}  // namespace

std::vector<std::unique_ptr<Network>> make_memory_networks(int nodes,
                                                           const MemoryNetworkOptions& options) {
  auto wire = std::make_shared<Wire>(options);
  std::vector<std::unique_ptr<Network>> networks;
  std::lock_guard lock(wire->mutex);
  for (int node = 0; node < nodes; ++node) {
    auto network = std::make_unique<MemoryNetwork>(wire, node, nodes);
    wire->members.push_back(network.get());
    networks.push_back(std::move(network));
  }
  return networks;
}

std::function<MemoryFate(const MemoryMessage&)> random_delays(uint64_t seed,
                                                              std::chrono::microseconds most) {
  auto mutex = std::make_shared<std::mutex>();
  auto engine = std::make_shared<std::mt19937_64>(seed);
  return [mutex, engine, most](const MemoryMessage&) {
    std::lock_guard lock(*mutex);
    std::uniform_int_distribution<int64_t> delay(0, most.count());
    return MemoryFate{std::chrono::microseconds(delay(*engine)), false};
  };
}

void break_memory_network(Network& network) { static_cast<MemoryNetwork&>(network).die(); }

}  // namespace tide
