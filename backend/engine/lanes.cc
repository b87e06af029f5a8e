#include "backend/engine/lanes.h"

#include <system_error>
#include <utility>

#include "backend/engine/executor.h"

namespace tide {

void Lanes::submit(Lane lane, std::shared_ptr<OperationState> operation) {
  Worker& worker = workers_[static_cast<size_t>(lane)];
  const Status started = start(lane, worker);
  if (!started.is_ok()) {
    const Status broken = context_->break_group(started, true);
    if (lane == Lane::kMove) operation->lane_moved();
    return operation->lane_done(broken);
  }
  {
    std::lock_guard<std::mutex> lock(worker.mutex);
    worker.queue.push_back(std::move(operation));
  }
  worker.changed.notify_one();
}

Status Lanes::start(Lane lane, Worker& worker) {
  if (worker.thread.joinable()) return Status::ok();
  try {
    worker.thread = std::thread([this, lane] { loop(lane); });
    return Status::ok();
  } catch (const std::system_error& error) {
    return Status(ErrorKind::kSystem, context_->where() +
                                          ": starting a lane's thread: " + error.what() +
                                          " (raise the limit of processes, ulimit -u)");
  }
}

void Lanes::stop() {
  for (Worker& worker : workers_) {
    std::lock_guard<std::mutex> lock(worker.mutex);
    worker.stopping = true;
    worker.changed.notify_one();
  }
  for (Worker& worker : workers_) {
    if (worker.thread.joinable()) worker.thread.join();
  }
}

void Lanes::loop(Lane lane) {
  Worker& worker = workers_[static_cast<size_t>(lane)];
  Executor executor(context_, &context_->fabric());
  std::unique_lock<std::mutex> lock(worker.mutex);
  for (;;) {
    worker.changed.wait(lock, [&] { return worker.stopping || !worker.queue.empty(); });
    if (worker.queue.empty()) return;
    std::shared_ptr<OperationState> operation = std::move(worker.queue.front());
    worker.queue.pop_front();
    lock.unlock();
    run(lane, executor, operation);
    operation.reset();
    lock.lock();
  }
}

void Lanes::run(Lane lane, Executor& executor, const std::shared_ptr<OperationState>& operation) {
  context_->set_running(lane, operation);
  operation->lane_started();
  Status status = context_->failure.status();
  if (status.is_ok()) status = executor.run(*operation, lane);
  if (!status.is_ok()) {
    if (status.kind() == ErrorKind::kInternal)
      status = Status(status.kind(), operation->name() + ": " + status.message());
    status = context_->break_group(status, true);  // the first error ends every operation
  }
  context_->set_running(lane, nullptr);
  if (lane == Lane::kMove) operation->lane_moved();
  operation->lane_done(status);
}

}  // namespace tide
