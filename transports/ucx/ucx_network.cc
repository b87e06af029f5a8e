#include "transports/ucx/ucx_network.h"

#include <unistd.h>

#include <algorithm>
#include <future>
#include <random>

#include "transports/ucx/configuration.h"

namespace tide {
namespace {

constexpr int kScratchRegion = -1;  // of the self test
constexpr int64_t kScratchBytes = 4096;
constexpr uint16_t kScratchPart = 1;
constexpr std::chrono::seconds kAnswerToGoodbye{1};

uint64_t draw_epoch() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "?";
}

// What node `from` writes into node `to`'s scratch memory.
unsigned char test_byte(int from, int to, int64_t at) {
  return static_cast<unsigned char>(at * 131 + from * 17 + to * 29 + (at >> 8) + 1);
}

WaitGuard guard_until(Deadline deadline, std::string what) {
  WaitGuard guard;
  guard.timeout =
      std::max(std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()),
               std::chrono::milliseconds(0));
  guard.what = std::move(what);
  return guard;
}

}  // namespace

UcxNetwork::UcxNetwork(std::shared_ptr<UcxRail> rail, const UcxGroupOptions& options)
    : rail_(std::move(rail)),
      options_(options),
      board_(std::make_shared<EventBoard>(
          options.node, options.nodes,
          options.names.of(options.node) + " of group '" + options.name + "'", options.names)),
      test_(std::make_shared<SelfTestMemory>()) {
  test_->written.resize(static_cast<size_t>(kScratchBytes * options.nodes), 0);
  test_->source.resize(test_->written.size());
}

UcxNetwork::~UcxNetwork() { (void)close(Clock::now()); }

Status UcxNetwork::usable() const {
  if (rail_->process() == getpid()) return Status::ok();
  return {ErrorKind::kInvalidUse,
          board_->label() + ": called in a forked child; the network belongs to process " +
              std::to_string(rail_->process())};
}

Status UcxNetwork::make_link() {
  auto link = std::make_shared<UcxLink>(*rail_, board_, options_.peer_timeout);
  link->keep(test_);
  TIDE_RETURN_IF_ERROR(rail_->run([&] {
    TIDE_RETURN_IF_ERROR(link->open());
    rail_->add_link(link);
    return Status::ok();
  }));
  link_ = std::move(link);
  return Status::ok();
}

Status UcxNetwork::exchange_hellos(Deadline deadline, std::vector<Hello>* hellos) {
  Hello own;
  own.refusal = options_.refusal;
  if (own.refusal.empty()) {
    const Status made = make_link();
    const Status filled = !made.is_ok() ? made : rail_->run([&] {
      const auto address = link_->address();
      if (!address.is_ok()) return address.status();
      const auto scratch = link_->map_region(
          kScratchRegion, {test_->written.data(), static_cast<int64_t>(test_->written.size())});
      if (!scratch.is_ok()) return scratch.status();
      own.address = address.value();
      own.scratch_base = scratch.value().base;
      own.scratch_key = scratch.value().key;
      return Status::ok();
    });
    if (!filled.is_ok()) own.refusal = filled.to_string();
    own.protocol = kMessageVersion;
    own.transport = rail_->options().rdma ? "rdma" : "tcp";
    own.device = rail_->options().device;
    own.host = host_name();
    own.rail = options_.rail;
    own.nodes = options_.nodes;
    own.ucx = rail_->api().get_version_string();
    own.epoch = draw_epoch();
  }
  TIDE_RETURN_IF_ERROR(options_.store->set(key("hello", options_.node), write_hello(own)));
  for (int node = 0; node < options_.nodes; ++node) {
    const Result<std::string> text = options_.store->get(key("hello", node), deadline);
    if (!text.is_ok()) {
      return {text.status().kind(), board_->label() + ": " + board_->name_of(node) +
                                        " did not come to connect before the deadline (" +
                                        text.status().message() + ")"};
    }
    const Result<Hello> hello = read_hello(text.value());
    if (!hello.is_ok()) {
      return {hello.status().kind(), "group '" + options_.name + "': " + board_->name_of(node) +
                                         ": " + hello.status().message()};
    }
    hellos->push_back(hello.value());
  }
  return judge_hellos(options_.name, *hellos);
}

Status UcxNetwork::come_up(Deadline deadline) {
  std::vector<Hello> hellos;
  TIDE_RETURN_IF_ERROR(exchange_hellos(deadline, &hellos));
  std::vector<std::string> addresses;
  std::vector<UcxLink::RemoteRegion> scratch;
  for (const Hello& hello : hellos) {
    addresses.push_back(hello.address);
    scratch.push_back({hello.scratch_base, hello.scratch_key});
  }
  const Status connected = rail_->run([&] {
    TIDE_RETURN_IF_ERROR(link_->connect(addresses, hellos.front().epoch));
    return link_->open_region(kScratchRegion, scratch);
  });
  const Status tested = connected.is_ok() ? self_test(deadline) : connected;
  const Status checked = tested.is_ok() ? check_lanes() : tested;
  // The last word before anyone calls the group up: a node that fails here takes the others along.
  const Status met = checked.is_ok() ? quiesce(deadline) : checked;
  if (!met.is_ok()) {
    break_off(met, false);
    return board_->error();
  }
  return rail_->run([&] {
    link_->unmap_region(kScratchRegion);
    link_->keep(nullptr);
    link_->watch_silence();
    return Status::ok();
  });
}

Status UcxNetwork::self_test(Deadline deadline) {
  const int own = options_.node;
  {
    std::lock_guard lock(mutex_);
    region_bytes_[kScratchRegion] = static_cast<int64_t>(test_->written.size());
  }
  for (int node = 0; node < options_.nodes; ++node) {
    if (node == own) continue;
    unsigned char* from = test_->source.data() + node * kScratchBytes;
    for (int64_t i = 0; i < kScratchBytes; ++i) from[i] = test_byte(own, node, i);
    Put test;
    test.node = node;
    test.part = kScratchPart;
    test.region = kScratchRegion;
    test.segments = {{from, own * kScratchBytes, kScratchBytes}};
    TIDE_RETURN_IF_ERROR(put(test));
  }
  for (int node = 0; node < options_.nodes; ++node) {
    if (node == own) continue;
    const Event arrival{EventKind::kArrival, 0, 0, kScratchPart};
    TIDE_RETURN_IF_ERROR(board_->wait(node, arrival, kScratchBytes,
                                      guard_until(deadline, "the first put between nodes")));
    for (int64_t i = 0; i < kScratchBytes; ++i) {
      if (test_->written[static_cast<size_t>(node * kScratchBytes + i)] == test_byte(node, own, i))
        continue;
      return {ErrorKind::kInternal, board_->label() + ": the first put from " +
                                        board_->name_of(node) + " over " + rail_->options().device +
                                        " arrived with wrong bytes, from byte " +
                                        std::to_string(i) + " on"};
    }
  }
  const Status drained = board_->drain_all(guard_until(deadline, "the own first puts"));
  std::lock_guard lock(mutex_);
  region_bytes_.erase(kScratchRegion);
  return drained;
}

Status UcxNetwork::check_lanes() {
  std::vector<std::pair<std::string, std::string>> lanes;
  TIDE_RETURN_IF_ERROR(rail_->run([&] {
    const auto found = link_->lanes();
    if (!found.is_ok()) return found.status();
    lanes = found.value();
    return Status::ok();
  }));
  const UcxRailOptions& asked = rail_->options();
  capabilities_.kind = "ucx";
  capabilities_.device = asked.device;
  capabilities_.version = "UCX " + std::string(rail_->api().get_version_string());
  capabilities_.cuda_memory = rail_->cuda_memory();
  capabilities_.window_bytes = asked.window_bytes;
  capabilities_.notes = rail_->notes();
  for (const auto& [transport, device] : lanes) {
    if (capabilities_.transport.find(transport) == std::string::npos) {
      capabilities_.transport += (capabilities_.transport.empty() ? "" : "+") + transport;
    }
    if (is_wanted_transport(transport, asked.rdma) && device == asked.device) continue;
    const std::string sentence = "UCX connects over " + transport + " on " + device +
                                 ", asked for was " + (asked.rdma ? "rc" : "tcp") + " on " +
                                 asked.device;
    if (!rail_->environment_rules()) {
      return {ErrorKind::kUnsupported,
              board_->label() + ": " + sentence +
                  "; UCX_TLS or UCX_NET_DEVICES must not be set otherwise"};
    }
    capabilities_.notes.push_back(sentence);
  }
  return Status::ok();
}

int64_t UcxNetwork::region_bytes(int id) const {
  std::lock_guard lock(mutex_);
  const auto found = region_bytes_.find(id);
  return found == region_bytes_.end() ? -1 : found->second;
}

Status UcxNetwork::add_region(int id, const MemoryBlock& block, Deadline deadline) {
  TIDE_RETURN_IF_ERROR(usable());
  TIDE_RETURN_IF_ERROR(board_->error());
  const std::string vote = "region" + std::to_string(next_vote_++);
  UcxLink::RemoteRegion own;
  Status refusal;
  if (id < 0 || block.base == nullptr || block.bytes <= 0) {
    refusal = {ErrorKind::kInvalidUse, "region " + std::to_string(id) + " of " +
                                           std::to_string(block.bytes) + " bytes has no memory"};
  } else {
    refusal = rail_->run([&] {
      const auto mapped = link_->map_region(id, block);
      if (mapped.is_ok()) own = mapped.value();
      return mapped.status();
    });
  }
  const bool mapped = refusal.is_ok();
  const std::string answer =
      mapped ? write_region(own.base, block.bytes, own.key) : write_refusal(refusal.to_string());
  Status verdict = options_.store->set(key(vote, options_.node), answer);
  std::vector<UcxLink::RemoteRegion> remote;
  Status vetoed;  // by a node; the others hear the same
  for (int node = 0; verdict.is_ok() && node < options_.nodes; ++node) {
    const Result<std::string> text = options_.store->get(key(vote, node), deadline);
    if (!text.is_ok()) {
      verdict = {text.status().kind(), board_->label() + ": " + board_->name_of(node) +
                                           " did not come to add region " + std::to_string(id) +
                                           " (" + text.status().message() + ")"};
      break;
    }
    const Result<RegionAnswer> said = read_region(text.value());
    if (!said.is_ok()) {
      verdict = said.status();
      break;
    }
    const std::string name = board_->name_of(node) + ": ";
    if (!said.value().refusal.empty()) {
      if (vetoed.is_ok()) vetoed = {ErrorKind::kUnsupported, name + said.value().refusal};
    } else if (said.value().bytes != block.bytes && vetoed.is_ok()) {
      vetoed = {ErrorKind::kInvalidUse, "region " + std::to_string(id) + ": " + name + "brings " +
                                            std::to_string(said.value().bytes) + " bytes, node " +
                                            std::to_string(options_.node) + " brings " +
                                            std::to_string(block.bytes)};
    }
    remote.push_back({said.value().base, said.value().key});
  }
  if (verdict.is_ok() && vetoed.is_ok()) {
    verdict = rail_->run([&] { return link_->open_region(id, remote); });
    if (verdict.is_ok()) {
      std::lock_guard lock(mutex_);
      region_bytes_[id] = block.bytes;
      return verdict;
    }
  }
  // Without the others' agreement, the nodes could go on differently: that breaks the group. A veto
  // is an answer.
  if (!verdict.is_ok()) break_off(verdict, false);
  if (mapped && vetoed.kind() != ErrorKind::kOk) {
    (void)rail_->run([&] {
      link_->unmap_region(id);
      return Status::ok();
    });
  }
  return verdict.is_ok() ? vetoed : verdict;
}

Status UcxNetwork::remove_region(int id, Deadline deadline) {
  TIDE_RETURN_IF_ERROR(quiesce(deadline));
  {
    std::lock_guard lock(mutex_);
    region_bytes_.erase(id);
  }
  return rail_->run([&] {
    link_->unmap_region(id);
    return Status::ok();
  });
}

Status UcxNetwork::add_source(const MemoryBlock& block) {
  TIDE_RETURN_IF_ERROR(board_->error());
  return rail_->run([&] { return link_->map_source(block); });
}

void UcxNetwork::remove_source(const void* base) {
  (void)rail_->run([&] {
    link_->unmap_source(base);
    return Status::ok();
  });
}

Status UcxNetwork::begin(uint64_t operation, uint64_t hash, const std::string& what) {
  TIDE_RETURN_IF_ERROR(usable());
  const Status begun = board_->begin(operation, hash, what);
  if (!begun.is_ok()) break_off(begun, true);
  return begun;
}

Status UcxNetwork::put(const Put& put) {
  const Result<int64_t> total = checked_put_bytes(board_->label(), put, region_bytes(put.region));
  if (!total.is_ok()) return total.status();
  if (total.value() == 0) return board_->error();
  const Result<uint64_t> hash = board_->open_post(put.node, put.operation);
  if (!hash.is_ok()) return hash.status();
  auto transfer = std::make_shared<Transfer>();
  transfer->put = put;
  transfer->hash = hash.value();
  transfer->total_bytes = total.value();
  rail_->post(
      [link = link_, transfer = std::move(transfer)]() mutable { link->put(std::move(transfer)); });
  return Status::ok();
}

Status UcxNetwork::signal(int node, const Event& event, int64_t amount) {
  const Result<uint64_t> hash = board_->open_post(node, event.operation);
  if (!hash.is_ok()) return hash.status();
  rail_->post([link = link_, node, event, amount, hash = hash.value()] {
    link->signal(node, event, amount, hash);
  });
  return Status::ok();
}

Status UcxNetwork::quiesce(Deadline deadline) {
  const WaitGuard guard = guard_until(deadline, "the end of all puts");
  TIDE_RETURN_IF_ERROR(board_->drain_all(guard));
  const Event meeting{EventKind::kConfirm, 0, 0, 0};
  ++barriers_;
  for (int peer = 0; peer < nodes(); ++peer) {
    if (peer != node()) TIDE_RETURN_IF_ERROR(signal(peer, meeting, 1));
  }
  for (int peer = 0; peer < nodes(); ++peer) {
    if (peer != node()) TIDE_RETURN_IF_ERROR(board_->wait(peer, meeting, barriers_, guard));
  }
  return Status::ok();
}

void UcxNetwork::on_failure(std::function<void(int, const Status&)> listener) {
  link_->set_listener(std::move(listener));
}

void UcxNetwork::break_off(const Status& reason, bool tell_listener) {
  if (!link_) {
    board_->break_with(reason, -1);
    return;
  }
  // The board first, so that no later call can miss it; the link finds it broken and still has to
  // tell the peers.
  if (!board_->break_with(reason, -1)) return;
  rail_->post(
      [link = link_, reason, tell_listener] { link->after_break(reason, -1, tell_listener); });
}

Status UcxNetwork::close(Deadline deadline) {
  if (closed_ || !link_ || rail_->process() != getpid()) return closing_;
  closed_ = true;
  const bool orderly = board_->error().is_ok();
  if (orderly) {
    (void)rail_->run([&] {
      link_->say_goodbye();
      return Status::ok();
    });
    const Deadline answered =
        board_->wait_for_goodbyes(deadline) ? Clock::now() + kAnswerToGoodbye : Clock::now();
    bool heard = false;
    while (!heard && Clock::now() < answered) {
      (void)rail_->run([&] {
        heard = link_->goodbye_is_heard();
        return Status::ok();
      });
      if (!heard) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    board_->break_with({ErrorKind::kInvalidUse, board_->label() + ": the network is closed"}, -1);
  }
  const auto closed = std::make_shared<std::promise<Status>>();
  rail_->post([link = link_, closed, orderly] {
    link->begin_close(!orderly, [closed](const Status& status) { closed->set_value(status); });
  });
  closing_ = closed->get_future().get();
  link_->set_listener(nullptr);
  return closing_;
}

Result<std::shared_ptr<UcxRail>> open_ucx_rail(const UcxRailOptions& options) {
  const Result<const UcxApi*> api = load_ucx({options.library, options.library_candidates});
  if (!api.is_ok()) return api.status();
  // UCX only warns about a device that is not there, and goes on without a network.
  const std::string name = options.device.substr(0, options.device.find(':'));
  const std::string folder = options.rdma ? "/sys/class/infiniband/" : "/sys/class/net/";
  if (name.empty() || access((folder + name).c_str(), F_OK) != 0) {
    return Status(ErrorKind::kUnsupported, "there is no device '" + options.device + "' here (" +
                                               folder +
                                               "); TIDE_RAILS names one for each local rank");
  }
  return UcxRail::open(options, api.value());
}

Result<std::unique_ptr<Network>> connect_ucx_group(std::shared_ptr<UcxRail> rail,
                                                   const UcxGroupOptions& options,
                                                   Deadline deadline) {
  if (options.store == nullptr || options.nodes < 1 || options.node < 0 ||
      options.node >= options.nodes) {
    return Status(ErrorKind::kInvalidUse,
                  "group '" + options.name + "': node " + std::to_string(options.node) + " of " +
                      std::to_string(options.nodes) + " needs a store and a place among the nodes");
  }
  UcxGroupOptions own = options;
  if (rail == nullptr && own.refusal.empty()) own.refusal = "it has no rail";
  auto network = std::make_unique<UcxNetwork>(std::move(rail), own);
  const Status up = network->come_up(deadline);
  if (!up.is_ok()) return up;  // the destructor closes what was opened
  return std::unique_ptr<Network>(std::move(network));
}

std::string ucx_missing_from_build() { return {}; }

}  // namespace tide
