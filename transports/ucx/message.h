// What travels as an active message: 48 bytes, little-endian on every machine that tide runs on; a
// failure brings its text behind them. `epoch` is the group's, drawn at random when it is made: a
// message of another epoch is not for this group.
#pragma once

#include <cstdint>
#include <string>

#include "transports/network.h"

namespace tide {

inline constexpr unsigned kMessageId = 7;  // of UCX's active messages
inline constexpr uint16_t kMessageMagic = 0x7eed;
inline constexpr uint8_t kMessageVersion = 1;

enum class MessageKind : uint8_t {
  kEvent0 = 0,  // 0..3: an event of that EventKind
  kHeartbeat = 16,
  kGoodbye,
  kGoodbyeHeard,
  kFailure,  // the text says why
};

struct Message {
  uint16_t magic = kMessageMagic;
  uint8_t version = kMessageVersion;
  uint8_t kind = 0;
  int32_t from_node = 0;
  uint64_t epoch = 0;
  uint64_t operation = 0;
  uint64_t hash = 0;
  uint16_t round = 0;
  uint16_t part = 0;
  uint32_t reserved = 0;
  int64_t amount = 0;
};
static_assert(sizeof(Message) == 48, "messages are compared byte by byte between machines");

enum class MessageVerdict : uint8_t {
  kOurs,
  kForeign,  // not of this group: dropped, and counted
  kBroken,   // of this group, but it cannot be right: the group fails
};

// Judges `bytes` received bytes for a group of `nodes` nodes and this epoch, and unpacks them.
// `reason` for all but kOurs.
MessageVerdict read_message(const void* data, size_t bytes, uint64_t epoch, int nodes,
                            Message& message, std::string& reason);

}  // namespace tide
