#include "transports/ucx/message.h"

#include <cstring>

namespace tide {

MessageVerdict read_message(const void* data, size_t bytes, uint64_t epoch, int nodes,
                            Message& message, std::string& reason) {
  uint16_t magic = 0;
  if (bytes >= sizeof magic) std::memcpy(&magic, data, sizeof magic);
  if (magic != kMessageMagic) {
    reason = "a message of " + std::to_string(bytes) + " bytes that is not tide's";
    return MessageVerdict::kForeign;
  }
  if (bytes != sizeof(Message)) {
    reason = "a truncated message: " + std::to_string(bytes) + " bytes, wanted " +
             std::to_string(sizeof(Message));
    // Whether it is ours shows only when it is long enough to carry an epoch.
    if (bytes < 16) return MessageVerdict::kForeign;
    uint64_t claimed = 0;
    std::memcpy(&claimed, static_cast<const char*>(data) + 8, sizeof claimed);
    return claimed == epoch ? MessageVerdict::kBroken : MessageVerdict::kForeign;
  }
  std::memcpy(&message, data, sizeof message);
  if (message.epoch != epoch) {
    reason = "a message of another group or of an earlier one with this name";
    return MessageVerdict::kForeign;
  }
  if (message.version != kMessageVersion) {
    reason = "a message of version " + std::to_string(message.version) +
             ", this node speaks version " + std::to_string(kMessageVersion) +
             "; run the same tide on all nodes";
    return MessageVerdict::kBroken;
  }
  const bool known = message.kind <= static_cast<uint8_t>(EventKind::kGrant) ||
                     (message.kind >= static_cast<uint8_t>(MessageKind::kHeartbeat) &&
                      message.kind <= static_cast<uint8_t>(MessageKind::kFailure));
  if (!known || message.from_node < 0 || message.from_node >= nodes || message.amount < 0) {
    reason = "a message of kind " + std::to_string(message.kind) + " from node " +
             std::to_string(message.from_node) + " with amount " + std::to_string(message.amount) +
             ", which nobody sends";
    return MessageVerdict::kBroken;
  }
  return MessageVerdict::kOurs;
}

}  // namespace tide
