// One collective in flight: what the caller of the engine holds. Shared between the caller and the
// queue threads.
//
// Completed exactly once, with OK or the error that broke the group. Every wait is bounded by the
// operation's own deadlines (each of its steps has one), so wait() without a timeout returns.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "backend/base/status.h"

namespace tide {

class Operation {
 public:
  virtual ~Operation() = default;

  virtual bool is_done() const = 0;
  // OK while it runs.
  virtual Status status() const = 0;

  // Blocks until done, or until `timeout` from now when given (then kTimeout, and the operation
  // goes on).
  virtual Status wait(std::optional<std::chrono::milliseconds> timeout = std::nullopt) = 0;

  // Blocks until this rank's gradients have been read: own pushes have left and the own sum has
  // read (reduce), or own shards have been read (gather). Never later than wait(); `timeout` as
  // there.
  virtual Status wait_read(std::optional<std::chrono::milliseconds> timeout = std::nullopt) = 0;

  // Over a fabric that enqueues: what the user's stream gets from here on comes behind this
  // operation (behind its reads: see wait_read). The host does not wait; the error is the one that
  // has broken the group so far. Elsewhere as the waits above.
  virtual Status release(void* user_stream) = 0;
  virtual Status release_read(void* user_stream) = 0;

  // Runs `callback` once, on the group's completion thread, or at once when already done. Must not
  // block.
  virtual void on_done(std::function<void(const Status&)> callback) = 0;
};

}  // namespace tide
