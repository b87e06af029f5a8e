// What tests with nodes as threads share: deadlines, guards, one thread a node, and bytes that tell
// where they come from.
#pragma once

#include <thread>
#include <vector>

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

// Runs body(node) of each node on a thread of its own, until all have ended.
template <class Body>
void on_each_node(int nodes, Body body) {
  std::vector<std::thread> threads;
  for (int node = 0; node < nodes; ++node) threads.emplace_back([&, node] { body(node); });
  for (std::thread& thread : threads) thread.join();
}

// Byte i of what node `from` sends in an operation.
inline unsigned char byte_at(int from, uint64_t operation, int64_t i) {
  return static_cast<unsigned char>(i * 31 + (i >> 9) + from * 7 +
                                    static_cast<int64_t>(operation) * 13 + 1);
}

}  // namespace tide::testing
