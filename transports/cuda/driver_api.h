// The CUDA driver as a table of its entry points: everything that tide calls, filled at run time
// from libcuda.so.1, so that one binary runs on machines without a GPU, and tests can put a fake in
// its place (tests/unit/cuda_driver_fake.h).
//
// The table is plain data: copied freely, and usable from any thread once loaded; the driver stays
// loaded for the process's life. Entries are set all together or not at all. Nothing of the CUDA
// runtime library is used, and no entry ever works on the legacy default stream: callers pass
// streams of their own.
//
// Multicast objects can put a shared host's GPUs out of service, so their entries are no part of
// the table: they are given out by multicast_entries(), which refuses when the environment forbids
// them.
#pragma once

#include <functional>
#include <string>

#include "backend/base/status.h"
#include "transports/cuda/driver_types.h"

namespace tide::cuda {

struct MulticastEntries {
  std::function<Code(AllocationHandle*, const MulticastProperties*)> create;
  std::function<Code(AllocationHandle, Device)> add_device;
  std::function<Code(AllocationHandle, size_t, AllocationHandle, size_t, size_t,
                     unsigned long long)>
      bind_memory;
  std::function<Code(AllocationHandle, Device, size_t, size_t)> unbind;
  std::function<Code(size_t*, const MulticastProperties*, int)> granularity;
};

struct DriverApi {
  int version = 0;  // 13000 for CUDA 13.0

  std::function<Code(Code, const char**)> error_name;
  std::function<Code(int*)> device_count;
  std::function<Code(Device*, int)> device;
  std::function<Code(char*, int, Device)> device_name;
  std::function<Code(Uuid*, Device)> device_uuid;
  std::function<Code(int*, int, Device)> device_attribute;
  std::function<Code(int*, Device, Device)> can_access_peer;
  std::function<Code(Context*, Device)> primary_context_retain;
  std::function<Code(Device)> primary_context_release;
  std::function<Code(Context)> context_set_current;
  std::function<Code(Context*)> context_get_current;
  std::function<Code()> context_synchronize;  // never in a step: before memory is unmapped

  std::function<Code(int*, int*)> stream_priority_range;
  std::function<Code(Stream*, unsigned int, int)> stream_create;
  std::function<Code(Stream)> stream_destroy;
  std::function<Code(Stream)> stream_query;
  std::function<Code(Stream)> stream_synchronize;  // never in a step: set-up and teardown only
  std::function<Code(Stream, int*)> stream_is_capturing;
  std::function<Code(Stream, Event, unsigned int)> stream_wait_event;
  std::function<Code(Event*, unsigned int)> event_create;
  std::function<Code(Event)> event_destroy;
  std::function<Code(Event, Stream)> event_record;
  std::function<Code(Event)> event_query;

  std::function<Code(size_t*, const AllocationProperties*, int)> memory_granularity;
  std::function<Code(AllocationHandle*, size_t, const AllocationProperties*, unsigned long long)>
      memory_create;
  std::function<Code(AllocationHandle)> memory_release;
  std::function<Code(DevicePointer*, size_t, size_t, DevicePointer, unsigned long long)>
      address_reserve;
  std::function<Code(DevicePointer, size_t)> address_free;
  std::function<Code(DevicePointer, size_t, size_t, AllocationHandle, unsigned long long)>
      memory_map;
  std::function<Code(DevicePointer, size_t)> memory_unmap;
  std::function<Code(DevicePointer, size_t, const AccessDescriptor*, size_t)> memory_set_access;
  std::function<Code(void*, AllocationHandle, int, unsigned long long)> memory_export;
  std::function<Code(AllocationHandle*, void*, int)> memory_import;
  std::function<Code(void**, size_t, unsigned int)> host_allocate;
  std::function<Code(void*)> host_free;
  std::function<Code(DevicePointer*, void*, unsigned int)> host_device_pointer;

  std::function<Code(DevicePointer, DevicePointer, size_t, Stream)> copy;
  std::function<Code(const Copy2D*, Stream)> copy_2d;
  std::function<Code(DevicePointer*, DevicePointer*, size_t*, size_t, CopyAttributes*, size_t*,
                     size_t, Stream)>
      copy_batch;
  std::function<Code(DevicePointer, unsigned int, size_t, Stream)> set_words;
  std::function<Code(DevicePointer, unsigned char, size_t, Stream)> set_bytes;
  std::function<Code(Stream, DevicePointer, uint32_t, unsigned int)> wait_value;
  std::function<Code(Stream, DevicePointer, uint32_t, unsigned int)> write_value;
  std::function<Code(Stream, unsigned int, MemoryOp*, unsigned int)> memory_ops;

  std::function<Code(Module*, const void*)> module_load;
  std::function<Code(Module)> module_unload;
  std::function<Code(Function*, Module, const char*)> module_function;
  std::function<Code(Function)> function_load;
  std::function<Code(Function, int, int)> function_set_attribute;
  // Function, grid x y z, block x y z, shared bytes, stream, parameters, extra.
  std::function<Code(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                     Stream, void**, void**)>
      launch;

  // Of this process: getenv, where it is empty.
  std::function<const char*(const char* variable)> environment;
  MulticastEntries multicast;  // go through multicast_entries(): nothing else may read this
};

// The process's driver, loaded and initialised at the first call; kUnsupported with the reason when
// there is none, when it is older than 13.0, or when it shows no device. The answer is kept.
const tide::Result<DriverApi>& driver();

// Fills a table from any resolver of driver symbols: (name, least version) -> address or null. For
// driver() and its test.
tide::Result<DriverApi> fill_driver_api(
    const std::function<void*(const char* name, int version)>& resolve);

// OK, or the first variable of the environment that forbids multicast, as a reason.
Status multicast_permitted(const DriverApi& api);
// The only way to the multicast calls: permitted, and none of them null.
tide::Result<const MulticastEntries*> multicast_entries(const DriverApi& api);

// OK for kSuccess; else kCuda (kSystem for lack of memory) with "call: NAME (code)" and what it was
// for.
Status check(const DriverApi& api, Code code, const char* call, const std::string& what);

}  // namespace tide::cuda
