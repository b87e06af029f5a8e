// The engine's errors as exceptions: DistBackendError for what broke a group, ValueError-like
// TORCH_CHECK for arguments.
#pragma once

#include <exception>

#include "backend/base/status.h"

namespace tide {

// DistBackendError with the status's message.
std::exception_ptr dist_backend_error(const Status& status);

// Does nothing for OK.
void throw_if_error(const Status& status);

}  // namespace tide
