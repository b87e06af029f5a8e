// A c10d store as the engine's KeyValueStore. Waits in slices, so that Ctrl-C ends them.
#pragma once

#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "transports/fabric.h"

namespace tide {

class StoreAdapter : public KeyValueStore {
 public:
  // Uses a clone of the store, made at the first use. `check_signals` throws to interrupt.
  StoreAdapter(const c10::intrusive_ptr<c10d::Store>& store, std::function<void()> check_signals);

  Status set(const std::string& key, const std::string& value) override;
  Result<std::string> get(const std::string& key, Deadline deadline) override;
  void remove(const std::string& key) override;

  // Looks for signals: kInterrupted when a handler raised. Calling threads only.
  Status look_for_interrupt();

  // This rank has refused a call over wrong arguments. Peers that wait in get() for ranks that
  // never come learn it in about two seconds. Ranks that all refuse a call count it alike.
  void refuse(const std::string& reason);
  // Refusals are counted anew with each engine's group that was made.
  void start_round(int groups_made);

  // Ends every get(), now and later, with `reason`. Any thread.
  void stop(const Status& reason);

  // What check_signals threw in look_for_interrupt(); null without one. Hands it out once.
  std::exception_ptr take_interruption();

 private:
  c10d::Store& clone();
  std::string refusal_key(int further);
  // The reason of a rank that has refused more calls than this one; empty without one.
  std::string refused_elsewhere();

  const c10::intrusive_ptr<c10d::Store> store_;
  std::once_flag cloned_;
  c10::intrusive_ptr<c10d::Store> clone_;
  const std::function<void()> check_signals_;
  int round_ = 0;
  int refusals_ = 0;  // of this round
  std::mutex mutex_;
  std::exception_ptr interruption_;
  Status stopped_;
};

}  // namespace tide
