// What tests with nodes as threads share: deadlines, guards, and bytes that tell where they
// come from.
#pragma once

#include "tests/on_each.h"
#include "transports/network.h"

namespace tide::testing {

inline constexpr std::chrono::seconds kLongEnough{60};  // keeps a hang from passing

inline Deadline soon() { return Clock::now() + kLongEnough; }

inline WaitGuard guard_of(std::chrono::milliseconds timeout = kLongEnough) {
  WaitGuard guard;
  guard.timeout = timeout;
  guard.what = "the test";
  return guard;
}

// Byte i of what node `from` sends in an operation.
inline unsigned char byte_at(int from, uint64_t operation, int64_t i) {
  return static_cast<unsigned char>(i * 31 + (i >> 9) + from * 7 +
                                    static_cast<int64_t>(operation) * 13 + 1);
}

}  // namespace tide::testing
