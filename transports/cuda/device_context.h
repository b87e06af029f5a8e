// One GPU as a group uses it: the driver's table, the device's primary context (the one that torch
// works in), and what speaks against using it, as a reason.
//
// Shared by the fabric and its windows; the context is released with the last of them. Thread-safe:
// calls that need the context current take a ContextGuard.
#pragma once

#include <memory>
#include <string>

#include "transports/cuda/driver_api.h"

namespace tide::cuda {

class DeviceContext {
 public:
  // kUnsupported with the reason: too few hardware connections, no virtual memory, no descriptors
  // for it.
  static tide::Result<std::shared_ptr<DeviceContext>> open(const DriverApi& api, int ordinal);
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  const DriverApi& api() const { return api_; }
  Device device() const { return device_; }
  Context context() const { return context_; }
  const Uuid& uuid() const { return uuid_; }
  // Part of a GPU: it reaches no memory but its own.
  bool is_mig() const { return name_.find("MIG") != std::string::npos; }
  const std::string& name() const { return name_; }
  int64_t granularity() const { return granularity_; }
  AllocationProperties allocation() const;
  AccessDescriptor access() const;

  // check() with this GPU's name in the message.
  Status check(Code code, const char* call, const std::string& what) const;

 private:
  DeviceContext(const DriverApi& api, Device device) : api_(api), device_(device) {}
  Status prepare();

  const DriverApi api_;
  const Device device_;
  Context context_ = nullptr;
  Uuid uuid_ = {};
  std::string name_;
  bool rdma_ = false;
  int64_t granularity_ = 0;
};

// Makes the context current for the calling thread while it lives, and then what was current
// before.
class ContextGuard {
 public:
  explicit ContextGuard(const DeviceContext& device);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  const DriverApi& api_;
  Context before_ = nullptr;
  bool changed_ = false;
};

// Whether one stream blocked in a wait leaves the others alone: kUnsupported when
// CUDA_DEVICE_MAX_CONNECTIONS is too low.
Status connections_suffice();

// Whether a rank on `own` can reach the memory of a rank on `peer` (its UUID; perhaps not visible
// to this process).
Status can_reach(const DeviceContext& own, const Uuid& peer, bool peer_is_mig);

}  // namespace tide::cuda
