#include "transports/host/message.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

namespace tide {
namespace {

constexpr uint64_t kMagic = 0x3165646974ull;  // "tide1"
constexpr size_t kTextBytes = 2000;

struct Head {
  uint64_t magic;
  uint32_t kind;
  int32_t rank;
  int32_t size;
  uint32_t status_kind;
  int64_t sequence;
  int64_t bytes;
  uint32_t token_bytes;
  uint32_t text_bytes;
};

struct Packet {
  Head head;
  char text[kTextBytes];  // token, then the status's message
};

union Control {
  cmsghdr header;
  char bytes[CMSG_SPACE(sizeof(int))];
};

// The first descriptor that came along, or -1. Others are closed: the alignment of the buffer
// leaves room for one that nobody asked for.
int take_descriptor(msghdr& message) {
  int kept = -1;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      if (kept >= 0) {
        ::close(fd);
      } else {
        kept = fd;
      }
    }
  }
  return kept;
}

bool decode(const Packet& packet, size_t bytes, Message& message) {
  const Head& head = packet.head;
  if (bytes < sizeof(Head) || head.magic != kMagic) return false;
  const size_t text_bytes = size_t{head.token_bytes} + head.text_bytes;
  if (text_bytes > kTextBytes || bytes != sizeof(Head) + text_bytes) return false;
  if (head.kind < static_cast<uint32_t>(MessageKind::kHello) ||
      head.kind > static_cast<uint32_t>(MessageKind::kGoodbye) ||
      head.status_kind > static_cast<uint32_t>(ErrorKind::kInternal)) {
    return false;
  }
  message.kind = static_cast<MessageKind>(head.kind);
  message.rank = head.rank;
  message.size = head.size;
  message.sequence = head.sequence;
  message.bytes = head.bytes;
  message.token.assign(packet.text, head.token_bytes);
  message.status = Status(static_cast<ErrorKind>(head.status_kind),
                          std::string(packet.text + head.token_bytes, head.text_bytes));
  return true;
}

Result<sockaddr_un> private_address(const std::string& name, socklen_t& bytes) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof(address.sun_path)) {
    return Status(ErrorKind::kInternal, "socket name '" + name + "' is too long");
  }
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading zero: abstract
  bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Descriptor new_socket() {
  return Descriptor::record(
      [] { return ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
}

}  // namespace

Status system_error(const std::string& what) {
  const int error = errno;
  std::string text = what + ": " + std::strerror(error);
  if (error == EMFILE) text += " (raise the limit of open files, ulimit -n)";
  return {ErrorKind::kSystem, text};
}

Status send_message(int socket, const Message& message) {
  Packet packet = {};
  const std::string& text = message.status.message();
  const size_t token_bytes = std::min(message.token.size(), kTextBytes);
  const size_t text_bytes = std::min(text.size(), kTextBytes - token_bytes);
  packet.head = {kMagic,
                 static_cast<uint32_t>(message.kind),
                 message.rank,
                 message.size,
                 static_cast<uint32_t>(message.status.kind()),
                 message.sequence,
                 message.bytes,
                 static_cast<uint32_t>(token_bytes),
                 static_cast<uint32_t>(text_bytes)};
  std::memcpy(packet.text, message.token.data(), token_bytes);
  std::memcpy(packet.text + token_bytes, text.data(), text_bytes);

  iovec data = {&packet, sizeof(Head) + token_bytes + text_bytes};
  msghdr header = {};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  Control control = {};
  if (message.descriptor) {
    header.msg_control = &control;
    header.msg_controllen = sizeof(control.bytes);
    cmsghdr* part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = message.descriptor.get();
    std::memcpy(CMSG_DATA(part), &fd, sizeof(int));
  }
  while (::sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno != EINTR) return system_error("sending a message");
  }
  return Status::ok();
}

Received receive_message(int socket, Message& message) {
  // A peer that closes with unread messages leaves an error in front of what it had sent: read on
  // behind it.
  for (int attempt = 0; attempt < 4; ++attempt) {
    Packet packet;
    iovec data = {&packet, sizeof(packet)};
    Control control;
    msghdr header = {};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = &control;
    header.msg_controllen = sizeof(control.bytes);
    ssize_t got = -1;
    int error = 0;
    Descriptor descriptor = Descriptor::record([&] {
      got = ::recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
      error = errno;
      return got >= 0 ? take_descriptor(header) : -1;
    });
    if (got == 0) return Received::kEnd;
    if (got < 0) {
      if (error == EAGAIN || error == EWOULDBLOCK) return Received::kNothing;
      if (error == EINTR || error == ECONNRESET) continue;
      return Received::kEnd;
    }
    if ((header.msg_flags & MSG_TRUNC) != 0 || !decode(packet, static_cast<size_t>(got), message)) {
      return Received::kGarbage;
    }
    message.descriptor = std::move(descriptor);
    return Received::kMessage;
  }
  return Received::kEnd;
}

Result<std::string> random_token() {
  unsigned char bytes[16];
  size_t filled = 0;
  while (filled < sizeof(bytes)) {
    const ssize_t got = ::getrandom(bytes + filled, sizeof(bytes) - filled, 0);
    if (got < 0 && errno != EINTR) return system_error("asking for random bytes");
    if (got > 0) filled += static_cast<size_t>(got);
  }
  std::string text;
  for (unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

Result<Descriptor> listen_privately(std::string& name, int backlog) {
  Result<std::string> token = random_token();
  if (!token) return token.status();
  name = "tide-" + token.value();
  socklen_t bytes = 0;
  Result<sockaddr_un> address = private_address(name, bytes);
  if (!address) return address.status();
  Descriptor socket = new_socket();
  if (!socket) return system_error("making a socket");
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address.value()), bytes) != 0) {
    return system_error("naming a socket");
  }
  if (::listen(socket.get(), backlog) != 0) return system_error("listening on a socket");
  return socket;
}

Result<Descriptor> connect_privately(const std::string& name) {
  socklen_t bytes = 0;
  Result<sockaddr_un> address = private_address(name, bytes);
  if (!address) return address.status();
  Descriptor socket = new_socket();
  if (!socket) return system_error("making a socket");
  while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.value()), bytes) != 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN)
      return Status(ErrorKind::kUnsupported, "the peer's queue of connections is full");
    if (errno == ECONNREFUSED) return Status(ErrorKind::kPeerLost, "the peer no longer listens");
    return system_error("connecting to a peer");
  }
  return socket;
}

Result<Credentials> credentials_of(int socket) {
  ucred found = {};
  socklen_t bytes = sizeof(found);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &found, &bytes) != 0) {
    return system_error("asking who is at the other end of a socket");
  }
  return Credentials{found.pid, found.uid};
}

}  // namespace tide
