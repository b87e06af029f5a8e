// The CUDA fabric over a driver in ordinary memory: ranks are threads of this process, everything
// else is real.
#include "transports/cuda/cuda_fabric.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "tests/network/stores.h"
#include "tests/on_each.h"
#include "tests/unit/cuda_driver_fake.h"
#include "transports/cuda/device_queue.h"

namespace tide {
namespace {

using cuda::DriverApi;
using cuda::FakeDriver;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

Deadline soon() { return Clock::now() + seconds(30); }

WaitGuard guard_of(milliseconds timeout = seconds(20)) {
  WaitGuard guard;
  guard.timeout = timeout;
  guard.what = "the test's word";
  return guard;
}

uint32_t* word_at(void* base, int64_t index) { return static_cast<uint32_t*>(base) + index * 16; }

template <class Condition>
bool becomes_true(Condition condition, milliseconds within = seconds(20)) {
  const Deadline deadline = Clock::now() + within;
  while (!condition()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

class CudaFabricTest : public testing::Test {
 protected:
  // `change` edits a rank's options before it connects.
  void connect(int ranks, const std::function<void(int, CudaFabricOptions&)>& change = nullptr) {
    answers_.assign(static_cast<size_t>(ranks), Status::ok());
    fabrics_.resize(static_cast<size_t>(ranks));
    on_each(ranks, [&](int rank) {
      CudaFabricOptions options;
      options.host.rank = rank;
      options.host.size = ranks;
      options.host.group = connects_ == 0 ? "test" : "test " + std::to_string(connects_);
      options.host.deadline = soon();
      options.device = rank % driver_.devices;
      options.api = driver_.api(rank);
      options.images = FakeDriver::images();
      if (change) change(rank, options);
      auto made = connect_cuda_fabric(options, store_);
      answers_[static_cast<size_t>(rank)] = made.status();
      if (made) fabrics_[static_cast<size_t>(rank)] = std::move(made.value());
    });
    ++connects_;
  }
  void connect_all(int ranks) {
    connect(ranks);
    for (const Status& answer : answers_) ASSERT_TRUE(answer.is_ok()) << answer.to_string();
  }
  void make_windows(int64_t bytes) {
    windows_.resize(fabrics_.size());
    on_each(static_cast<int>(fabrics_.size()), [&](int rank) {
      auto made = fabric(rank).create_window(bytes, soon());
      ASSERT_TRUE(made.is_ok()) << made.status().to_string();
      windows_[static_cast<size_t>(rank)] = made.value();
    });
  }
  CudaFabric& fabric(int rank) { return *fabrics_[static_cast<size_t>(rank)]; }
  Window& window(int rank) { return *windows_[static_cast<size_t>(rank)]; }
  void TearDown() override {
    on_each(static_cast<int>(fabrics_.size()), [&](int rank) {
      if (fabrics_[static_cast<size_t>(rank)]) fabrics_[static_cast<size_t>(rank)]->close();
    });
    windows_.clear();
    fabrics_.clear();
    EXPECT_EQ(driver_.misuses(), "");
  }

  FakeDriver driver_;
  MemoryStore store_;
  int connects_ = 0;  // each by a name of its own: the store keeps what the last one said
  std::vector<Status> answers_;
  std::vector<std::unique_ptr<CudaFabric>> fabrics_;
  std::vector<std::shared_ptr<Window>> windows_;
};

TEST_F(CudaFabricTest, WindowsAreClearedSharedAndGivenBack) {
  connect_all(3);
  make_windows(100000);
  for (int rank = 0; rank < 3; ++rank) {
    const auto* bytes = static_cast<const char*>(window(rank).own());
    EXPECT_EQ(std::count(bytes, bytes + 100000, 0), 100000);
    EXPECT_EQ(window(rank).own(), window(rank).peer(rank));
  }
  static_cast<char*>(window(0).peer(2))[99999] = 7;
  EXPECT_EQ(static_cast<const char*>(window(2).own())[99999], 7);
  on_each(3, [&](int rank) { fabrics_[static_cast<size_t>(rank)]->close(); });
  windows_.clear();
  fabrics_.clear();
  EXPECT_EQ(driver_.live_objects(), 0);
}

TEST_F(CudaFabricTest, DataComesBeforeItsSignalAndNothingSynchronises) {
  constexpr int kRanks = 3;
  constexpr int kRounds = 60;
  constexpr int64_t kPieces = 150;  // more than a batch
  constexpr int64_t kPieceBytes = 72;
  driver_.devices = kRanks;
  connect_all(kRanks);
  make_windows(8192 + kRanks * kPieces * kPieceBytes);
  const uint64_t before = driver_.synchronisations();
  std::vector<std::vector<uint32_t>> sources(kRanks);
  std::vector<std::vector<uint32_t>> results(kRanks);
  on_each(kRanks, [&](int rank) {
    CudaFabric& f = fabric(rank);
    const auto at = [&](void* base, int from) {
      return static_cast<char*>(base) + 8192 + from * kPieces * kPieceBytes;
    };
    std::vector<uint32_t>& source = sources[static_cast<size_t>(rank)];
    source.resize(kRounds * kPieces * kPieceBytes / 4);
    for (size_t i = 0; i < source.size(); ++i)
      source[i] = static_cast<uint32_t>(i * 4 + static_cast<size_t>(rank));
    std::vector<uint32_t>& result = results[static_cast<size_t>(rank)];
    result.resize(source.size());
    const int to = (rank + 1) % kRanks;
    const int from = (rank + kRanks - 1) % kRanks;
    for (uint32_t round = 1; round <= kRounds; ++round) {
      const char* data =
          reinterpret_cast<const char*>(source.data()) + (round - 1) * kPieces * kPieceBytes;
      std::vector<CopyBlock> blocks;
      for (int64_t p = 0; p < kPieces; ++p) {
        blocks.push_back({at(window(rank).peer(to), rank) + p * kPieceBytes, data + p * kPieceBytes,
                          1, kPieceBytes, 0, 0});
      }
      ASSERT_TRUE(f.wait(0, word_at(window(rank).own(), 16 + to), round - 1, guard_of())
                      .is_ok());  // credit
      ASSERT_TRUE(f.copy(0, blocks.data(), kPieces).is_ok());
      ASSERT_TRUE(f.signal(0, word_at(window(rank).peer(to), rank), round).is_ok());
      ASSERT_TRUE(f.wait(1, word_at(window(rank).own(), from), round, guard_of()).is_ok());
      const CopyBlock out = {
          reinterpret_cast<char*>(result.data()) + (round - 1) * kPieces * kPieceBytes,
          at(window(rank).own(), from),
          1,
          kPieces * kPieceBytes,
          0,
          0};
      ASSERT_TRUE(f.copy(1, &out, 1).is_ok());
      ASSERT_TRUE(f.signal(1, word_at(window(rank).peer(from), 16 + rank), round).is_ok());
    }
    EXPECT_TRUE(becomes_true([&] { return f.is_drained(); }));
    std::atomic<bool> passed{false};
    ASSERT_TRUE(f.mark(1, [&](bool) { passed = true; }).is_ok());
    EXPECT_TRUE(becomes_true([&] { return passed.load(); }));
  });
  EXPECT_EQ(driver_.synchronisations(), before);
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(results[static_cast<size_t>(rank)],
              sources[static_cast<size_t>((rank + kRanks - 1) % kRanks)]);
  }
  EXPECT_EQ(driver_.batches(),
            static_cast<uint64_t>(kRanks) * kRounds * 2);  // 128 + 22 pieces
  EXPECT_GE(driver_.memsets_of_one_word(), static_cast<uint64_t>(kRanks) * kRounds);  // credits
}

// A few small copies go by the copy engine, thousands by a few launches; large ones never do.
TEST_F(CudaFabricTest, ThousandsOfSmallCopiesAreAKernels) {
  connect_all(2);
  make_windows(8 << 20);
  constexpr int kPieces = 2000;
  std::vector<char> source(static_cast<size_t>(kPieces) * 64 + (1 << 20));
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<char>(i * 7);
  const auto push = [&](int pieces, bool large) {
    std::vector<CopyBlock> blocks;
    auto* peer = static_cast<char*>(window(0).peer(1));
    for (int p = 0; p < pieces; ++p)
      blocks.push_back({peer + 4096 + p * 64, source.data() + p * 64, 1, 61, 0, 0});
    if (large) blocks.push_back({peer + (1 << 20), source.data() + kPieces * 64, 1, 1 << 20, 0, 0});
    ASSERT_TRUE(fabric(0).copy(0, blocks.data(), static_cast<int>(blocks.size())).is_ok());
  };
  uint64_t launches = driver_.launches();
  push(200, false);
  EXPECT_EQ(driver_.launches(), launches);
  const uint64_t copies = driver_.copies();
  push(kPieces, true);
  EXPECT_EQ(driver_.copies(), copies + 1);  // the large one
  EXPECT_GT(driver_.launches(), launches);
  EXPECT_LE(driver_.launches(), launches + 8);
  ASSERT_TRUE(fabric(0).signal(0, word_at(window(0).peer(1), 1), 1).is_ok());
  ASSERT_TRUE(fabric(1).wait(0, word_at(window(1).own(), 1), 1, guard_of()).is_ok());
  EXPECT_TRUE(becomes_true([&] { return fabric(1).is_drained(); }));
  const auto* own = static_cast<const char*>(window(1).own());
  for (int p = 0; p < kPieces; ++p)
    ASSERT_EQ(std::memcmp(own + 4096 + p * 64, source.data() + p * 64, 61), 0) << p;
  EXPECT_EQ(std::memcmp(own + (1 << 20), source.data() + kPieces * 64, 1 << 20), 0);
}

// On the own GPU a copy needs SMs in any case, and costs microseconds of them: pieces of half a
// megabyte go by kernel there, by copy engine elsewhere. A few large ones stay copies.
TEST_F(CudaFabricTest, ManyPiecesForARankOnTheOwnGpuAreAKernels) {
  for (const bool same_gpu : {true, false}) {
    driver_.devices = same_gpu ? 1 : 2;
    connect_all(2);
    constexpr int64_t kPiece = 512 << 10;
    constexpr int kPieces = 60;
    make_windows(kPieces * kPiece + kPiece);
    std::vector<char> source(static_cast<size_t>(kPieces * kPiece));
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<char>(i * 7 + i / kPiece);
    auto* peer = static_cast<char*>(window(0).peer(1)) + kPiece;
    const auto push = [&](int pieces) {
      std::vector<CopyBlock> blocks;
      for (int p = 0; p < pieces; ++p)
        blocks.push_back({peer + p * kPiece, source.data() + p * kPiece, 1, kPiece, 0, 0});
      const uint64_t before = driver_.launches();
      EXPECT_TRUE(fabric(0).copy(0, blocks.data(), pieces).is_ok());
      return driver_.launches() - before;
    };
    EXPECT_EQ(push(9), 0u);
    EXPECT_EQ(push(kPieces), same_gpu ? 1u : 0u);
    ASSERT_TRUE(fabric(0).signal(0, word_at(window(0).peer(1), 1), 1).is_ok());
    ASSERT_TRUE(fabric(1).wait(0, word_at(window(1).own(), 1), 1, guard_of()).is_ok());
    EXPECT_TRUE(becomes_true([&] { return fabric(1).is_drained(); }));
    EXPECT_EQ(
        std::memcmp(static_cast<char*>(window(1).own()) + kPiece, source.data(), source.size()), 0);
    TearDown();
  }
}

TEST_F(CudaFabricTest, BulkIsCutSoThatOthersGetIn) {
  connect_all(2);
  constexpr int64_t kBytes = 3 * cuda::kBulkBytes + 4096;
  make_windows(kBytes);
  std::vector<char> source(kBytes, 5);
  const CopyBlock block = {window(0).peer(1), source.data(), 1, kBytes, 0, 0};
  const uint64_t before = driver_.copies();
  ASSERT_TRUE(fabric(0).copy(0, &block, 1).is_ok());
  EXPECT_EQ(driver_.copies() - before, 4u);
  std::atomic<bool> passed{false};
  ASSERT_TRUE(fabric(0).mark(0, [&](bool) { passed = true; }).is_ok());
  ASSERT_TRUE(becomes_true([&] { return passed.load(); }));
  EXPECT_EQ(std::memcmp(window(1).own(), source.data(), kBytes), 0);
}

TEST_F(CudaFabricTest, RectanglesSumsAndCastsReachTheirPlaces) {
  connect_all(2);
  make_windows(1 << 16);
  std::vector<uint16_t> rows(64 * 40);
  for (size_t i = 0; i < rows.size(); ++i)
    rows[i] = static_cast<uint16_t>(0x3f80 + i % 100);  // bf16, 1 and above
  const CopyBlock pushed = {
      window(0).peer(1), rows.data(), 40, 64, 64, 128};  // the left half of each row
  ASSERT_TRUE(fabric(0).copy(0, &pushed, 1).is_ok());
  ASSERT_TRUE(fabric(0).signal(0, word_at(window(0).peer(1), 900), 1).is_ok());
  ASSERT_TRUE(fabric(1).wait(2, word_at(window(1).own(), 900), 1, guard_of()).is_ok());
  std::vector<float> sum(32 * 40 + 8, -1.0f);
  AccumulateBlock block;
  block.slices = {window(1).own(), window(1).own(), rows.data()};
  block.output = sum.data();
  block.numel = 32 * 40;
  block.pad_numel = 8;
  block.slice_dtype = DType::kBFloat16;
  AccumulateOptions options;
  options.scale = 0.5;
  ASSERT_TRUE(fabric(1).accumulate(2, &block, 1, options).is_ok());
  std::vector<uint16_t> narrow(sum.size());
  const CastBlock cast = {narrow.data(), sum.data(), static_cast<int64_t>(sum.size()),
                          DType::kBFloat16, DType::kFloat32};
  ASSERT_TRUE(fabric(1).cast(2, &cast, 1).is_ok());
  // Both sides: what orders the push before the sum is a word in shared memory, which a race
  // detector does not follow from one mapping to the other.
  std::atomic<int> passed{0};
  ASSERT_TRUE(fabric(0).mark(0, [&](bool) { ++passed; }).is_ok());
  ASSERT_TRUE(fabric(1).mark(2, [&](bool) { ++passed; }).is_ok());
  ASSERT_TRUE(becomes_true([&] { return passed.load() == 2; }));
  const auto value = [&](size_t i) {
    const uint32_t bits = static_cast<uint32_t>(rows[i]) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  };
  for (size_t row = 0; row < 40; ++row) {
    for (size_t i = 0; i < 32; ++i) {
      const float pushed_value = value(row * 64 + i);
      EXPECT_EQ(sum[row * 32 + i], (pushed_value + pushed_value + value(row * 32 + i)) * 0.5f);
    }
  }
  for (size_t i = 1280; i < sum.size(); ++i) EXPECT_EQ(sum[i], 0.0f);
  EXPECT_EQ(narrow[0], 0x3fc0);  // (1 + 1 + 1) / 2
}

TEST_F(CudaFabricTest, DeadlineRunsFromReachingTheWaitAndReleasesByPoison) {
  connect_all(2);
  make_windows(8192);
  std::atomic<int> failures{0};
  Status heard;
  fabric(0).on_wait_failure([&](const Status& status) {
    heard = status;
    ++failures;
  });
  // Queue 1's wait stands behind queue 1's first wait, which a signal ends after longer than the
  // second's deadline.
  ASSERT_TRUE(fabric(0).wait(1, word_at(window(0).own(), 1), 1, guard_of()).is_ok());
  WaitGuard guard = guard_of(milliseconds(250));
  guard.what = "arrival from rank 1";
  ASSERT_TRUE(fabric(0).wait(1, word_at(window(0).own(), 2), 7, guard).is_ok());
  std::this_thread::sleep_for(milliseconds(400));
  EXPECT_EQ(failures, 0);
  ASSERT_TRUE(fabric(1).signal(0, word_at(window(1).peer(0), 1), 1).is_ok());
  ASSERT_TRUE(becomes_true([&] { return failures.load() == 1; }));
  EXPECT_EQ(heard.kind(), ErrorKind::kTimeout);
  EXPECT_THAT(heard.message(), HasSubstr("rank 0 of group 'test'"));
  EXPECT_THAT(heard.message(), HasSubstr("arrival from rank 1"));
  EXPECT_TRUE(becomes_true([&] { return fabric(0).is_drained(); }));
  EXPECT_EQ(*word_at(window(0).own(), 2), 7 + (1u << 30));
  EXPECT_EQ(fabric(0).wait(1, word_at(window(0).own(), 3), 1, guard_of()).kind(),
            ErrorKind::kPeerLost);
}

TEST_F(CudaFabricTest, FailureReleasesEveryQueueAlsoWherePeersOverwriteThePoison) {
  connect_all(2);
  make_windows(8192);
  std::atomic<bool> failed{false};
  std::vector<float> slice(1000, 1.0f), output(1000, 0.0f);
  for (int queue = 0; queue < 8; ++queue) {
    for (uint32_t step = 1; step <= 20; ++step) {
      WaitGuard guard = guard_of();
      guard.failed = &failed;
      ASSERT_TRUE(
          fabric(0).wait(queue, word_at(window(0).own(), 8 + queue), 1000 * step, guard).is_ok());
    }
  }
  AccumulateBlock block;
  block.slices = {slice.data()};
  block.output = output.data();
  block.numel = 1000;
  ASSERT_TRUE(fabric(0).accumulate(7, &block, 1, {}).is_ok());
  std::atomic<bool> stop{false};
  std::thread peer([&] {  // counts on as if nothing had happened
    for (uint32_t value = 1; !stop; ++value) {
      for (int queue = 0; queue < 8; ++queue)
        (void)fabric(1).signal(0, word_at(window(1).peer(0), 8 + queue), value % 900);
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  failed = true;
  fabric(0).wake_all();
  EXPECT_TRUE(becomes_true([&] { return fabric(0).is_drained(); }, seconds(60)));
  stop = true;
  peer.join();
  const DriverApi api = driver_.api(0);
  auto* stream = static_cast<cuda::Stream>(fabric(0).stream(7));
  ASSERT_TRUE(becomes_true([&] { return api.stream_query(stream) == cuda::kSuccess; }));
  for (float value : output) EXPECT_TRUE(value != value);  // a sum behind poison is NaN
}

TEST_F(CudaFabricTest, APeersEndIsSeenByTheGuardsCheck) {
  connect_all(2);
  make_windows(8192);
  std::atomic<int> failures{0};
  Status heard;
  fabric(0).on_wait_failure([&](const Status& status) {
    heard = status;
    ++failures;
  });
  WaitGuard guard = guard_of();
  guard.check = [&] { return fabric(0).peer_status(1); };
  ASSERT_TRUE(fabric(0).wait(3, word_at(window(0).own(), 2), 1, guard).is_ok());
  fabric(1).fail({ErrorKind::kCuda, "its GPU is gone"});
  ASSERT_TRUE(becomes_true([&] { return failures.load() == 1; }));
  EXPECT_EQ(heard.kind(), ErrorKind::kPeerLost);
  EXPECT_THAT(heard.message(), HasSubstr("its GPU is gone"));
  EXPECT_TRUE(becomes_true([&] { return fabric(0).is_drained(); }));
}

TEST_F(CudaFabricTest, CloseEndsAQueueThatNobodyReleases) {
  connect_all(2);
  make_windows(8192);
  ASSERT_TRUE(fabric(0).wait(0, word_at(window(0).own(), 2), 1, guard_of(seconds(600))).is_ok());
  const Deadline begin = Clock::now();
  fabric(0).close();
  EXPECT_LT(Clock::now() - begin, seconds(10));
  EXPECT_EQ(*word_at(window(0).own(), 2), 1 + (1u << 30));
}

TEST_F(CudaFabricTest, StreamsAreOrderedByEvents) {
  connect_all(1);
  make_windows(8192);
  const DriverApi api = driver_.api(0);
  ASSERT_EQ(api.context_set_current(reinterpret_cast<cuda::Context>(1)), cuda::kSuccess);
  cuda::Stream user = nullptr;
  ASSERT_EQ(api.stream_create(&user, cuda::kStreamNonBlocking, 0), cuda::kSuccess);
  uint32_t* gate = word_at(window(0).own(), 1);
  api.wait_value(user, reinterpret_cast<cuda::DevicePointer>(gate), 1, cuda::kWaitReached);
  auto point = fabric(0).point_of_stream(user);
  ASSERT_TRUE(point.is_ok());
  ASSERT_TRUE(fabric(0).wait_for_point(2, *point.value()).is_ok());
  std::atomic<bool> passed{false};
  ASSERT_TRUE(fabric(0).mark(2, [&](bool) { passed = true; }).is_ok());
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_FALSE(passed);
  ASSERT_TRUE(fabric(0).signal(0, gate, 1).is_ok());
  EXPECT_TRUE(becomes_true([&] { return passed.load(); }));
  auto behind = fabric(0).point_of_queue(2);
  ASSERT_TRUE(behind.is_ok());
  ASSERT_TRUE(behind.value()->release(user).is_ok());
  EXPECT_TRUE(becomes_true([&] { return api.stream_query(user) == cuda::kSuccess; }));
  api.stream_destroy(user);
}

// Reasons: any one rank's is everybody's, and nothing is left behind.
class CudaFabricReasonTest : public CudaFabricTest {
 protected:
  void expect_reason(const std::string& reason) {
    for (const Status& answer : answers_) EXPECT_THAT(answer.to_string(), HasSubstr(reason));
    for (const auto& f : fabrics_) EXPECT_EQ(f, nullptr);
    EXPECT_EQ(driver_.live_objects(), 0);
  }
};

TEST_F(CudaFabricReasonTest, EverySetUpCallMayFailOnOneRank) {
  using Break = std::function<void(DriverApi&)>;
  const std::vector<std::pair<std::string, Break>> breaks = {
      {"cuDeviceGet",
       [](DriverApi& a) { a.device = [](cuda::Device*, int) { return cuda::kInvalidDevice; }; }},
      {"cuDevicePrimaryCtxRetain",
       [](DriverApi& a) {
         a.primary_context_retain = [](cuda::Context*, cuda::Device) { return cuda::kOutOfMemory; };
       }},
      {"cannot share its memory",
       [](DriverApi& a) {
         a.device_attribute = [](int* v, int, cuda::Device) {
           *v = 0;
           return cuda::kSuccess;
         };
       }},
      {"no code for this GPU",
       [](DriverApi& a) {
         a.module_load = [](cuda::Module*, const void*) { return cuda::kNoBinaryForGpu; };
       }},
      {"cuModuleGetFunction",
       [](DriverApi& a) {
         a.module_function = [](cuda::Function*, cuda::Module, const char*) {
           return cuda::kNotFound;
         };
       }},
      {"cuMemCreate",
       [](DriverApi& a) {
         a.memory_create = [](cuda::AllocationHandle*, size_t, const cuda::AllocationProperties*,
                              unsigned long long) { return cuda::kOutOfMemory; };
       }},
      {"cuMemHostAlloc",
       [](DriverApi& a) {
         a.host_allocate = [](void**, size_t, unsigned) { return cuda::kOutOfMemory; };
       }},
      {"cuStreamCreateWithPriority",
       [](DriverApi& a) {
         a.stream_create = [](cuda::Stream*, unsigned, int) { return cuda::kOutOfMemory; };
       }},
  };
  for (const auto& [reason, break_it] : breaks) {
    connect(3, [&](int rank, CudaFabricOptions& options) {
      options.host.group = reason;
      if (rank != 1) return;
      DriverApi api = options.api.value();
      break_it(api);
      options.api = api;
    });
    SCOPED_TRACE(reason);
    expect_reason(reason);
    expect_reason("rank 1");
  }
}

TEST_F(CudaFabricReasonTest, NoDriverNoKernelsNoPeerAccess) {
  connect(2, [](int rank, CudaFabricOptions& o) {
    o.host.group = "a";
    if (rank == 0) o.api = Status(ErrorKind::kUnsupported, "no CUDA driver on this machine");
  });
  expect_reason("no CUDA driver");
  connect(2, [](int rank, CudaFabricOptions& o) {
    o.host.group = "b";
    if (rank == 1) o.images = Status(ErrorKind::kUnsupported, "this build has no CUDA kernels");
  });
  expect_reason("no CUDA kernels");
  driver_.peer_access = false;
  connect(2, [](int, CudaFabricOptions& o) { o.host.group = "c"; });
  expect_reason("no peer access");
}

TEST_F(CudaFabricReasonTest, TooFewConnections) {
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  connect(2);
  ::unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  expect_reason("CUDA_DEVICE_MAX_CONNECTIONS=1");
}

TEST_F(CudaFabricReasonTest, MigInstancesOfOneMachineDoNotReachEachOther) {
  connect(2, [](int, CudaFabricOptions& o) {
    DriverApi api = o.api.value();
    api.device_name = [](char* name, int, cuda::Device) {
      std::strcpy(name, "NVIDIA H200 MIG 1g.18gb");
      return cuda::kSuccess;
    };
    o.api = api;
  });
  expect_reason("MIG instance");
}

// Before a rank says that it has no memory, what its process keeps in reserve is let go of, once.
TEST_F(CudaFabricTest, RoomIsMadeOnceBeforeAWindowIsRefused) {
  std::atomic<int> asked{0};
  std::atomic<int> short_of{0};  // tries that find too little memory
  connect(2, [&](int rank, CudaFabricOptions& options) {
    if (rank != 1) return;
    DriverApi api = options.api.value();
    api.memory_create = [&, whole = api](cuda::AllocationHandle* h, size_t b,
                                         const cuda::AllocationProperties* p,
                                         unsigned long long f) {
      return short_of > 0 ? (--short_of, cuda::kOutOfMemory) : whole.memory_create(h, b, p, f);
    };
    options.api = api;
    options.make_room = [&asked] { ++asked; };
  });
  const auto create = [&](bool succeeds) {
    on_each(2, [&](int rank) {
      EXPECT_EQ(fabric(rank).create_window(4096, soon()).is_ok(), succeeds) << rank;
    });
  };
  create(true);
  EXPECT_EQ(asked, 0);
  short_of = 1;
  create(true);
  EXPECT_EQ(asked, 1);
  short_of = 2;
  create(false);
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(short_of, 0);
  create(true);
}

TEST_F(CudaFabricTest, AWindowRefusedOnOneRankIsRefusedOnAllAndTheFabricGoesOn) {
  std::atomic<int> broken{0};  // 1: create, 2: export, 3: import, 4: map, 5: access
  connect(3, [&](int rank, CudaFabricOptions& options) {
    if (rank != 2) return;
    DriverApi api = options.api.value();
    const DriverApi whole = api;
    api.memory_create = [&, whole](cuda::AllocationHandle* h, size_t b,
                                   const cuda::AllocationProperties* p, unsigned long long f) {
      return broken == 1 ? cuda::kOutOfMemory : whole.memory_create(h, b, p, f);
    };
    api.memory_export = [&, whole](void* d, cuda::AllocationHandle h, int t, unsigned long long f) {
      return broken == 2 ? cuda::kNotSupported : whole.memory_export(d, h, t, f);
    };
    api.memory_import = [&, whole](cuda::AllocationHandle* h, void* d, int t) {
      return broken == 3 ? cuda::kInvalidValue : whole.memory_import(h, d, t);
    };
    api.memory_map = [&, whole](cuda::DevicePointer a, size_t b, size_t o, cuda::AllocationHandle h,
                                unsigned long long f) {
      return broken == 4 ? cuda::kOutOfMemory : whole.memory_map(a, b, o, h, f);
    };
    api.memory_set_access = [&, whole](cuda::DevicePointer a, size_t b,
                                       const cuda::AccessDescriptor* d, size_t n) {
      return broken == 5 ? cuda::kInvalidValue : whole.memory_set_access(a, b, d, n);
    };
    options.api = api;
  });
  for (const Status& answer : answers_) ASSERT_TRUE(answer.is_ok()) << answer.to_string();
  const int objects = driver_.live_objects();
  for (int stage = 1; stage <= 5; ++stage) {
    broken = stage;
    on_each(3, [&](int rank) {
      auto made = fabric(rank).create_window(4096, soon());
      EXPECT_FALSE(made.is_ok());
      EXPECT_THAT(made.status().to_string(), HasSubstr("rank 2"));
    });
    EXPECT_EQ(driver_.live_objects(), objects) << "stage " << stage;
  }
  broken = 0;
  make_windows(4096);
}

}  // namespace
}  // namespace tide
