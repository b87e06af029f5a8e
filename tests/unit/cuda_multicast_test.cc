// Multicast windows over a driver in ordinary memory: who may have them, what any refusal leaves
// behind, and what copies, signals and sums through them mean. The calls of a real driver are never
// reached from here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "tests/network/stores.h"
#include "tests/on_each.h"
#include "tests/unit/cuda_driver_fake.h"
#include "transports/cuda/cuda_fabric.h"

namespace tide {
namespace {

using cuda::AllocationHandle;
using cuda::Device;
using cuda::DevicePointer;
using cuda::DriverApi;
using cuda::FakeDriver;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

constexpr int kRanks = 3;
constexpr int64_t kWindowBytes = 200000;

class CudaMulticastTest : public testing::Test {
 protected:
  CudaMulticastTest() {
    driver_.devices = kRanks;
    driver_.multicast = true;
  }

  // `change` edits a rank's options before it connects.
  void connect(int ranks, const std::function<void(int, CudaFabricOptions&)>& change = nullptr) {
    fabrics_.resize(static_cast<size_t>(ranks));
    windows_.resize(static_cast<size_t>(ranks));
    on_each(ranks, [&](int rank) {
      CudaFabricOptions options;
      options.host.rank = rank;
      options.host.size = ranks;
      options.host.group = "test " + std::to_string(groups_);
      options.host.deadline = Clock::now() + seconds(30);
      options.device = rank % driver_.devices;
      DriverApi api = driver_.api(rank);
      api.environment = [](const char*) -> const char* { return nullptr; };
      options.api = api;
      options.images = FakeDriver::images();
      if (change) change(rank, options);
      auto made = connect_cuda_fabric(options, store_);
      ASSERT_TRUE(made.is_ok()) << made.status().to_string();
      fabrics_[static_cast<size_t>(rank)] = std::move(made.value());
      auto window = fabric(rank).create_window(kWindowBytes, Clock::now() + seconds(30));
      ASSERT_TRUE(window.is_ok()) << window.status().to_string();
      windows_[static_cast<size_t>(rank)] = window.value();
    });
    ++groups_;
  }
  std::vector<Status> open(milliseconds patience = seconds(30)) {
    std::vector<Status> answers(fabrics_.size());
    on_each(static_cast<int>(fabrics_.size()), [&](int rank) {
      answers[static_cast<size_t>(rank)] =
          fabric(rank).open_to_all(window(rank), Clock::now() + patience);
    });
    return answers;
  }
  // Whoever refuses, all hear it and none has an address.
  void expect_refused(const std::string& reason) {
    for (const Status& answer : open()) {
      EXPECT_EQ(answer.kind(), ErrorKind::kUnsupported);
      EXPECT_THAT(answer.message(), HasSubstr(reason));
    }
    for (const auto& window : windows_) EXPECT_EQ(window->all(), nullptr);
  }
  void expect_no_multicast(const std::string& reason) {
    for (const auto& made : fabrics_) {
      EXPECT_FALSE(made->capabilities().multicast);
      EXPECT_THAT(made->capabilities().no_multicast, HasSubstr(reason));
    }
    expect_refused(reason);
    EXPECT_EQ(driver_.multicast_creates(), 0);
  }
  void pass(int rank, int queue) {
    std::atomic<bool> passed{false};
    ASSERT_TRUE(fabric(rank).mark(queue, [&](bool) { passed = true; }).is_ok());
    const Deadline until = Clock::now() + seconds(20);
    while (!passed && Clock::now() < until) std::this_thread::sleep_for(milliseconds(1));
    ASSERT_TRUE(passed);
  }
  CudaFabric& fabric(int rank) { return *fabrics_[static_cast<size_t>(rank)]; }
  Window& window(int rank) { return *windows_[static_cast<size_t>(rank)]; }
  void end() {
    on_each(static_cast<int>(fabrics_.size()), [&](int rank) {
      if (fabrics_[static_cast<size_t>(rank)]) fabrics_[static_cast<size_t>(rank)]->close();
    });
    windows_.clear();
    fabrics_.clear();
    EXPECT_EQ(driver_.live_objects(), 0);
    EXPECT_EQ(driver_.misuses(), "");
  }
  void TearDown() override { end(); }

  FakeDriver driver_;
  MemoryStore store_;
  int groups_ = 0;
  std::vector<std::unique_ptr<CudaFabric>> fabrics_;
  std::vector<std::shared_ptr<Window>> windows_;
};

// Each variable, set on any one rank, keeps every rank from the driver's create: when the group is
// made, and when it was set only afterwards.
TEST_F(CudaMulticastTest, AVariableOnAnyRankKeepsAllFromTheCreateCall) {
  const std::vector<std::pair<std::string, std::string>> variables = {
      {"NCCL_NVLS_ENABLE", "0"},
      {"TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"},
      {"NVSHMEM_DISABLE_NVLS", "1"}};
  for (const auto& [name, value] : variables) {
    for (int forbidding = 0; forbidding < kRanks; ++forbidding) {
      for (const bool from_the_start : {true, false}) {
        SCOPED_TRACE(name + " on rank " + std::to_string(forbidding));
        std::atomic<bool> is_set{from_the_start};
        connect(kRanks, [&, &name = name, &value = value](int rank, CudaFabricOptions& options) {
          if (rank != forbidding) return;
          options.api.value().environment = [&](const char* asked) {
            return is_set && asked == name ? value.c_str() : nullptr;
          };
        });
        EXPECT_EQ(fabric(0).capabilities().multicast, !from_the_start);
        is_set = true;
        const std::string reason = name + "=" + value;
        if (from_the_start) expect_no_multicast(reason);
        expect_refused("rank " + std::to_string(forbidding));
        expect_refused(reason);
        EXPECT_EQ(driver_.multicast_creates(), 0);
        end();
      }
    }
  }
  connect(kRanks);
  for (const Status& answer : open()) EXPECT_TRUE(answer.is_ok()) << answer.to_string();
  EXPECT_EQ(driver_.multicast_creates(), 1);  // so the counter counts
}

// Where nothing stands in for it, the table asks the process's own environment.
TEST_F(CudaMulticastTest, TheProcessesOwnEnvironmentIsAsked) {
  const char* before = std::getenv("NVSHMEM_DISABLE_NVLS");
  const std::string kept = before == nullptr ? "" : before;
  ::setenv("NVSHMEM_DISABLE_NVLS", "1", 1);
  connect(kRanks,
          [](int, CudaFabricOptions& options) { options.api.value().environment = nullptr; });
  expect_no_multicast("=");
  if (before != nullptr) {
    ::setenv("NVSHMEM_DISABLE_NVLS", kept.c_str(), 1);
  } else {
    ::unsetenv("NVSHMEM_DISABLE_NVLS");
  }
}

TEST_F(CudaMulticastTest, AnOptionOfOneRankKeepsAllFromTheCreateCall) {
  connect(kRanks, [](int rank, CudaFabricOptions& options) {
    if (rank == 2) options.multicast = Status(ErrorKind::kUnsupported, "TIDE_MULTICAST=0");
  });
  expect_no_multicast("rank 2: TIDE_MULTICAST=0");
}

TEST_F(CudaMulticastTest, WhoCannotHaveItSaysWhy) {
  driver_.multicast = false;
  connect(kRanks);
  expect_no_multicast("has none");
  end();
  driver_.multicast = true;
  connect(2);
  expect_no_multicast("a node of 2 ranks");
  end();
  driver_.devices = 2;
  connect(kRanks);
  expect_no_multicast("ranks share a GPU");
  end();
  driver_.devices = kRanks;
  connect(kRanks, [](int rank, CudaFabricOptions& options) {
    if (rank == 1) options.api.value().multicast.bind_memory = nullptr;
  });
  expect_no_multicast("rank 1: NVLink multicast is off: this CUDA driver has no multicast calls");
}

// Every call of every stage, refused on every rank that makes it.
TEST_F(CudaMulticastTest, ARefusalAtAnyStageOnAnyRankLeavesAllOnPushesAndNothingBehind) {
  std::atomic<int> stage{-1};
  std::atomic<int> refusing{-1};
  connect(kRanks, [&](int rank, CudaFabricOptions& options) {
    DriverApi& api = options.api.value();
    const DriverApi whole = api;
    const auto refused = [&stage, &refusing, rank](int at) {
      return stage == at && refusing == rank;
    };
    api.multicast.granularity = [=](size_t* g, const cuda::MulticastProperties* p, int f) {
      return refused(0) ? cuda::kNotSupported : whole.multicast.granularity(g, p, f);
    };
    api.multicast.create = [=](AllocationHandle* h, const cuda::MulticastProperties* p) {
      return refused(1) ? cuda::kInvalidValue : whole.multicast.create(h, p);
    };
    api.memory_export = [=](void* d, AllocationHandle h, int t, unsigned long long f) {
      return refused(2) ? cuda::kNotPermitted : whole.memory_export(d, h, t, f);
    };
    api.memory_import = [=](AllocationHandle* h, void* d, int t) {
      return refused(3) ? cuda::kInvalidValue : whole.memory_import(h, d, t);
    };
    api.multicast.add_device = [=](AllocationHandle h, Device d) {
      return refused(4) ? cuda::kIllegalState : whole.multicast.add_device(h, d);
    };
    api.multicast.bind_memory = [=](AllocationHandle h, size_t o, AllocationHandle m, size_t mo,
                                    size_t b, unsigned long long f) {
      return refused(5) ? cuda::kOutOfMemory : whole.multicast.bind_memory(h, o, m, mo, b, f);
    };
    api.address_reserve = [=](DevicePointer* p, size_t b, size_t a, DevicePointer w,
                              unsigned long long f) {
      return refused(6) ? cuda::kOutOfMemory : whole.address_reserve(p, b, a, w, f);
    };
    api.memory_map = [=](DevicePointer a, size_t b, size_t o, AllocationHandle h,
                         unsigned long long f) {
      return refused(7) ? cuda::kSystemNotReady : whole.memory_map(a, b, o, h, f);
    };
    api.memory_set_access = [=](DevicePointer a, size_t b, const cuda::AccessDescriptor* d,
                                size_t n) {
      return refused(8) ? cuda::kInvalidValue : whole.memory_set_access(a, b, d, n);
    };
  });
  const std::vector<std::string> calls = {"cuMulticastGetGranularity",
                                          "cuMulticastCreate",
                                          "cuMemExportToShareableHandle",
                                          "cuMemImportFromShareableHandle",
                                          "cuMulticastAddDevice",
                                          "switch's slots are used up",
                                          "cuMemAddressReserve",
                                          "cuMemMap",
                                          "cuMemSetAccess"};
  const int objects = driver_.live_objects();
  for (int call = 0; call < static_cast<int>(calls.size()); ++call) {
    for (int rank = 0; rank < kRanks; ++rank) {
      if ((call == 1 || call == 2) && rank != 0) continue;  // rank 0's alone
      SCOPED_TRACE(calls[static_cast<size_t>(call)] + " on rank " + std::to_string(rank));
      stage = call;
      refusing = rank;
      expect_refused(calls[static_cast<size_t>(call)]);
      expect_refused("rank " + std::to_string(rank));
      EXPECT_EQ(driver_.live_objects(), objects);
    }
  }
  stage = -1;
  // The pushes go on, and a later try may succeed.
  const char text[] = "pushed";
  const CopyBlock push = {window(0).peer(1), text, 1, sizeof(text), 0, 0};
  ASSERT_TRUE(fabric(0).copy(0, &push, 1).is_ok());
  pass(0, 0);
  EXPECT_STREQ(static_cast<const char*>(window(1).own()), text);
  for (const Status& answer : open()) EXPECT_TRUE(answer.is_ok()) << answer.to_string();
}

// A rank that never comes: the others give up at their deadline, with nothing left behind.
TEST_F(CudaMulticastTest, ARankThatStaysAwayEndsTheOthersAtTheirDeadline) {
  connect(kRanks);
  const int objects = driver_.live_objects();
  on_each(2, [&](int rank) {
    const Status answer = fabric(rank).open_to_all(window(rank), Clock::now() + milliseconds(200));
    EXPECT_EQ(answer.kind(), ErrorKind::kTimeout) << answer.to_string();
  });
  EXPECT_EQ(driver_.live_objects(), objects);
  EXPECT_EQ(driver_.multicast_creates(), 0);
}

TEST_F(CudaMulticastTest, OneCopyReachesEveryPartAndIsThereBeforeItsSignals) {
  connect(kRanks);
  for (const Status& answer : open()) ASSERT_TRUE(answer.is_ok()) << answer.to_string();
  constexpr int64_t kPieces = 300;
  std::vector<uint32_t> source(kPieces * 16);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint32_t>(i * 2654435761u);
  std::vector<CopyBlock> blocks;
  auto* all = static_cast<char*>(window(1).all());
  for (int64_t p = 0; p < kPieces; ++p)
    blocks.push_back({all + 4096 + p * 64, source.data() + p * 16, 1, 64, 0, 0});
  // Rows to rows too.
  blocks.push_back({all + 65536, source.data(), 8, 32, 64, 128});
  const uint64_t launches = driver_.launches();
  ASSERT_TRUE(fabric(1).copy(0, blocks.data(), static_cast<int>(blocks.size())).is_ok());
  EXPECT_EQ(driver_.launches(), launches);  // never by kernel, however many
  const uint64_t credits = driver_.memsets_of_one_word();
  for (int peer : {0, 2}) {
    auto* word = static_cast<uint32_t*>(window(1).peer(peer));
    ASSERT_TRUE(fabric(1).signal(0, word, 1).is_ok());
  }
  EXPECT_EQ(driver_.memsets_of_one_word(), credits);  // behind the data, not beside it
  WaitGuard guard;
  guard.timeout = seconds(20);
  for (int peer : {0, 2})
    ASSERT_TRUE(fabric(peer).wait(0, static_cast<uint32_t*>(window(peer).own()), 1, guard).is_ok());
  for (int rank = 0; rank < kRanks; ++rank) {
    pass(rank, 0);
    const auto* own = static_cast<const char*>(window(rank).own());
    EXPECT_EQ(std::memcmp(own + 4096, source.data(), kPieces * 64), 0) << rank;
    for (int row = 0; row < 8; ++row) {
      EXPECT_EQ(std::memcmp(own + 65536 + row * 64, source.data() + row * 32, 32), 0);
    }
  }
}

// Against fp64, for the order is the switch's; with scale, rounding, adding, and a tail.
TEST_F(CudaMulticastTest, AReadAddSumsEveryPart) {
  connect(kRanks);
  for (const Status& answer : open()) ASSERT_TRUE(answer.is_ok()) << answer.to_string();
  constexpr int64_t kNumel = 1003;
  std::vector<double> sum(kNumel, 0.0), magnitude(kNumel, 0.0);
  for (int rank = 0; rank < kRanks; ++rank) {
    auto* part = static_cast<float*>(window(rank).own()) + 64;
    for (int64_t i = 0; i < kNumel; ++i) {
      part[i] = std::sin(static_cast<float>(i * kRanks + rank)) * 3.0f;
      sum[static_cast<size_t>(i)] += part[i];
      magnitude[static_cast<size_t>(i)] += std::abs(part[i]);
    }
  }
  const auto* from = static_cast<const float*>(window(2).all()) + 64;
  std::vector<float> output(kNumel, 10.0f);
  const ReadAddBlock block = {output.data(), from, kNumel, DType::kFloat32};
  AccumulateOptions options;
  options.scale = 0.25;
  ASSERT_TRUE(fabric(2).read_add(4, &block, 1, options).is_ok());
  options.add_to_output = true;
  ASSERT_TRUE(fabric(2).read_add(4, &block, 1, options).is_ok());
  pass(2, 4);
  for (size_t i = 0; i < output.size(); ++i) {
    const double bound = 8 * std::ldexp(magnitude[i], -24) + 1e-6 * std::abs(sum[i]);
    EXPECT_NEAR(output[i], 0.5 * sum[i], bound) << i;
  }
  const ReadAddBlock outside = {output.data(), window(2).own(), 4, DType::kFloat32};
  EXPECT_EQ(fabric(2).read_add(4, &outside, 1, options).kind(), ErrorKind::kInternal);
}

}  // namespace
}  // namespace tide
