// What two ranks say to each other over their socket: one fixed head, one line of text, at most one
// descriptor. Sequenced packets keep messages whole, so a message is sent and received by one call
// each.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "backend/base/status.h"
#include "transports/host/descriptor.h"

namespace tide {

enum class MessageKind : uint32_t {
  kHello = 1,      // first word of the rank that connected; text: the group's token
  kWelcome,        // answer to a hello whose token was right
  kWindowOffer,    // my part of window `sequence`: a descriptor, or why there is none
  kWindowVerdict,  // whether I could map all parts of window `sequence`
  kFail,           // my group failed; status: why
  kGoodbye,        // I have finished; what follows is the end of the connection
};

struct Message {
  MessageKind kind = MessageKind::kHello;
  int32_t rank = -1;      // the sender's
  int32_t size = 0;       // kHello: ranks of the sender's group
  int64_t sequence = 0;   // kWindow...: how many windows the sender had begun
  int64_t bytes = 0;      // kWindowOffer
  Status status;          // kWindow..., kFail
  std::string token;      // kHello
  Descriptor descriptor;  // kWindowOffer
};

enum class Received { kMessage, kNothing, kEnd, kGarbage };

// Sends without waiting. An error only when the message did not leave: the peer is gone or does not
// read.
Status send_message(int socket, const Message& message);
// Receives without waiting. kNothing: no message there now. kEnd: the peer's end is closed and
// everything was read. kGarbage: not a message of this kind of program; the connection is of no
// use.
Received receive_message(int socket, Message& message);

// A listening socket in the abstract namespace (no file, gone with its last descriptor), by a name
// nobody can guess.
Result<Descriptor> listen_privately(std::string& name, int backlog);
// kUnsupported while the listener's queue is full: try again.
Result<Descriptor> connect_privately(const std::string& name);

struct Credentials {
  pid_t pid = 0;  // 0: a process of a namespace that is not seen here
  uid_t uid = 0;
};
// Of the process at the other end, as the kernel recorded it when it connected or listened.
Result<Credentials> credentials_of(int socket);

// 32 hexadecimal digits from the kernel's random source.
Result<std::string> random_token();

// kSystem: "<what>: <text of errno>".
Status system_error(const std::string& what);

}  // namespace tide
