// UCC, notes in tl_cuda_nvls.h: one rank may not import a handle (EPERM) while the others have
// theirs and wait for it.
//
// Right: that rank's refusal is everybody's, with its number and the call, nobody waits, nothing is
// left, and the next window is made. The driver is one in ordinary memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/network/stores.h"
#include "tests/unit/cuda_driver_fake.h"
#include "transports/cuda/cuda_fabric.h"

namespace tide {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int kRanks = 4;
constexpr int kRefuses = 3;

TEST(UccNvls, AnImportRefusedOnOneRankIsRefusedOnAll) {
  cuda::FakeDriver driver;
  MemoryStore store;
  std::atomic<bool> refuses{true};
  std::atomic<int> tried{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      CudaFabricOptions options;
      options.host.rank = rank;
      options.host.size = kRanks;
      options.host.group = "test";
      options.host.deadline = Clock::now() + std::chrono::seconds(60);
      options.device = rank % driver.devices;
      cuda::DriverApi api = driver.api(rank);
      if (rank == kRefuses) {
        api.memory_import = [&, whole = api.memory_import](cuda::AllocationHandle* handle,
                                                           void* descriptor, int type) {
          return refuses ? cuda::kNotPermitted : whole(handle, descriptor, type);
        };
      }
      options.api = api;
      options.images = cuda::FakeDriver::images();
      auto made = connect_cuda_fabric(options, store);
      ASSERT_TRUE(made.is_ok()) << made.status().to_string();
      // Far beyond what it takes: a rank that waited for the refusing one would end by the test's
      // time limit.
      const Deadline deadline = Clock::now() + std::chrono::seconds(600);
      const auto refused = made.value()->create_window(4096, deadline);
      ASSERT_FALSE(refused.is_ok());
      EXPECT_THAT(refused.status().to_string(),
                  AllOf(HasSubstr("rank 3"), HasSubstr("cuMemImport")));
      if (++tried == kRanks) refuses = false;
      while (refuses) std::this_thread::yield();
      {
        const auto window = made.value()->create_window(4096, deadline);
        ASSERT_TRUE(window.is_ok()) << window.status().to_string();
      }
      made.value()->close();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(driver.live_objects(), 0);
  EXPECT_EQ(driver.misuses(), "");
}

}  // namespace
}  // namespace tide
