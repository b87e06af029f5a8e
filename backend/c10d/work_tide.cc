#include "backend/c10d/work_tide.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "backend/c10d/errors.h"
#include "backend/c10d/streams.h"

namespace tide {
namespace {

constexpr std::chrono::milliseconds kSignalInterval{100};

uint64_t next_completion_key() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

WorkTide::WorkTide(Call call)
    : c10d::Work(call.rank, call.type),
      call_(std::move(call)),
      completion_key_(next_completion_key()) {
  call_.kept->add(completion_key_, call_.operation, std::move(call_.inputs), call_.outputs);
}

WorkTide::~WorkTide() {
  if (call_.operation->is_done()) call_.kept->drop(completion_key_);
}

bool WorkTide::isSuccess() const {
  return call_.operation->is_done() && call_.operation->status().is_ok();
}

std::exception_ptr WorkTide::exception() const {
  const Status status = call_.operation->status();
  return status.is_ok() ? nullptr : dist_backend_error(status);
}

// The error that has broken the group so far is this operation's, unless it was done before.
void WorkTide::order_current_stream(bool reads_only) {
  Operation& operation = *call_.operation;
  if (!operation.is_done()) throw_if_error(call_.engine->error());
  void* stream = current_stream(call_.device);
  throw_if_error(reads_only ? operation.release_read(stream) : operation.release(stream));
}

bool WorkTide::wait(std::chrono::milliseconds timeout) {
  if (!call_.device.is_cpu()) {
    order_current_stream(false);
    call_.kept->drop(completion_key_);
    return true;
  }
  const bool bounded = timeout > kNoTimeout;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  Operation& operation = *call_.operation;
  while (true) {
    std::chrono::milliseconds slice = kSignalInterval;
    if (bounded) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      slice = std::max(std::chrono::milliseconds(0), std::min(slice, left));
    }
    const Status status = operation.wait(slice);
    if (operation.is_done()) {
      call_.kept->drop(completion_key_);
      throw_if_error(operation.status());
      return true;
    }
    if (bounded && std::chrono::steady_clock::now() >= deadline) {
      throw_if_error(Status(status.kind(), "group '" + call_.group + "', rank " +
                                               std::to_string(call_.rank) + ", after " +
                                               std::to_string(timeout.count()) +
                                               " ms: " + status.message()));
    }
    if (call_.check_signals) call_.check_signals();
  }
}

void WorkTide::wait_read() {
  if (!call_.device.is_cpu()) order_current_stream(true);
  while (call_.device.is_cpu()) {
    const Status status = call_.operation->wait_read(kSignalInterval);
    if (status.is_ok()) break;
    if (call_.operation->is_done()) {
      throw_if_error(call_.operation->status());
      break;
    }
    if (call_.check_signals) call_.check_signals();
  }
  call_.kept->drop_inputs(completion_key_);
}

// Complete at once, behind the operation in stream order: who waits for it waits on a stream.
c10::intrusive_ptr<c10::ivalue::Future> WorkTide::stream_future() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{call_.device});
  on_side_stream(call_.device, [&] {
    order_current_stream(false);
    future->markCompleted(c10::IValue(call_.outputs));
  });
  return future;
}

void WorkTide::abort() {
  TORCH_CHECK(false,
              "one operation of a tide group cannot be aborted alone; abort the process group");
}

c10::intrusive_ptr<c10::ivalue::Future> WorkTide::getFuture() {
  std::lock_guard<std::mutex> lock(future_mutex_);
  if (future_) return future_;
  if (!call_.device.is_cpu()) return future_ = stream_future();
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  // The callback gives away all that it holds: nothing of torch's goes on the completion thread.
  struct Completion {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    std::vector<at::Tensor> outputs;
  };
  auto completion = std::make_shared<Completion>(Completion{future_, call_.outputs});
  call_.operation->on_done([completion, kept = call_.kept](const Status& status) {
    if (status.is_ok()) {
      completion->future->markCompleted(c10::IValue(completion->outputs));
    } else {
      completion->future->setError(dist_backend_error(status));
    }
    kept->bury(std::move(completion->future), std::move(completion->outputs));
  });
  return future_;
}

}  // namespace tide
