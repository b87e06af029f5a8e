// The calling thread's streams, for tensors of any device: by torch's device-independent interface,
// so that one extension serves builds of torch with and without CUDA.
#pragma once

#include <c10/core/Device.h>

#include <functional>

namespace tide {

// A GPU's ordinal, kHostMemory for the processor's.
int device_ordinal(const c10::Device& device);

// The current stream of the calling thread as the driver knows it; null on the CPU.
void* current_stream(const c10::Device& device);
// Runs `work` with another stream as the current one.
void on_side_stream(const c10::Device& device, const std::function<void()>& work);
// The host waits for the current stream.
void synchronize_current_stream(const c10::Device& device);
// Gives back to the driver what torch's allocator keeps in reserve.
void empty_allocator_cache();

}  // namespace tide
