// What the GPU tests share: the primary context of GPU 0, plain device memory (cudaMalloc's kind,
// so that compute-sanitizer sees its bounds), copies from and to it, and the skip when there is no
// GPU.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "transports/cuda/driver_api.h"
#include "transports/cuda/kernel_library.h"

namespace tide::cuda {

// The calls that only tests use, straight from the driver.
struct TestCalls {
  Code (*allocate)(DevicePointer*, size_t) = nullptr;
  Code (*free)(DevicePointer) = nullptr;
  Code (*to_device)(DevicePointer, const void*, size_t) = nullptr;
  Code (*to_host)(void*, DevicePointer, size_t) = nullptr;
  Code (*elapsed)(float*, Event, Event) = nullptr;
  Code (*context_synchronize)() = nullptr;

  static const TestCalls& get() {
    static const TestCalls calls = [] {
      TestCalls c;
      void* library = dlopen("libcuda.so.1", RTLD_NOW);
      const auto bind = [library](auto& entry, const char* name) {
        entry = reinterpret_cast<std::remove_reference_t<decltype(entry)>>(dlsym(library, name));
      };
      bind(c.allocate, "cuMemAlloc_v2");
      bind(c.free, "cuMemFree_v2");
      bind(c.to_device, "cuMemcpyHtoD_v2");
      bind(c.to_host, "cuMemcpyDtoH_v2");
      bind(c.elapsed, "cuEventElapsedTime");
      bind(c.context_synchronize, "cuCtxSynchronize");
      return c;
    }();
    return calls;
  }
};

#define TIDE_EXPECT_CUDA(expression) EXPECT_EQ((expression), ::tide::cuda::kSuccess) << #expression

class DeviceBytes {
 public:
  explicit DeviceBytes(size_t bytes) : bytes_(bytes) {
    TIDE_EXPECT_CUDA(TestCalls::get().allocate(&pointer_, bytes == 0 ? 1 : bytes));
  }
  ~DeviceBytes() { TestCalls::get().free(pointer_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  char* get() const { return reinterpret_cast<char*>(pointer_); }
  DevicePointer address() const { return pointer_; }
  size_t size() const { return bytes_; }
  void write(const void* from) const {
    TIDE_EXPECT_CUDA(TestCalls::get().to_device(pointer_, from, bytes_));
  }
  std::vector<std::byte> read() const {
    std::vector<std::byte> bytes(bytes_);
    TIDE_EXPECT_CUDA(TestCalls::get().to_host(bytes.data(), pointer_, bytes_));
    return bytes;
  }

 private:
  size_t bytes_;
  DevicePointer pointer_ = 0;
};

// Context, stream and kernels; skips without a GPU.
class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto& loaded = driver();
    if (!loaded) GTEST_SKIP() << loaded.status().to_string();
    api_ = loaded.value();
    ASSERT_EQ(api_.device(&device_, 0), kSuccess);
    ASSERT_EQ(api_.primary_context_retain(&context_, device_), kSuccess);
    ASSERT_EQ(api_.context_set_current(context_), kSuccess);
    ASSERT_EQ(api_.stream_create(&stream_, kStreamNonBlocking, 0), kSuccess);
    const auto images = kernel_images();
    ASSERT_TRUE(images.is_ok()) << images.status().to_string();
    auto library = KernelLibrary::load(api_, images.value());
    ASSERT_TRUE(library.is_ok()) << library.status().to_string();
    kernels_ = std::move(library.value());
  }
  void TearDown() override {
    kernels_.reset();
    if (stream_ != nullptr) api_.stream_destroy(stream_);
    if (context_ != nullptr) api_.primary_context_release(device_);
  }
  void synchronize() { ASSERT_EQ(api_.stream_synchronize(stream_), kSuccess); }

  DriverApi api_;
  Device device_ = 0;
  Context context_ = nullptr;
  Stream stream_ = nullptr;
  std::unique_ptr<KernelLibrary> kernels_;
};

}  // namespace tide::cuda
