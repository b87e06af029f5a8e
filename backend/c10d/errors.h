// The engine's errors as exceptions. Wrong arguments are found, and raised by TORCH_CHECK, before
// the engine is called.
#pragma once

#include <exception>

#include "backend/base/status.h"

namespace tide {

// DistBackendError with the status's message.
std::exception_ptr dist_backend_error(const Status& status);

// Does nothing for OK.
void throw_if_error(const Status& status);

}  // namespace tide
