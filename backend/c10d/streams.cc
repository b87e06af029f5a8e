#include "backend/c10d/streams.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "backend/c10d/engine_link.h"

namespace tide {

int device_ordinal(const c10::Device& device) {
  if (device.is_cpu()) return kHostMemory;
  if (device.has_index()) return device.index();
  return c10::impl::VirtualGuardImpl(device.type()).getDevice().index();
}

void* current_stream(const c10::Device& device) {
  if (device.is_cpu()) return nullptr;
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStreamNativeHandle(guard.getStream(device));
}

void on_side_stream(const c10::Device& device, const std::function<void()>& work) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  struct Back {
    const c10::impl::VirtualGuardImpl& guard;
    c10::Stream stream;
    ~Back() { guard.exchangeStream(stream); }
  } back{guard, guard.exchangeStream(guard.getStreamFromGlobalPool(device))};
  work();
}

void synchronize_current_stream(const c10::Device& device) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.synchronizeStream(guard.getStream(device));
}

void empty_allocator_cache() {
  try {
    c10::getDeviceAllocator(c10::DeviceType::CUDA)->emptyCache();
  } catch (const c10::Error&) {
    // Nothing was kept then.
  }
}

}  // namespace tide
