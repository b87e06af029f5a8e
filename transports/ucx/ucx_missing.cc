// Stands in for the whole transport where tide is built without UCX's headers.
#include "transports/ucx/ucx.h"

namespace tide {

std::string ucx_missing_from_build() {
  return "tide was built without UCX's headers; install UCX 1.16 or newer with its headers, or the "
         "package libucx-cu13, "
         "and build again";
}

Result<std::shared_ptr<UcxRail>> open_ucx_rail(const UcxRailOptions&) {
  return Status(ErrorKind::kUnsupported, ucx_missing_from_build());
}

Result<std::unique_ptr<Network>> connect_ucx_group(std::shared_ptr<UcxRail>, const UcxGroupOptions&,
                                                   Deadline) {
  return Status(ErrorKind::kUnsupported, ucx_missing_from_build());
}

}  // namespace tide
