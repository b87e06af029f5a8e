#include "transports/cuda/driver_api.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

namespace tide::cuda {
namespace {

constexpr int kLeastVersion = 13000;

template <class Return, class... Arguments>
bool bind(std::function<Return(Arguments...)>& entry, void* address) {
  if (address == nullptr) return false;
  entry = reinterpret_cast<Return (*)(Arguments...)>(address);
  return true;
}

using Resolve = std::function<void*(const char* name, int version)>;

tide::Result<DriverApi> load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return Status(ErrorKind::kUnsupported,
                  std::string("no CUDA driver on this machine: ") + (why ? why : "libcuda.so.1"));
  }
  using GetProcAddress = Code (*)(const char*, void**, int, uint64_t, int*);
  const auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) {
    return Status(ErrorKind::kUnsupported,
                  "the CUDA driver is older than 12.0; tide needs 13.0 or newer");
  }
  return fill_driver_api([get](const char* name, int version) -> void* {
    void* address = nullptr;
    int found = 0;
    if (get(name, &address, version, 0, &found) != kSuccess || found != 0) return nullptr;
    return address;
  });
}

}  // namespace

tide::Result<DriverApi> fill_driver_api(const Resolve& resolve) {
  using Initialise = Code (*)(unsigned int);
  using Version = Code (*)(int*);
  const auto version_of = reinterpret_cast<Version>(resolve("cuDriverGetVersion", 2020));
  const auto initialise = reinterpret_cast<Initialise>(resolve("cuInit", 2000));
  DriverApi api;
  if (version_of == nullptr || initialise == nullptr || version_of(&api.version) != kSuccess) {
    return Status(ErrorKind::kUnsupported, "the CUDA driver does not tell its version");
  }
  if (api.version < kLeastVersion) {
    return Status(ErrorKind::kUnsupported, "the CUDA driver is version " +
                                               std::to_string(api.version / 1000) + "." +
                                               std::to_string(api.version % 1000 / 10) +
                                               "; tide needs 13.0 or newer: update the driver");
  }
  if (const Code code = initialise(0); code != kSuccess) {
    return Status(ErrorKind::kUnsupported,
                  "cuInit refused with error " + std::to_string(code) +
                      (code == kNoDevice ? ": no GPU is visible to this process" : ""));
  }
  std::string missing;
  const auto need = [&](auto& entry, const char* name, int version) {
    if (!bind(entry, resolve(name, version)) && missing.empty()) missing = name;
  };
  need(api.error_name, "cuGetErrorName", 6000);
  need(api.device_count, "cuDeviceGetCount", 2000);
  need(api.device, "cuDeviceGet", 2000);
  need(api.device_name, "cuDeviceGetName", 2000);
  need(api.device_uuid, "cuDeviceGetUuid", 11040);
  need(api.device_attribute, "cuDeviceGetAttribute", 2000);
  need(api.can_access_peer, "cuDeviceCanAccessPeer", 4000);
  need(api.primary_context_retain, "cuDevicePrimaryCtxRetain", 7000);
  need(api.primary_context_release, "cuDevicePrimaryCtxRelease", 11000);
  need(api.context_set_current, "cuCtxSetCurrent", 4000);
  need(api.context_get_current, "cuCtxGetCurrent", 4000);
  need(api.context_synchronize, "cuCtxSynchronize", 2000);
  need(api.stream_priority_range, "cuCtxGetStreamPriorityRange", 5050);
  need(api.stream_create, "cuStreamCreateWithPriority", 5050);
  need(api.stream_destroy, "cuStreamDestroy", 4000);
  need(api.stream_query, "cuStreamQuery", 2000);
  need(api.stream_synchronize, "cuStreamSynchronize", 2000);
  need(api.stream_is_capturing, "cuStreamIsCapturing", 10000);
  need(api.stream_wait_event, "cuStreamWaitEvent", 3020);
  need(api.event_create, "cuEventCreate", 2000);
  need(api.event_destroy, "cuEventDestroy", 4000);
  need(api.event_record, "cuEventRecord", 2000);
  need(api.event_query, "cuEventQuery", 2000);
  need(api.memory_granularity, "cuMemGetAllocationGranularity", 10020);
  need(api.memory_create, "cuMemCreate", 10020);
  need(api.memory_release, "cuMemRelease", 10020);
  need(api.address_reserve, "cuMemAddressReserve", 10020);
  need(api.address_free, "cuMemAddressFree", 10020);
  need(api.memory_map, "cuMemMap", 10020);
  need(api.memory_unmap, "cuMemUnmap", 10020);
  need(api.memory_set_access, "cuMemSetAccess", 10020);
  need(api.memory_export, "cuMemExportToShareableHandle", 10020);
  need(api.memory_import, "cuMemImportFromShareableHandle", 10020);
  need(api.host_allocate, "cuMemHostAlloc", 2020);
  need(api.host_free, "cuMemFreeHost", 2000);
  need(api.host_device_pointer, "cuMemHostGetDevicePointer", 3020);
  need(api.copy, "cuMemcpyDtoDAsync", 3020);
  need(api.copy_2d, "cuMemcpy2DAsync", 3020);
  need(api.copy_batch, "cuMemcpyBatchAsync", 13000);
  need(api.set_words, "cuMemsetD32Async", 3020);
  need(api.set_bytes, "cuMemsetD8Async", 3020);
  need(api.wait_value, "cuStreamWaitValue32", 11070);
  need(api.write_value, "cuStreamWriteValue32", 11070);
  need(api.memory_ops, "cuStreamBatchMemOp", 11070);
  need(api.module_load, "cuModuleLoadData", 2000);
  need(api.module_unload, "cuModuleUnload", 2000);
  need(api.module_function, "cuModuleGetFunction", 2000);
  need(api.function_load, "cuFuncLoad", 12040);
  need(api.function_set_attribute, "cuFuncSetAttribute", 9000);
  need(api.launch, "cuLaunchKernel", 4000);
  if (!missing.empty()) {
    return Status(ErrorKind::kUnsupported,
                  "the CUDA driver has no " + missing + "; tide needs 13.0 or newer");
  }
  // Absent in some builds of the driver: then there is no multicast, nothing else.
  bind(api.multicast.create, resolve("cuMulticastCreate", 12010));
  bind(api.multicast.add_device, resolve("cuMulticastAddDevice", 12010));
  bind(api.multicast.bind_memory, resolve("cuMulticastBindMem", 12010));
  bind(api.multicast.unbind, resolve("cuMulticastUnbind", 12010));
  bind(api.multicast.granularity, resolve("cuMulticastGetGranularity", 12010));
  return api;
}

const tide::Result<DriverApi>& driver() {
  static const auto* loaded =
      new tide::Result<DriverApi>(load());  // kept to the end: threads may outlive statics
  return *loaded;
}

Status multicast_permitted(const DriverApi& api) {
  const auto variable = [&api](const char* name) {
    const char* value = api.environment ? api.environment(name) : std::getenv(name);
    return value == nullptr ? "" : value;
  };
  const auto forbids = [](const char* name, const char* value) {
    return Status(ErrorKind::kUnsupported,
                  std::string("NVLink multicast is off: ") + name + "=" + value);
  };
  if (std::strcmp(variable("NCCL_NVLS_ENABLE"), "0") == 0) return forbids("NCCL_NVLS_ENABLE", "0");
  for (const char* name : {"TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"}) {
    const char* value = variable(name);
    if (*value != '\0' && std::strcmp(value, "0") != 0) return forbids(name, value);
  }
  return Status::ok();
}

tide::Result<const MulticastEntries*> multicast_entries(const DriverApi& api) {
  TIDE_RETURN_IF_ERROR(multicast_permitted(api));
  const MulticastEntries& entries = api.multicast;
  if (!entries.create || !entries.add_device || !entries.bind_memory || !entries.unbind ||
      !entries.granularity) {
    return Status(ErrorKind::kUnsupported,
                  "NVLink multicast is off: this CUDA driver has no multicast calls");
  }
  return &entries;
}

Status check(const DriverApi& api, Code code, const char* call, const std::string& what) {
  if (code == kSuccess) return Status::ok();
  const char* name = nullptr;
  if (!api.error_name || api.error_name(code, &name) != kSuccess || name == nullptr)
    name = "unknown error";
  return {code == kOutOfMemory ? ErrorKind::kSystem : ErrorKind::kCuda,
          what + ": " + call + " refused: " + name + " (" + std::to_string(code) + ")"};
}

}  // namespace tide::cuda
