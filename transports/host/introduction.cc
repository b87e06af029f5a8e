#include "transports/host/introduction.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "transports/host/message.h"

namespace tide {
namespace {

using std::chrono::milliseconds;

// How long a connection may take to say hello before its place is given up.
constexpr std::chrono::seconds kHelloPatience{5};
constexpr size_t kMostStrangers = 256;

struct Stranger {  // connected, has not said hello
  Descriptor socket;
  Deadline until;
};

class Introduction {
 public:
  Introduction(const HostFabricOptions& options, KeyValueStore& store)
      : options_(options),
        store_(store),
        links_(static_cast<size_t>(options.size)),
        welcomed_(static_cast<size_t>(options.size), false) {}

  Result<std::vector<PeerLink>> run() {
    TIDE_RETURN_IF_ERROR(publish());
    TIDE_RETURN_IF_ERROR(read_members());
    for (int peer = 0; peer < options_.rank; ++peer) TIDE_RETURN_IF_ERROR(say_hello(peer));
    while (!missing_ranks().empty()) TIDE_RETURN_IF_ERROR(meet());
    return std::move(links_);
  }

 private:
  std::string label() const {
    return options_.names.of(options_.rank) + " of group '" + options_.group + "'";
  }
  Status labelled(const Status& status) const {
    if (status.is_ok()) return status;
    return {status.kind(), label() + ": " + status.message()};
  }
  std::string key(const std::string& name) const { return "fabric/" + options_.group + "/" + name; }
  PeerLink& link(int peer) { return links_[static_cast<size_t>(peer)]; }

  Status publish() {
    std::string name;
    Result<Descriptor> listener = listen_privately(name, options_.size + 64);
    if (!listener) return labelled(listener.status());
    listener_ = std::move(listener.value());
    if (options_.rank == 0) {
      Result<std::string> token = random_token();
      if (!token) return labelled(token.status());
      TIDE_RETURN_IF_ERROR(labelled(store_.set(key("token"), token.value())));
    }
    const std::string node = options_.node.empty() ? node_identity() : options_.node;
    return labelled(store_.set(key("member/" + std::to_string(options_.rank)), name + " " + node));
  }

  // All members are read before anybody connects, so that all ranks see the same difference between
  // nodes.
  Status read_members() {
    Result<std::string> token = store_.get(key("token"), options_.deadline);
    if (!token) return labelled(absent_rank(options_.names.of(0), token.status()));
    token_ = token.value();
    std::string first_node;
    for (int peer = 0; peer < options_.size; ++peer) {
      Result<std::string> member =
          store_.get(key("member/" + std::to_string(peer)), options_.deadline);
      if (!member) return labelled(absent_rank(options_.names.of(peer), member.status()));
      const size_t space = member.value().find(' ');
      names_.push_back(member.value().substr(0, space));
      const std::string node = space == std::string::npos ? "" : member.value().substr(space + 1);
      if (peer == 0) first_node = node;
      if (node != first_node) {
        return {ErrorKind::kUnsupported, "group '" + options_.group +
                                             "': " + options_.names.of(peer) + " is on node " +
                                             node + ", " + options_.names.of(0) + " on node " +
                                             first_node + "; shared memory needs all ranks on one"};
      }
    }
    return Status::ok();
  }

  Status say_hello(int peer) {
    while (true) {
      Result<Descriptor> socket = connect_privately(names_[static_cast<size_t>(peer)]);
      if (socket) {
        link(peer).socket = std::move(socket.value());
        break;
      }
      if (socket.status().kind() != ErrorKind::kUnsupported) {
        return {socket.status().kind(),
                label() + ": " + options_.names.of(peer) + ": " + socket.status().message()};
      }
      if (Clock::now() >= options_.deadline) return timed_out();
      TIDE_RETURN_IF_ERROR(interrupted());
      std::this_thread::sleep_for(milliseconds(2));  // its queue is full; it accepts in a loop
    }
    TIDE_RETURN_IF_ERROR(identify(peer));
    Message hello;
    hello.kind = MessageKind::kHello;
    hello.rank = options_.rank;
    hello.size = options_.size;
    hello.token = token_;
    return labelled(send_message(link(peer).socket.get(), hello));
  }

  // Checks the user at the other end and opens its process.
  Status identify(int peer) {
    Result<Credentials> found = credentials_of(link(peer).socket.get());
    if (!found) return labelled(found.status());
    if (found.value().uid != ::geteuid()) {
      return {ErrorKind::kInvalidUse, label() + ": " + options_.names.of(peer) + " runs as user " +
                                          std::to_string(found.value().uid) + ", this rank as " +
                                          std::to_string(::geteuid())};
    }
    const pid_t pid = found.value().pid;
    link(peer).pid = pid;
    if (pid > 0) {  // without it, the socket's end still tells of most deaths
      link(peer).process =
          Descriptor::record([pid] { return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)); });
      if (!link(peer).process && errno == EMFILE)
        return system_error(label() + ": watching a peer's process");
    }
    return Status::ok();
  }

  Status interrupted() const {
    return options_.interrupted ? labelled(options_.interrupted()) : Status::ok();
  }

  std::vector<int> missing_ranks() const {
    std::vector<int> missing;
    for (int peer = 0; peer < options_.size; ++peer) {
      if (peer != options_.rank && !welcomed_[static_cast<size_t>(peer)]) missing.push_back(peer);
    }
    return missing;
  }

  std::string missing_text() const {
    std::string text;
    for (int peer : missing_ranks()) text += " " + std::to_string(options_.names.number(peer));
    return text;
  }

  Status timed_out() const {
    return {ErrorKind::kTimeout,
            label() + ": ranks" + missing_text() + " did not connect before the deadline"};
  }

  // One round: waits for anything, then looks at everything.
  Status meet() {
    std::vector<pollfd> watched = {{listener_.get(), POLLIN, 0}};
    for (int peer = 0; peer < options_.size; ++peer) {
      if (!link(peer).socket) continue;
      const bool met = welcomed_[static_cast<size_t>(peer)];  // then only its end matters here
      watched.push_back({link(peer).socket.get(), static_cast<short>(met ? 0 : POLLIN), 0});
    }
    const size_t links_end = watched.size();
    for (const Stranger& stranger : strangers_)
      watched.push_back({stranger.socket.get(), POLLIN, 0});
    const Deadline now = Clock::now();
    if (now >= options_.deadline) return timed_out();
    const auto slice = std::min<int64_t>(
        100, std::chrono::duration_cast<milliseconds>(options_.deadline - now).count() + 1);
    ::poll(watched.data(), watched.size(), static_cast<int>(slice));
    TIDE_RETURN_IF_ERROR(interrupted());
    for (size_t i = 1; i < links_end; ++i) {
      if (watched[i].events == 0 && (watched[i].revents & POLLHUP) != 0) {
        return {ErrorKind::kPeerLost,
                label() + ": a rank gave up while ranks" + missing_text() + " were missing"};
      }
    }
    TIDE_RETURN_IF_ERROR(accept_all());
    TIDE_RETURN_IF_ERROR(hear_strangers());
    return hear_welcomes();
  }

  Status accept_all() {
    while (true) {
      Descriptor socket = Descriptor::record([this] {
        return ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      });
      if (!socket) {
        if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ECONNABORTED)
          return Status::ok();
        return system_error(label() + ": accepting a connection");
      }
      Result<Credentials> found = credentials_of(socket.get());
      if (!found || found.value().uid != ::geteuid()) continue;  // dropped
      if (strangers_.size() >= kMostStrangers) strangers_.erase(strangers_.begin());
      strangers_.push_back({std::move(socket), Clock::now() + kHelloPatience});
    }
  }

  Status hear_strangers() {
    for (size_t i = 0; i < strangers_.size();) {
      Message message;
      const Received received = receive_message(strangers_[i].socket.get(), message);
      if (received == Received::kNothing && Clock::now() < strangers_[i].until) {
        ++i;
        continue;
      }
      Stranger stranger = std::move(strangers_[i]);
      strangers_.erase(strangers_.begin() + static_cast<ptrdiff_t>(i));
      if (received == Received::kMessage && is_right(message)) {
        TIDE_RETURN_IF_ERROR(welcome(message.rank, std::move(stranger.socket)));
      }
    }
    return Status::ok();
  }

  bool is_right(const Message& hello) const {
    return hello.kind == MessageKind::kHello && hello.token == token_ &&
           hello.size == options_.size && hello.rank > options_.rank &&
           hello.rank < options_.size && !welcomed_[static_cast<size_t>(hello.rank)];
  }

  Status welcome(int peer, Descriptor socket) {
    link(peer).socket = std::move(socket);
    TIDE_RETURN_IF_ERROR(identify(peer));
    welcomed_[static_cast<size_t>(peer)] = true;
    Message answer;
    answer.kind = MessageKind::kWelcome;
    answer.rank = options_.rank;
    return labelled(send_message(link(peer).socket.get(), answer));
  }

  Status hear_welcomes() {
    for (int peer = 0; peer < options_.rank; ++peer) {
      if (welcomed_[static_cast<size_t>(peer)]) continue;
      Message message;
      const Received received = receive_message(link(peer).socket.get(), message);
      if (received == Received::kNothing) continue;
      if (received != Received::kMessage || message.kind != MessageKind::kWelcome ||
          message.rank != peer) {
        return {ErrorKind::kPeerLost, label() + ": " + options_.names.of(peer) +
                                          " closed the connection before it answered"};
      }
      welcomed_[static_cast<size_t>(peer)] = true;
    }
    return Status::ok();
  }

  const HostFabricOptions& options_;
  KeyValueStore& store_;
  Descriptor listener_;
  std::string token_;
  std::vector<std::string> names_;
  std::vector<PeerLink> links_;
  std::vector<bool> welcomed_;
  std::vector<Stranger> strangers_;
};

}  // namespace

Status absent_rank(const std::string& name, const Status& status) {
  if (status.kind() != ErrorKind::kTimeout) return status;
  return {ErrorKind::kTimeout,
          name + " has not made its first call of this group before the deadline (" +
              status.message() + "): it is stopped, slow or has left this call out"};
}

Result<std::vector<PeerLink>> introduce(const HostFabricOptions& options, KeyValueStore& store) {
  return Introduction(options, store).run();
}

}  // namespace tide
