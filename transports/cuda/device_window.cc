#include "transports/cuda/device_window.h"

#include <unistd.h>

#include <utility>

namespace tide::cuda {
namespace {

int64_t round_up(int64_t bytes, int64_t step) { return (bytes + step - 1) / step * step; }

}  // namespace

tide::Result<DevicePart> DevicePart::allocate(std::shared_ptr<DeviceContext> device,
                                              int64_t bytes) {
  const AllocationProperties properties = device->allocation();
  AllocationHandle handle = 0;
  const auto size = static_cast<size_t>(round_up(bytes, device->granularity()));
  TIDE_RETURN_IF_ERROR(device->check(device->api().memory_create(&handle, size, &properties, 0),
                                     "cuMemCreate",
                                     "allocating a window of " + std::to_string(bytes) + " bytes"));
  return DevicePart(std::move(device), handle);
}

tide::Result<DevicePart> DevicePart::import(std::shared_ptr<DeviceContext> device,
                                            const Descriptor& descriptor) {
  if (!descriptor)
    return Status(ErrorKind::kInternal, "a peer's window part came without a descriptor");
  AllocationHandle handle = 0;
  void* raw = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor.get()));
  TIDE_RETURN_IF_ERROR(device->check(device->api().memory_import(&handle, raw, kPosixDescriptor),
                                     "cuMemImportFromShareableHandle",
                                     "taking a peer's window part"));
  return DevicePart(std::move(device), handle);
}

DevicePart::DevicePart(DevicePart&& other) noexcept
    : device_(std::move(other.device_)), handle_(std::exchange(other.handle_, 0)) {}

DevicePart::~DevicePart() {
  if (device_ && handle_ != 0) (void)device_->api().memory_release(handle_);
}

tide::Result<Descriptor> DevicePart::share() const {
  Code code = kSuccess;
  // The driver's call makes the descriptor; it neither blocks nor uses Descriptor.
  Descriptor descriptor = Descriptor::record([&] {
    int fd = -1;
    code = device_->api().memory_export(&fd, handle_, kPosixDescriptor, 0);
    return code == kSuccess ? fd : -1;
  });
  TIDE_RETURN_IF_ERROR(
      device_->check(code, "cuMemExportToShareableHandle",
                     "sharing a window part (are file descriptors used up? see ulimit -n)"));
  return descriptor;
}

DeviceWindow::DeviceWindow(std::shared_ptr<DeviceContext> device, int ranks, int rank,
                           int64_t bytes, std::shared_ptr<WindowMap> map)
    : device_(std::move(device)),
      ranks_(ranks),
      rank_(rank),
      bytes_(bytes),
      stride_(round_up(bytes, device_->granularity())),
      map_(std::move(map)) {}

tide::Result<std::shared_ptr<DeviceWindow>> DeviceWindow::map(std::shared_ptr<DeviceContext> device,
                                                              std::vector<DevicePart> parts,
                                                              int rank, int64_t bytes,
                                                              std::shared_ptr<WindowMap> map) {
  std::shared_ptr<DeviceWindow> window(new DeviceWindow(
      std::move(device), static_cast<int>(parts.size()), rank, bytes, std::move(map)));
  TIDE_RETURN_IF_ERROR(window->reserve_and_map(parts));
  window->own_.emplace(std::move(parts[static_cast<size_t>(rank)]));
  return window;
}

Status DeviceWindow::reserve_and_map(const std::vector<DevicePart>& parts) {
  const DriverApi& api = device_->api();
  const auto stride = static_cast<size_t>(stride_);
  DevicePointer base = 0;
  TIDE_RETURN_IF_ERROR(
      device_->check(api.address_reserve(&base, stride * parts.size(),
                                         static_cast<size_t>(device_->granularity()), 0, 0),
                     "cuMemAddressReserve", "reserving addresses for a window"));
  base_ = base;
  const AccessDescriptor access = device_->access();
  for (size_t part = 0; part < parts.size(); ++part) {
    const std::string what = "mapping the window part of rank " + std::to_string(part);
    TIDE_RETURN_IF_ERROR(
        device_->check(api.memory_map(base_ + part * stride, stride, 0, parts[part].handle(), 0),
                       "cuMemMap", what));
    ++mapped_;
    TIDE_RETURN_IF_ERROR(device_->check(
        api.memory_set_access(base_ + part * stride, stride, &access, 1), "cuMemSetAccess", what));
  }
  if (map_) map_->add(reinterpret_cast<void*>(base_), ranks_, bytes_, stride_);
  return Status::ok();
}

DeviceWindow::~DeviceWindow() {
  if (base_ == 0) return;
  if (map_) map_->remove(reinterpret_cast<void*>(base_));
  if (abandoned_) {
    (void)multicast_.release();
    return;
  }
  const ContextGuard guard(*device_);
  // Streams of the caller may still read what it was given, and unmapping does not wait for them.
  if (map_) (void)device_->api().context_synchronize();
  multicast_.reset();
  const auto stride = static_cast<size_t>(stride_);
  for (int part = 0; part < mapped_; ++part) {
    (void)device_->api().memory_unmap(base_ + static_cast<size_t>(part) * stride, stride);
  }
  (void)device_->api().address_free(base_, stride * static_cast<size_t>(ranks_));
}

}  // namespace tide::cuda
