#include "transports/host/host_fabric.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <system_error>
#include <thread>

#include "transports/host/blocking_fabric.h"
#include "transports/host/host_window.h"
#include "transports/host/introduction.h"
#include "transports/host/mailbox.h"
#include "transports/host/message.h"
#include "transports/host/part_exchange.h"

namespace tide {
namespace {

std::string label_of(const HostFabricOptions& options) {
  return options.names.of(options.rank) + " of group '" + options.group + "'";
}

class HostFabric : public BlockingFabric {
 public:
  HostFabric(const HostFabricOptions& options, std::vector<PeerLink> links)
      : BlockingFabric(options.rank, options.size, {.kind = "host"}, label_of(options),
                       options.names),
        options_(options),
        owner_(::getpid()),
        links_(std::move(links)),
        mailbox_(std::make_unique<Mailbox>(options.rank, options.size, label_of(options),
                                           options.names)) {}
  ~HostFabric() override;

  // Starts the monitor and makes the doorbells; once, before anything else.
  Status start();

  Result<std::shared_ptr<Window>> create_window(int64_t bytes, Deadline deadline) override;
  void fail(const Status& reason) override;
  void close() override;

  Status agree_on_parts(const PartExchange& exchange, Deadline deadline);

  Status usable() const override;

 protected:
  void poke_service() override;

 private:
  enum class Source : uint32_t { kEvent, kSocket, kProcess };

  Result<std::shared_ptr<HostWindow>> agree_on_window(int64_t bytes, Deadline deadline);
  Result<std::vector<Message>> exchange_offers(const PartExchange& exchange, int64_t sequence,
                                               Deadline deadline);
  void tell_all(const Message& message);

  Status start_monitor();
  Status watch(int fd, Source source, int peer);
  void monitor();
  void hear(int peer);
  void dispatch(int peer, Message message);
  void lose(int peer, const std::string& how);
  void stop_watching(int peer);

  const HostFabricOptions options_;
  const pid_t owner_;
  std::vector<PeerLink> links_;
  std::mutex talk_mutex_;  // held while sending, so that fail() may meet close() on another thread
  std::unique_ptr<Mailbox> mailbox_;
  Descriptor poll_;
  Descriptor event_;
  std::unique_ptr<std::thread> monitor_;
  std::atomic<bool> ending_{false};
  std::atomic<bool> closed_{false};
  int64_t sequence_ = 0;  // windows begun by this rank
};

HostFabric::~HostFabric() {
  if (::getpid() == owner_) {
    close();
    return;
  }
  // A forked child: the monitor does not exist here, and a condition variable that somebody waited
  // on cannot be destroyed. Both are left where they are.
  (void)monitor_.release();
  (void)mailbox_.release();
}

Status HostFabric::usable() const {
  if (::getpid() != owner_) {
    return {ErrorKind::kInvalidUse, label() + ": called in a forked child (process " +
                                        std::to_string(::getpid()) +
                                        "); only the process that made the group, " +
                                        std::to_string(owner_) + ", may use it"};
  }
  if (closed_.load(std::memory_order_relaxed))
    return {ErrorKind::kInvalidUse, label() + ": the fabric is closed"};
  return Status::ok();
}

Status HostFabric::start() {
  poll_ = Descriptor::record([] { return ::epoll_create1(EPOLL_CLOEXEC); });
  if (!poll_) return system_error(label() + ": making an epoll set");
  event_ = Descriptor::record([] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  if (!event_) return system_error(label() + ": making an eventfd");
  TIDE_RETURN_IF_ERROR(watch(event_.get(), Source::kEvent, 0));
  for (int peer = 0; peer < size(); ++peer) {
    const PeerLink& link = links_[static_cast<size_t>(peer)];
    if (link.socket) TIDE_RETURN_IF_ERROR(watch(link.socket.get(), Source::kSocket, peer));
    if (link.process) TIDE_RETURN_IF_ERROR(watch(link.process.get(), Source::kProcess, peer));
  }
  TIDE_RETURN_IF_ERROR(start_monitor());
  Result<std::shared_ptr<HostWindow>> doorbells =
      agree_on_window(static_cast<int64_t>(sizeof(DoorbellPage)), options_.deadline);
  if (!doorbells) return doorbells.status();
  set_doorbells(std::move(doorbells.value()));
  return Status::ok();
}

Status HostFabric::start_monitor() {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);  // the program's signal handlers belong on the program's threads
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  Status started;
  try {
    monitor_ = std::make_unique<std::thread>([this] { monitor(); });
  } catch (const std::system_error& error) {
    started = {ErrorKind::kSystem, label() + ": starting the monitor's thread: " + error.what() +
                                       " (raise the limit of processes, ulimit -u)"};
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

Status HostFabric::watch(int fd, Source source, int peer) {
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = (static_cast<uint64_t>(source) << 32) | static_cast<uint32_t>(peer);
  if (::epoll_ctl(poll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    return system_error(label() + ": watching a peer");
  return Status::ok();
}

// Windows
// -------

Result<std::shared_ptr<Window>> HostFabric::create_window(int64_t bytes, Deadline deadline) {
  TIDE_RETURN_IF_ERROR(usable());
  Result<std::shared_ptr<HostWindow>> window = agree_on_window(bytes, deadline);
  if (!window) return window.status();
  return std::shared_ptr<Window>(std::move(window.value()));
}

void HostFabric::tell_all(const Message& message) {
  std::lock_guard lock(talk_mutex_);
  for (const PeerLink& link : links_) {
    // A send fails only when the peer is gone, which the monitor hears, or has not read for very
    // long.
    if (link.socket) (void)send_message(link.socket.get(), message);
  }
}

// Two rounds. Offers: everybody's part, or the reason why there is none; they decide alike on all
// ranks. Verdicts: whether everybody could map all parts; without them a rank could use a window
// that another had to give up.
Status HostFabric::agree_on_parts(const PartExchange& exchange, Deadline deadline) {
  const int64_t sequence = ++sequence_;
  Message verdict;
  verdict.kind = MessageKind::kWindowVerdict;
  verdict.rank = rank();
  verdict.sequence = sequence;

  Result<std::vector<Message>> offers = exchange_offers(exchange, sequence, deadline);
  verdict.status = offers.status();
  if (offers) {
    std::vector<const Descriptor*> parts;
    for (const Message& offer : offers.value()) parts.push_back(&offer.descriptor);
    verdict.status = exchange.use(parts);
  }
  tell_all(verdict);
  if (!offers) {
    mailbox_->finish(sequence);
    return offers.status();
  }

  Result<std::vector<Message>> verdicts = mailbox_->take_all(
      MessageKind::kWindowVerdict, sequence, deadline,
      [this](int peer) { return peer_status(peer); }, options_.interrupted);
  mailbox_->finish(sequence);
  if (!verdicts) return verdicts.status();
  verdicts.value()[static_cast<size_t>(rank())].status = verdict.status;
  for (int peer = 0; peer < size(); ++peer) {
    const Status& status = verdicts.value()[static_cast<size_t>(peer)].status;
    if (!status.is_ok()) return Status(status.kind(), name_of(peer) + ": " + status.message());
  }
  return Status::ok();
}

// All ranks' parts by rank, the own one included; or the refusal of the lowest rank that refuses.
Result<std::vector<Message>> HostFabric::exchange_offers(const PartExchange& exchange,
                                                         int64_t sequence, Deadline deadline) {
  Message own;
  own.kind = MessageKind::kWindowOffer;
  own.rank = rank();
  own.sequence = sequence;
  own.bytes = exchange.bytes;
  Result<Descriptor> part = exchange.make();
  if (part) own.descriptor = std::move(part.value());
  own.status = part.status();
  tell_all(own);

  Result<std::vector<Message>> offers = mailbox_->take_all(
      MessageKind::kWindowOffer, sequence, deadline, [this](int peer) { return peer_status(peer); },
      options_.interrupted);
  if (!offers) return offers.status();
  offers.value()[static_cast<size_t>(rank())] = std::move(own);
  for (int peer = 0; peer < size(); ++peer) {
    const Message& offer = offers.value()[static_cast<size_t>(peer)];
    const std::string who = name_of(peer) + ": ";
    if (!offer.status.is_ok()) return Status(offer.status.kind(), who + offer.status.message());
    const int64_t first_bytes = offers.value()[0].bytes;
    if (offer.bytes != first_bytes) {
      return Status(ErrorKind::kInvalidUse,
                    who + "wants a window of " + std::to_string(offer.bytes) + " bytes where " +
                        name_of(0) + " wants " + std::to_string(first_bytes));
    }
  }
  return offers;
}

Result<std::shared_ptr<HostWindow>> HostFabric::agree_on_window(int64_t bytes, Deadline deadline) {
  std::shared_ptr<HostWindow> window;
  PartExchange exchange;
  exchange.bytes = bytes;
  exchange.make = [&]() -> Result<Descriptor> {
    if (options_.refuse_window) TIDE_RETURN_IF_ERROR(options_.refuse_window(bytes));
    return make_window_part(bytes, size());
  };
  exchange.use = [&](const std::vector<const Descriptor*>& parts) -> Status {
    for (const Descriptor* part : parts) TIDE_RETURN_IF_ERROR(check_window_part(*part, bytes));
    Result<std::shared_ptr<HostWindow>> mapped =
        HostWindow::map(parts, rank(), bytes, window_map());
    if (mapped) window = std::move(mapped.value());
    return mapped.status();
  };
  TIDE_RETURN_IF_ERROR(agree_on_parts(exchange, deadline));
  return window;
}

// The monitor
// -----------

void HostFabric::poke_service() {
  if (::getpid() != owner_) return;
  const uint64_t one = 1;
  if (event_ && ::write(event_.get(), &one, sizeof(one)) < 0)
    return;  // full: the monitor is awake anyway
}

void HostFabric::monitor() {
  while (!ending_.load()) {
    epoll_event events[16];
    const int count = ::epoll_wait(poll_.get(), events, 16, -1);
    if (count < 0 && errno != EINTR) {
      // Deaf: nobody may wait for a peer's news any more.
      const Status deaf = system_error(label() + ": listening to the peers");
      for (int peer = 0; peer < size(); ++peer) {
        if (peer != rank()) mark_lost(peer, deaf);
      }
      mailbox_->wake();
      return deliver_losses();
    }
    for (int i = 0; i < count; ++i) {
      const auto source = static_cast<Source>(events[i].data.u64 >> 32);
      const int peer = static_cast<int>(events[i].data.u64 & 0xffffffffu);
      if (source == Source::kEvent) {
        uint64_t ignored;
        if (::read(event_.get(), &ignored, sizeof(ignored)) < 0) continue;
      } else {
        hear(peer);  // whatever it had still said counts before its end
        if (source == Source::kProcess) lose(peer, "ended");
      }
    }
    deliver_losses();
  }
}

void HostFabric::hear(int peer) {
  PeerLink& link = links_[static_cast<size_t>(peer)];
  while (link.socket) {
    Message message;
    switch (receive_message(link.socket.get(), message)) {
      case Received::kMessage:
        dispatch(peer, std::move(message));
        break;
      case Received::kNothing:
        return;
      case Received::kGarbage:
        return lose(peer, "sent something that is no message of tide's");
      case Received::kEnd: {
        // A dying process closes its sockets a moment before its process descriptor tells.
        pollfd process = {link.process.get(), POLLIN, 0};
        const bool ended = link.process && ::poll(&process, 1, 50) > 0;
        return lose(peer, ended ? "ended" : "closed its connection");
      }
    }
  }
}

void HostFabric::dispatch(int peer, Message message) {
  message.rank = peer;  // the socket says who speaks
  switch (message.kind) {
    case MessageKind::kWindowOffer:
    case MessageKind::kWindowVerdict:
      mailbox_->put(std::move(message));
      break;
    case MessageKind::kFail:
      mark_lost(peer, {ErrorKind::kPeerLost, label() + ": " + name_of(peer) +
                                                 " reported: " + message.status.to_string()});
      mailbox_->wake();
      break;
    case MessageKind::kGoodbye:
      mark_left(peer);
      mailbox_->wake();
      break;
    default:
      break;
  }
}

// The peer's end. After a goodbye or a failure it is no news.
void HostFabric::lose(int peer, const std::string& how) {
  const pid_t pid = links_[static_cast<size_t>(peer)].pid;
  mark_lost(peer, {ErrorKind::kPeerLost, label() + ": " + name_of(peer) + " (process " +
                                             std::to_string(pid) + ") " + how});
  mailbox_->wake();
  stop_watching(peer);
}

void HostFabric::stop_watching(int peer) {
  const PeerLink& link = links_[static_cast<size_t>(peer)];
  if (link.socket) ::epoll_ctl(poll_.get(), EPOLL_CTL_DEL, link.socket.get(), nullptr);
  if (link.process) ::epoll_ctl(poll_.get(), EPOLL_CTL_DEL, link.process.get(), nullptr);
}

// Ends
// ----

void HostFabric::fail(const Status& reason) {
  if (!usable().is_ok()) return;
  Message message;
  message.kind = MessageKind::kFail;
  message.rank = rank();
  message.status = reason;
  tell_all(message);
}

void HostFabric::close() {
  if (::getpid() != owner_ || closed_.exchange(true)) return;
  Message message;
  message.kind = MessageKind::kGoodbye;
  message.rank = rank();
  tell_all(message);
  ending_.store(true);
  poke_service();
  if (monitor_) monitor_->join();
  std::lock_guard lock(talk_mutex_);
  for (PeerLink& link : links_) link = PeerLink{};
  poll_.reset();
  event_.reset();
}

}  // namespace

Result<std::unique_ptr<Fabric>> connect_host_fabric(const HostFabricOptions& options,
                                                    KeyValueStore& store) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    return Status(ErrorKind::kInvalidUse, "group '" + options.group + "': rank " +
                                              std::to_string(options.rank) + " of " +
                                              std::to_string(options.size) + " ranks");
  }
  Result<std::vector<PeerLink>> links = introduce(options, store);
  if (!links) return links.status();
  auto fabric = std::make_unique<HostFabric>(options, std::move(links.value()));
  const Status started = fabric->start();
  if (!started.is_ok()) {
    fabric->fail(started);
    return started;
  }
  return std::unique_ptr<Fabric>(std::move(fabric));
}

Status exchange_parts(Fabric& host, const PartExchange& exchange, Deadline deadline) {
  auto& fabric = static_cast<HostFabric&>(host);
  TIDE_RETURN_IF_ERROR(fabric.usable());
  return fabric.agree_on_parts(exchange, deadline);
}

}  // namespace tide
