// What a fabric offers beyond fabric.h when its calls return before their work is done: an order
// between its queues and the caller's streams, and words about how far a queue has got.
//
// Differences to a blocking fabric:
//   - every call returns when its work is on the queue's stream; one thread issues all steps, in an
//     order in which they would also finish
//   - wait() returns at once; what its guard refers to must live until the queue has passed the
//     wait or close() has returned. Its error (deadline, check, the group's failure) comes to
//     on_wait_failure's listener, from a thread of the fabric; then all queues are released by
//     poison, sums write NaN, and later calls but mark() are refused
//   - a window's words may lie in memory that the processor cannot read: host() is a blocking
//     fabric of the same ranks for what it must
// No call synchronises host and device but create_window, settle, close and the end of a window.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transports/fabric.h"

namespace tide {

// A place in a stream's order: what was enqueued there before it was taken. Usable from any thread,
// also after the fabric's end.
class StreamPoint {
 public:
  virtual ~StreamPoint() = default;
  // What the user's stream gets from here on comes behind the point.
  virtual Status release(void* user_stream) const = 0;
};

class EnqueuingFabric : public Fabric {
 public:
  virtual Fabric& host() = 0;

  // From any thread of the fabric, at most once. Set before the first wait.
  virtual void on_wait_failure(std::function<void(const Status&)> listener) = 0;
  // Calls `passed` (may be empty) from a thread of the fabric once the queue has got here; it must
  // not block. Also after a failure: what was enqueued before ends by poison, `clean` is false then
  // and true when the queue had got here before any poison was written.
  virtual Status mark(int queue, std::function<void(bool clean)> passed) = 0;
  // Whether all waits and marks have passed.
  virtual bool is_drained() const = 0;
  // WaitGuard::what of the waits that queues stand in now.
  virtual std::vector<std::string> standing_in() const = 0;

  // kInvalidUse when the user's stream cannot be used: it records a graph.
  virtual Status check_stream(void* user_stream) const = 0;
  virtual Result<std::shared_ptr<StreamPoint>> point_of_stream(void* user_stream) = 0;
  virtual Result<std::shared_ptr<StreamPoint>> point_of_queue(int queue) = 0;
  // What the queue gets from here on comes behind the point.
  virtual Status wait_for_point(int queue, const StreamPoint& point) = 0;
  // The host waits for everything that this process has enqueued on the device. Never in a step.
  virtual Status settle() = 0;
};

}  // namespace tide
