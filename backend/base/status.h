// Errors as values: what every torch-free part of tide returns instead of throwing or exiting.
//
// A Status is OK or carries a kind and one message. The message is written for the person who reads
// it in a training log: it names rank, group, parameter, wanted, got, and what to do, as far as the
// place that made it knows. Immutable and cheap to move; an OK Status holds no memory. Safe to copy
// between threads.
#pragma once

#include <string>
#include <utility>
#include <variant>

namespace tide {

enum class ErrorKind {
  kOk = 0,
  kInvalidUse,   // the caller passed something that cannot be served: wrong sizes, dtypes, ranks
                 // that disagree
  kUnsupported,  // a capability is missing; the message is the reason that a fallback reports
  kTimeout,      // a wait reached its deadline
  kPeerLost,     // another rank died, left, or reported its own failure
  kInterrupted,  // the program's own signal handler ended a wait (Ctrl-C)
  kSystem,       // the operating system refused (memory, descriptors, sockets)
  kCuda,         // the CUDA driver refused
  kInternal,     // tide's own mistake
};

// "invalid use", "timeout", ...: the word that messages start with.
const char* error_kind_name(ErrorKind kind);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(ErrorKind kind, std::string message) : kind_(kind), message_(std::move(message)) {}

  static Status ok() { return {}; }

  bool is_ok() const { return kind_ == ErrorKind::kOk; }
  explicit operator bool() const { return is_ok(); }
  ErrorKind kind() const { return kind_; }
  const std::string& message() const { return message_; }

  // "timeout: rank 1 waited ..."; "ok" without an error.
  std::string to_string() const;

 private:
  ErrorKind kind_ = ErrorKind::kOk;
  std::string message_;
};

// A value or the reason why there is none. value() may be called only when is_ok().
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : content_(std::move(value)) {}       // NOLINT(google-explicit-constructor)
  Result(Status error) : content_(std::move(error)) {}  // NOLINT(google-explicit-constructor)

  bool is_ok() const { return std::holds_alternative<T>(content_); }
  explicit operator bool() const { return is_ok(); }
  T& value() { return std::get<T>(content_); }
  const T& value() const { return std::get<T>(content_); }
  Status status() const { return is_ok() ? Status::ok() : std::get<Status>(content_); }

 private:
  std::variant<T, Status> content_;
};

}  // namespace tide

#define TIDE_RETURN_IF_ERROR(expression)          \
  do {                                            \
    ::tide::Status tide_status = (expression);    \
    if (!tide_status.is_ok()) return tide_status; \
  } while (0)
