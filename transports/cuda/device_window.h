// A window of GPUs: every rank's part is an allocation of virtual memory that its owner shares by
// descriptor; all parts are mapped side by side. Nothing has a name, so nothing is left behind,
// however the processes end.
//
// A part stays alive while anybody has it mapped, also after its owner's death. Unmapping needs the
// device idle on it: a window's end waits for what its process has enqueued.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "transports/cuda/device_context.h"
#include "transports/cuda/multicast.h"
#include "transports/fabric.h"
#include "transports/host/descriptor.h"
#include "transports/host/window_map.h"

namespace tide::cuda {

// One allocation, released on destruction (mappings of it live on).
class DevicePart {
 public:
  static tide::Result<DevicePart> allocate(std::shared_ptr<DeviceContext> device, int64_t bytes);
  // Takes what a peer exported; the descriptor is not needed afterwards.
  static tide::Result<DevicePart> import(std::shared_ptr<DeviceContext> device,
                                         const Descriptor& descriptor);
  ~DevicePart();
  DevicePart(DevicePart&& other) noexcept;
  DevicePart& operator=(DevicePart&&) = delete;

  AllocationHandle handle() const { return handle_; }
  tide::Result<Descriptor> share() const;

 private:
  DevicePart(std::shared_ptr<DeviceContext> device, AllocationHandle handle)
      : device_(std::move(device)), handle_(handle) {}

  std::shared_ptr<DeviceContext> device_;
  AllocationHandle handle_ = 0;
};

class DeviceWindow : public Window {
 public:
  // Of several parts of `bytes` each, rounded up to the granularity; `map` may be null (memory that
  // nobody looks up).
  static tide::Result<std::shared_ptr<DeviceWindow>> map(std::shared_ptr<DeviceContext> device,
                                                         std::vector<DevicePart> parts, int rank,
                                                         int64_t bytes,
                                                         std::shared_ptr<WindowMap> map);
  ~DeviceWindow() override;
  DeviceWindow(const DeviceWindow&) = delete;
  DeviceWindow& operator=(const DeviceWindow&) = delete;

  int64_t bytes() const override { return bytes_; }
  void* own() const override { return peer(rank_); }
  void* peer(int rank) const override {
    return reinterpret_cast<void*>(base_ + static_cast<DevicePointer>(rank * stride_));
  }

  void* all() const override { return multicast_ ? multicast_->address() : nullptr; }

  // What Multicast::open wants to know of the own part, and its result.
  Multicast::Part own_part() const { return {own_->handle(), stride_}; }
  void set_multicast(std::unique_ptr<Multicast> multicast) { multicast_ = std::move(multicast); }

  // Leaves the memory mapped for good: work that cannot be ended may still use it.
  void abandon() { abandoned_ = true; }

 private:
  DeviceWindow(std::shared_ptr<DeviceContext> device, int ranks, int rank, int64_t bytes,
               std::shared_ptr<WindowMap> map);
  Status reserve_and_map(const std::vector<DevicePart>& parts);

  const std::shared_ptr<DeviceContext> device_;
  const int ranks_;
  const int rank_;
  const int64_t bytes_;
  const int64_t stride_;
  const std::shared_ptr<WindowMap> map_;
  DevicePointer base_ = 0;
  int mapped_ = 0;
  std::optional<DevicePart> own_;         // its handle is bound where there is multicast
  std::unique_ptr<Multicast> multicast_;  // ends before the parts are unmapped
  bool abandoned_ = false;
};

}  // namespace tide::cuda
