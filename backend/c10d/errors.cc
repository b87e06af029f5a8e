#include "backend/c10d/errors.h"

#include <c10/util/Exception.h>

namespace tide {

std::exception_ptr dist_backend_error(const Status& status) {
  return std::make_exception_ptr(c10::DistBackendError(
      {__func__, "tide", static_cast<uint32_t>(__LINE__)}, "tide: " + status.to_string()));
}

void throw_if_error(const Status& status) {
  if (!status.is_ok()) std::rethrow_exception(dist_backend_error(status));
}

}  // namespace tide
