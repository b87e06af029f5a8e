// The thread on which futures complete: no queue thread ever runs a callback (which may take an
// interpreter's lock).
//
// Started by the first post(). stop() runs what was posted, then joins; called from a callback
// (whose last reference to the group may be the one that it drops) it lets the thread end by
// itself. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <thread>

namespace tide {

class CompletionThread {
 public:
  CompletionThread();
  ~CompletionThread() { stop(); }

  // Runs `work` on the completion thread, after all that was posted before; at once on the caller
  // after stop(), and where the process may have no more threads: a future must complete.
  void post(std::function<void()> work);
  void stop();

 private:
  struct State;
  bool start();
  static void loop(const std::shared_ptr<State>& state);

  // Shared with the thread, which may outlive this object by a moment.
  std::shared_ptr<State> state_;
  std::thread thread_;  // guarded by the state's mutex
};

}  // namespace tide
