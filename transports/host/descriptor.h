// File descriptors that do not survive a fork, and memory regions made so that a fork cannot catch
// them half made.
//
// Close-on-exec is not enough: a data loader's worker is forked without exec, and a copy of a dead
// rank's socket in it would keep the peers from seeing the end of that rank. So every descriptor of
// the fabric is recorded here, and a forked child closes them all before fork() returns in it.
// Descriptors are made inside Descriptor::record(), so that no fork falls between the system call
// and the record. In the child, the owners' destructors then find nothing to close.
//
// The record is the process's, as fork handlers are; it is the only global state of the host
// fabric.
#pragma once

#include <functional>
#include <utility>

namespace tide {

// Owns one recorded descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }

  // Calls `make`, which returns a new close-on-exec descriptor or -1 with errno set, and records
  // the result. `make` must not block and must not use Descriptor.
  static Descriptor record(const std::function<int()>& make);

  explicit operator bool() const { return fd_ >= 0; }
  int get() const { return fd_; }
  void reset();

 private:
  int fd_ = -1;
};

// Runs `action` while no thread of this process can fork. `action` must not block and must not use
// Descriptor.
void with_fork_held(const std::function<void()>& action);

}  // namespace tide
