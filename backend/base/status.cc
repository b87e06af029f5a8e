#include "backend/base/status.h"

namespace tide {

const char* error_kind_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kOk:
      return "ok";
    case ErrorKind::kInvalidUse:
      return "invalid use";
    case ErrorKind::kUnsupported:
      return "unsupported";
    case ErrorKind::kTimeout:
      return "timeout";
    case ErrorKind::kPeerLost:
      return "peer lost";
    case ErrorKind::kInterrupted:
      return "interrupted";
    case ErrorKind::kSystem:
      return "system error";
    case ErrorKind::kCuda:
      return "cuda error";
    case ErrorKind::kInternal:
      return "internal error";
  }
  return "unknown error";
}

std::string Status::to_string() const {
  if (is_ok()) return "ok";
  return std::string(error_kind_name(kind_)) + ": " + message_;
}

}  // namespace tide
