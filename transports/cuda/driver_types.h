// The part of the CUDA driver's binary interface that tide uses, declared here so that one source
// builds on machines with and without a CUDA toolkit. Names follow the driver's (CUresult -> Result
// code, CUstream -> Stream); sizes and numbers are fixed by the driver's ABI, and
// tests/unit/cuda_driver_abi_test.cc compares them with cuda.h where it is installed. Nothing here
// calls anything.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tide::cuda {

using Code = int;  // CUresult
inline constexpr Code kSuccess = 0;
inline constexpr Code kInvalidValue = 1;
inline constexpr Code kOutOfMemory = 2;
inline constexpr Code kNotInitialized = 3;
inline constexpr Code kDeinitialized = 4;
inline constexpr Code kNoDevice = 100;
inline constexpr Code kInvalidDevice = 101;
inline constexpr Code kInvalidImage = 200;
inline constexpr Code kNoBinaryForGpu = 209;
inline constexpr Code kInvalidHandle = 400;
inline constexpr Code kIllegalState = 401;
inline constexpr Code kNotFound = 500;
inline constexpr Code kNotReady = 600;
inline constexpr Code kNotPermitted = 800;
inline constexpr Code kNotSupported = 801;
inline constexpr Code kSystemNotReady = 802;

using Device = int;
using DevicePointer = uint64_t;
using AllocationHandle = uint64_t;
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using Event = struct EventTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;

struct Uuid {
  unsigned char bytes[16];
  friend bool operator==(const Uuid&, const Uuid&) = default;
};

// CUdevice_attribute
inline constexpr int kAttributeMultiprocessorCount = 16;
inline constexpr int kAttributeAsyncEngineCount = 40;
inline constexpr int kAttributeComputeMajor = 75;
inline constexpr int kAttributeComputeMinor = 76;
inline constexpr int kAttributeVirtualMemory = 102;
inline constexpr int kAttributePosixDescriptor = 103;
inline constexpr int kAttributeRdmaWithVirtualMemory = 110;
inline constexpr int kAttributeMulticast = 132;

inline constexpr int kAttributeSharedBytesOptIn = 97;
inline constexpr int kFunctionDynamicSharedBytes =
    8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

// CUmemAllocationProp: always pinned device memory here.
struct AllocationProperties {
  int type = 1;                    // CU_MEM_ALLOCATION_TYPE_PINNED
  int requested_handle_types = 1;  // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
  int location_type = 1;           // CU_MEM_LOCATION_TYPE_DEVICE
  int location_id = 0;
  void* win32_metadata = nullptr;
  unsigned char compression_type = 0;
  unsigned char rdma_capable = 0;
  unsigned short usage = 0;
  unsigned char reserved[4] = {};
};
struct AccessDescriptor {
  int location_type = 1;
  int location_id = 0;
  int flags = 3;  // read and write
};
inline constexpr int kPosixDescriptor = 1;
inline constexpr int kGranularityMinimum = 0;
inline constexpr int kGranularityRecommended = 1;

struct MulticastProperties {
  unsigned int devices = 0;
  size_t bytes = 0;
  unsigned long long handle_types = kPosixDescriptor;
  unsigned long long flags = 0;
};

// CUmemcpyAttributes
struct CopyAttributes {
  int source_order = 1;  // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
  int source_location[2] = {0, 0};
  int target_location[2] = {0, 0};
  unsigned int flags = 0;
};

// CUDA_MEMCPY2D
struct Copy2D {
  size_t source_x = 0, source_y = 0;
  int source_type = 2;  // CU_MEMORYTYPE_DEVICE
  const void* source_host = nullptr;
  DevicePointer source = 0;
  void* source_array = nullptr;
  size_t source_pitch = 0;
  size_t target_x = 0, target_y = 0;
  int target_type = 2;
  void* target_host = nullptr;
  DevicePointer target = 0;
  void* target_array = nullptr;
  size_t target_pitch = 0;
  size_t width_bytes = 0;
  size_t height = 0;
};

// CUstreamBatchMemOpParams, the two kinds used here.
inline constexpr int kMemoryOpWait32 = 1;
inline constexpr int kMemoryOpWrite32 = 2;
struct MemoryOp {
  int operation = kMemoryOpWait32;
  DevicePointer address = 0;
  uint64_t value = 0;  // the low 32 bits count
  unsigned int flags = 0;
  DevicePointer alias = 0;
  uint64_t pad = 0;
};
inline constexpr unsigned int kWaitReached =
    0;  // CU_STREAM_WAIT_VALUE_GEQ: int32(*word - value) >= 0
inline constexpr unsigned int kMaxMemoryOps = 255;

inline constexpr unsigned int kStreamNonBlocking = 1;
inline constexpr unsigned int kEventWithoutTiming = 2;
inline constexpr unsigned int kEventDefault = 0;
inline constexpr unsigned int kHostPortable = 1;
inline constexpr unsigned int kHostMapped = 2;
inline constexpr int kCaptureNone = 0;

}  // namespace tide::cuda
