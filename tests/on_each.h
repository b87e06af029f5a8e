// Ranks or nodes as threads.
#pragma once

#include <thread>
#include <vector>

namespace tide {

// Runs body(index) for each index below `count` on a thread of its own, until all have ended.
template <class Body>
void on_each(int count, Body body) {
  std::vector<std::thread> threads;
  for (int index = 0; index < count; ++index) threads.emplace_back([&, index] { body(index); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace tide
