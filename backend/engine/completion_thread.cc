#include "backend/engine/completion_thread.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <utility>

namespace tide {

struct CompletionThread::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool stopping = false;
};

CompletionThread::CompletionThread() : state_(std::make_shared<State>()) {}

void CompletionThread::post(std::function<void()> work) {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->stopping && start()) {
      state_->queue.push_back(std::move(work));
      state_->changed.notify_one();
      return;
    }
  }
  work();
}

bool CompletionThread::start() {
  if (thread_.joinable()) return true;
  try {
    thread_ = std::thread([state = state_] { loop(state); });
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

void CompletionThread::stop() {
  std::thread thread;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stopping = true;
    state_->changed.notify_one();
    if (thread_.joinable()) thread = std::move(thread_);
  }
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();
  } else {
    thread.join();
  }
}

void CompletionThread::loop(const std::shared_ptr<State>& state) {
  std::unique_lock<std::mutex> lock(state->mutex);
  for (;;) {
    state->changed.wait(lock, [&] { return state->stopping || !state->queue.empty(); });
    if (state->queue.empty()) return;
    std::function<void()> work = std::move(state->queue.front());
    state->queue.pop_front();
    lock.unlock();
    work();
    work = nullptr;
    lock.lock();
  }
}

}  // namespace tide
