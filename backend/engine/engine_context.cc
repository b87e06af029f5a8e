#include "backend/engine/engine_context.h"

#include <utility>

namespace tide {

const char* control_counter_name(int counter) {
  if (counter == kMeetCounter) return "the call";
  return counter_name(static_cast<Counter>(counter));
}

EngineContext::EngineContext(std::string name, std::unique_ptr<Fabric> fabric,
                             std::chrono::milliseconds timeout, std::function<Status()> interrupted)
    : wait_times(fabric->size()),
      name_(std::move(name)),
      fabric_(std::move(fabric)),
      enqueuing_(fabric_->capabilities().blocking ? nullptr
                                                  : dynamic_cast<EnqueuingFabric*>(fabric_.get())),
      timeout_(timeout.count()),
      interrupted_(std::move(interrupted)) {}

std::string EngineContext::where() const {
  return "group '" + name_ + "', rank " + std::to_string(rank());
}

std::string EngineContext::describe(const OperationState& operation) const {
  std::string text = operation.name();
  if (enqueuing_ != nullptr) {
    // A wait's text begins with its operation's name (enqueuing_executor.cc).
    for (const std::string& what : enqueuing_->standing_in()) {
      if (what.rfind(text + ": ", 0) == 0)
        return text + ", waiting for" + what.substr(text.size() + 1);
    }
    return text;
  }
  const WaitingFor waiting = operation.waiting();
  if (waiting.counter < 0 || !control) return text;
  const uint32_t got =
      __atomic_load_n(control->word(rank(), waiting.counter, waiting.from), __ATOMIC_RELAXED);
  return text + ", waiting for " + control_counter_name(waiting.counter) + " from rank " +
         std::to_string(waiting.from) + ", wanted " + std::to_string(waiting.value) + ", got " +
         std::to_string(got);
}

void EngineContext::note_wait(OperationState& operation, int counter, int from,
                              Clock::time_point begin) {
  const auto time = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin);
  const auto microseconds = static_cast<uint64_t>(time.count());
  operation.add_wait(from, microseconds);
  wait_times.add(operation, control_counter_name(counter), from, microseconds);
}

void EngineContext::break_group(const Status& reason, bool tell_peers) {
  // Fabrics and plans know no group: their messages get its name here.
  const bool is_located = reason.message().find("group '") != std::string::npos;
  const Status located =
      is_located ? reason : Status(reason.kind(), where() + ": " + reason.message());
  if (!failure.set(located)) return;
  fabric_->wake_all();
  if (tell_peers) fabric_->fail(located);
}

void EngineContext::peer_failed(int peer, const Status& reason) {
  std::string running;
  if (enqueuing_ != nullptr) {
    for (const std::string& what : enqueuing_->standing_in())
      running += (running.empty() ? " while in " : " and in ") + what;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const std::shared_ptr<OperationState>& operation : running_) {
      if (operation)
        running += (running.empty() ? " while in " : " and in ") + describe(*operation);
    }
  }
  break_group(Status(ErrorKind::kPeerLost, where() + ": rank " + std::to_string(peer) + " failed" +
                                               running + ": " + reason.message()),
              false);
}

void EngineContext::wait_failed(const Status& reason) {
  // Agreement's and the check's sentences are complete.
  if (reason.kind() != ErrorKind::kTimeout || !control) {
    break_group(reason, true);
    return;
  }
  std::string calls;
  for (int r = 0; r < ranks(); ++r) {
    calls += (r == 0 ? "" : ", ") + std::string("rank ") + std::to_string(r) + " " +
             std::to_string(control->calls(r));
  }
  break_group(
      Status(reason.kind(), reason.message() + "; calls made: " + calls +
                                " (a rank with fewer is stopped, slow or has left one out)"),
      true);
}

void EngineContext::set_running(Lane lane, std::shared_ptr<OperationState> operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  running_[static_cast<size_t>(lane)].swap(operation);
}

}  // namespace tide
