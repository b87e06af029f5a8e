// The driver's binary interface as declared here against the toolkit's header, where there is one;
// and the table's own rules: what is missing is a reason, and multicast is out of reach where the
// environment forbids it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "transports/cuda/driver_api.h"

#if __has_include(<cuda.h>)
#include <cuda.h>
#endif

namespace tide::cuda {
namespace {

using testing::HasSubstr;

#if __has_include(<cuda.h>)
static_assert(sizeof(AllocationProperties) == sizeof(CUmemAllocationProp));
static_assert(offsetof(AllocationProperties, location_id) ==
              offsetof(CUmemAllocationProp, location.id));
static_assert(offsetof(AllocationProperties, rdma_capable) ==
              offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));
static_assert(sizeof(AccessDescriptor) == sizeof(CUmemAccessDesc));
static_assert(offsetof(AccessDescriptor, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(sizeof(MulticastProperties) == sizeof(CUmulticastObjectProp));
static_assert(offsetof(MulticastProperties, bytes) == offsetof(CUmulticastObjectProp, size));
static_assert(sizeof(CopyAttributes) == sizeof(CUmemcpyAttributes));
static_assert(offsetof(CopyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
static_assert(sizeof(Copy2D) == sizeof(CUDA_MEMCPY2D));
static_assert(offsetof(Copy2D, source) == offsetof(CUDA_MEMCPY2D, srcDevice));
static_assert(offsetof(Copy2D, source_pitch) == offsetof(CUDA_MEMCPY2D, srcPitch));
static_assert(offsetof(Copy2D, target) == offsetof(CUDA_MEMCPY2D, dstDevice));
static_assert(offsetof(Copy2D, target_pitch) == offsetof(CUDA_MEMCPY2D, dstPitch));
static_assert(offsetof(Copy2D, height) == offsetof(CUDA_MEMCPY2D, Height));
static_assert(sizeof(MemoryOp) == sizeof(CUstreamBatchMemOpParams));
static_assert(offsetof(MemoryOp, address) == offsetof(CUstreamBatchMemOpParams, waitValue.address));
static_assert(offsetof(MemoryOp, value) == offsetof(CUstreamBatchMemOpParams, waitValue.value));
static_assert(offsetof(MemoryOp, flags) == offsetof(CUstreamBatchMemOpParams, waitValue.flags));
static_assert(sizeof(Uuid) == sizeof(CUuuid));
static_assert(kMemoryOpWait32 == CU_STREAM_MEM_OP_WAIT_VALUE_32 &&
              kMemoryOpWrite32 == CU_STREAM_MEM_OP_WRITE_VALUE_32);
static_assert(kWaitReached == CU_STREAM_WAIT_VALUE_GEQ &&
              kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kEventWithoutTiming == CU_EVENT_DISABLE_TIMING &&
              kHostPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(kHostMapped == CU_MEMHOSTALLOC_DEVICEMAP &&
              kPosixDescriptor == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(kAttributeVirtualMemory == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(kAttributePosixDescriptor ==
              CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
static_assert(kAttributeRdmaWithVirtualMemory ==
              CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
static_assert(kAttributeMulticast == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED);
static_assert(kNotFound == CUDA_ERROR_NOT_FOUND && kNoBinaryForGpu == CUDA_ERROR_NO_BINARY_FOR_GPU);
#endif

Code version(int* value) {
  *value = 13000;
  return kSuccess;
}
Code old_version(int* value) {
  *value = 12090;
  return kSuccess;
}
Code initialise(unsigned int) { return kSuccess; }
Code anything() { return kNotSupported; }

void* resolve(const char* name, int) {
  if (std::string(name) == "cuDriverGetVersion") return reinterpret_cast<void*>(&version);
  if (std::string(name) == "cuInit") return reinterpret_cast<void*>(&initialise);
  return reinterpret_cast<void*>(&anything);
}

// The variables that forbid multicast, put back afterwards.
class Environment {
 public:
  Environment() {
    for (const char* name : kNames) {
      if (const char* value = std::getenv(name)) before_[name] = value;
      ::unsetenv(name);
    }
  }
  ~Environment() {
    for (const char* name : kNames) ::unsetenv(name);
    for (const auto& [name, value] : before_) ::setenv(name.c_str(), value.c_str(), 1);
  }

 private:
  static constexpr const char* kNames[] = {"NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST",
                                           "NVSHMEM_DISABLE_NVLS", "TIDE_MULTICAST"};
  std::map<std::string, std::string> before_;
};

TEST(DriverApi, IsFilledAsAWholeOrNamesWhatIsMissing) {
  EXPECT_TRUE(fill_driver_api(resolve).is_ok());
  const auto missing = fill_driver_api([](const char* name, int v) {
    return std::string(name) == "cuMemcpyBatchAsync" ? nullptr : resolve(name, v);
  });
  EXPECT_THAT(missing.status().to_string(), HasSubstr("cuMemcpyBatchAsync"));
  const auto old = fill_driver_api([](const char* name, int v) {
    return std::string(name) == "cuDriverGetVersion" ? reinterpret_cast<void*>(&old_version)
                                                     : resolve(name, v);
  });
  EXPECT_THAT(old.status().to_string(), HasSubstr("12.9"));
  const auto none = fill_driver_api([](const char*, int) -> void* { return nullptr; });
  EXPECT_EQ(none.status().kind(), ErrorKind::kUnsupported);
}

TEST(DriverApi, MulticastIsOutOfReachWhereAVariableForbidsIt) {
  const Environment clean;
  const auto api = fill_driver_api(resolve);
  ASSERT_TRUE(api.is_ok());
  ASSERT_TRUE(multicast_entries(api.value()).is_ok());
  const std::pair<const char*, const char*> forbidding[] = {
      {"NCCL_NVLS_ENABLE", "0"},
      {"TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"},
      {"NVSHMEM_DISABLE_NVLS", "1"}};
  for (const auto& [name, value] : forbidding) {
    ::setenv(name, value, 1);
    const auto entries = multicast_entries(api.value());
    EXPECT_THAT(entries.status().to_string(), HasSubstr(name));
    ::unsetenv(name);
  }
  auto without = fill_driver_api([](const char* name, int v) {
    return std::string(name) == "cuMulticastCreate" ? nullptr : resolve(name, v);
  });
  ASSERT_TRUE(without.is_ok());
  EXPECT_THAT(multicast_entries(without.value()).status().to_string(),
              HasSubstr("no multicast calls"));
}

TEST(DriverApi, LoadsOrSaysWhyNot) {
  const auto& loaded = driver();
  if (loaded) {
    EXPECT_GE(loaded.value().version, 13000);
  } else {
    EXPECT_EQ(loaded.status().kind(), ErrorKind::kUnsupported);
    EXPECT_FALSE(loaded.status().message().empty());
  }
}

}  // namespace
}  // namespace tide::cuda
