#include "transports/cuda/device_context.h"

#include <cstdlib>

namespace tide::cuda {
namespace {

// With one connection every stream of the process is stuck behind a blocked one; with eight (the
// default) none is.
constexpr int kLeastConnections = 8;

}  // namespace

Status connections_suffice() {
  const char* value = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  if (value == nullptr || *value == '\0') return Status::ok();
  const int connections = std::atoi(value);
  if (connections >= kLeastConnections) return Status::ok();
  return {ErrorKind::kUnsupported,
          std::string("CUDA_DEVICE_MAX_CONNECTIONS=") + value +
              ": a stream that waits for a peer would stop the others; unset it or set it to " +
              std::to_string(kLeastConnections) + " or more before CUDA starts"};
}

tide::Result<std::shared_ptr<DeviceContext>> DeviceContext::open(const DriverApi& api,
                                                                 int ordinal) {
  TIDE_RETURN_IF_ERROR(connections_suffice());
  Device device = 0;
  TIDE_RETURN_IF_ERROR(cuda::check(api, api.device(&device, ordinal), "cuDeviceGet",
                                   "opening GPU " + std::to_string(ordinal)));
  std::shared_ptr<DeviceContext> context(new DeviceContext(api, device));
  TIDE_RETURN_IF_ERROR(context->prepare());
  return context;
}

Status DeviceContext::prepare() {
  char name[128] = {};
  TIDE_RETURN_IF_ERROR(
      check(api_.device_name(name, sizeof(name) - 1, device_), "cuDeviceGetName", "opening"));
  name_ = name;
  TIDE_RETURN_IF_ERROR(check(api_.device_uuid(&uuid_, device_), "cuDeviceGetUuid", "opening"));
  const auto attribute = [this](int which) {
    int value = 0;
    return api_.device_attribute(&value, which, device_) == kSuccess ? value : 0;
  };
  if (attribute(kAttributeVirtualMemory) == 0 || attribute(kAttributePosixDescriptor) == 0) {
    return {ErrorKind::kUnsupported, name_ + ": the driver cannot share its memory by descriptor"};
  }
  rdma_ = attribute(kAttributeRdmaWithVirtualMemory) != 0;
  Context context = nullptr;
  TIDE_RETURN_IF_ERROR(
      check(api_.primary_context_retain(&context, device_), "cuDevicePrimaryCtxRetain", "opening"));
  context_ = context;
  size_t granularity = 0;
  const AllocationProperties properties = allocation();
  TIDE_RETURN_IF_ERROR(
      check(api_.memory_granularity(&granularity, &properties, kGranularityRecommended),
            "cuMemGetAllocationGranularity", "opening"));
  granularity_ = static_cast<int64_t>(granularity);
  return Status::ok();
}

DeviceContext::~DeviceContext() {
  if (context_ != nullptr) (void)api_.primary_context_release(device_);
}

AllocationProperties DeviceContext::allocation() const {
  AllocationProperties properties;
  properties.location_id = device_;
  properties.rdma_capable = rdma_ ? 1 : 0;
  return properties;
}

AccessDescriptor DeviceContext::access() const {
  AccessDescriptor access;
  access.location_id = device_;
  return access;
}

Status DeviceContext::check(Code code, const char* call, const std::string& what) const {
  if (code == kSuccess) return Status::ok();
  return cuda::check(api_, code, call,
                     name_ + " (device " + std::to_string(device_) + "): " + what);
}

ContextGuard::ContextGuard(const DeviceContext& device) : api_(device.api()) {
  if (api_.context_get_current(&before_) == kSuccess && before_ == device.context()) return;
  changed_ = api_.context_set_current(device.context()) == kSuccess;
}

ContextGuard::~ContextGuard() {
  if (changed_) (void)api_.context_set_current(before_);
}

Status can_reach(const DeviceContext& own, const Uuid& peer, bool peer_is_mig) {
  if (own.uuid() == peer) return Status::ok();
  if (own.is_mig() || peer_is_mig) {
    return {ErrorKind::kUnsupported,
            own.name() + ": a MIG instance cannot reach another GPU's memory"};
  }
  const DriverApi& api = own.api();
  int count = 0;
  TIDE_RETURN_IF_ERROR(
      own.check(api.device_count(&count), "cuDeviceGetCount", "looking for a peer's GPU"));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    Device device = 0;
    Uuid uuid = {};
    if (api.device(&device, ordinal) != kSuccess || api.device_uuid(&uuid, device) != kSuccess ||
        !(uuid == peer))
      continue;
    int reaches = 0;
    TIDE_RETURN_IF_ERROR(own.check(api.can_access_peer(&reaches, own.device(), device),
                                   "cuDeviceCanAccessPeer",
                                   "asking for access to device " + std::to_string(device)));
    if (reaches != 0) return Status::ok();
    return {ErrorKind::kUnsupported, own.name() + " (device " + std::to_string(own.device()) +
                                         ") has no peer access to device " +
                                         std::to_string(device)};
  }
  return Status::ok();  // not visible here: mapping its memory will tell
}

}  // namespace tide::cuda
