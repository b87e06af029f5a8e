// The CUDA fabric on a GPU: ranks are processes that share GPU 0 (or use one each where there are
// several). The parent never touches CUDA, so that its children may.
#include "transports/cuda/cuda_fabric.h"

#include <gmock/gmock.h>

#include <random>

#include "kernels/accumulate.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/ranks/host_fabric_ranks.h"

namespace tide::cuda {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::guard_of;
using test::on_ranks;
using test::within;
using test::word_at;
using testing::HasSubstr;

bool has_gpu() { return ::access("/dev/nvidiactl", F_OK) == 0; }

template <class Condition>
bool becomes_true(Condition condition, seconds time = seconds(30)) {
  const Deadline deadline = within(time);
  while (!condition()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

// One rank: its context is current on the thread that made it.
struct Rank {
  DriverApi api;
  std::unique_ptr<CudaFabric> fabric;
  std::shared_ptr<Window> window;

  Rank(int rank, int size, KeyValueStore& store, int64_t window_bytes,
       const std::string& group = "test") {
    const auto& loaded = driver();
    EXPECT_TRUE(loaded.is_ok()) << loaded.status().to_string();
    if (!loaded) return;
    api = loaded.value();
    int devices = 1;
    api.device_count(&devices);
    CudaFabricOptions options;
    options.host.rank = rank;
    options.host.size = size;
    options.host.group = group;
    options.host.deadline = within(seconds(60));
    options.device = rank % devices;
    options.api = loaded;
    options.images = kernel_images();
    Context context = nullptr;
    TIDE_EXPECT_CUDA(api.primary_context_retain(&context, options.device));
    TIDE_EXPECT_CUDA(api.context_set_current(context));
    auto made = connect_cuda_fabric(options, store);
    EXPECT_TRUE(made.is_ok()) << made.status().to_string();
    if (!made) return;
    fabric = std::move(made.value());
    auto w = fabric->create_window(window_bytes, within(seconds(60)));
    EXPECT_TRUE(w.is_ok()) << w.status().to_string();
    if (w) window = w.value();
  }
  uint32_t* own(int64_t index) const { return word_at(window->own(), index); }
  uint32_t* at(int peer, int64_t index) const { return word_at(window->peer(peer), index); }
  void finish(int queue) const {
    std::atomic<bool> passed{false};
    ASSERT_TRUE(fabric->mark(queue, [&](bool) { passed = true; }).is_ok());
    ASSERT_TRUE(becomes_true([&] { return passed.load(); }));
  }
};

class CudaFabricOnGpu : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "no GPU on this machine";
  }
};

class CudaFabricOnOneGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "no GPU on this machine";
  }
};

// A ring: every round pushes new bytes in many pieces, rows and one bulk piece; the receiver moves
// them on as soon as they are signalled. Early or late signals show as wrong bytes.
TEST_P(CudaFabricOnGpu, DataComesBeforeItsSignal) {
  const int ranks = GetParam();
  on_ranks(ranks, [ranks](int rank, KeyValueStore& store) {
    constexpr int kRounds = 60;
    constexpr int64_t kPieces = 200, kPieceBytes = 1016, kRows = 64, kRowBytes = 512,
                      kBulk = 3 << 20;
    constexpr int64_t kRoundBytes = kPieces * kPieceBytes + kRows * kRowBytes + kBulk;
    constexpr int64_t kAt = 1 << 16;
    Rank r(rank, ranks, store, kAt + kRoundBytes * 2);
    if (!r.window) return;
    DeviceBytes source(kRoundBytes * kRounds), result(kRoundBytes * kRounds);
    const auto bytes_of = [&](int from) {
      std::mt19937_64 random(static_cast<uint64_t>(from) + 1);
      std::vector<uint64_t> words(kRoundBytes * kRounds / 8);
      for (uint64_t& word : words) word = random();
      return words;
    };
    source.write(bytes_of(rank).data());
    const int to = (rank + 1) % ranks, from = (rank + ranks - 1) % ranks;
    for (uint32_t round = 1; round <= kRounds; ++round) {
      const char* data = source.get() + (round - 1) * kRoundBytes;
      char* slot = static_cast<char*>(r.window->peer(to)) + kAt + (round % 2) * kRoundBytes;
      std::vector<CopyBlock> blocks;
      for (int64_t p = 0; p < kPieces; ++p) {
        blocks.push_back({slot + p * kPieceBytes, data + p * kPieceBytes, 1, kPieceBytes, 0, 0});
      }
      const int64_t rows = kPieces * kPieceBytes;
      blocks.push_back(
          {slot + rows, data + rows, kRows / 2, kRowBytes, 2 * kRowBytes, 2 * kRowBytes});
      blocks.push_back({slot + rows + kRowBytes, data + rows + kRowBytes, kRows / 2, kRowBytes,
                        2 * kRowBytes, 2 * kRowBytes});
      blocks.push_back(
          {slot + rows + kRows * kRowBytes, data + rows + kRows * kRowBytes, 1, kBulk, 0, 0});
      ASSERT_TRUE(r.fabric->wait(0, r.own(32 + to), round - 2 + (round == 1), guard_of())
                      .is_ok());  // the slot is free
      ASSERT_TRUE(r.fabric->copy(0, blocks.data(), static_cast<int>(blocks.size())).is_ok());
      ASSERT_TRUE(r.fabric->signal(0, r.at(to, rank), round).is_ok());
      ASSERT_TRUE(r.fabric->wait(1, r.own(from), round, guard_of()).is_ok());
      const CopyBlock out = {result.get() + (round - 1) * kRoundBytes,
                             static_cast<char*>(r.window->own()) + kAt + (round % 2) * kRoundBytes,
                             1,
                             kRoundBytes,
                             0,
                             0};
      ASSERT_TRUE(r.fabric->copy(1, &out, 1).is_ok());
      ASSERT_TRUE(r.fabric->signal(1, r.at(from, 32 + rank), round).is_ok());
    }
    r.finish(1);
    const std::vector<std::byte> got = result.read();
    EXPECT_EQ(std::memcmp(got.data(), bytes_of(from).data(), got.size()), 0);
    r.fabric->close();
  });
}

TEST_P(CudaFabricOnGpu, AReduceOfAllRanksIsTheProcessorsBitForBit) {
  const int ranks = GetParam();
  on_ranks(ranks, [ranks](int rank, KeyValueStore& store) {
    constexpr int64_t kNumel = 300007;  // of a shard, bf16
    constexpr int64_t kSlice = (kNumel * 2 + 63) / 64 * 64;
    constexpr int64_t kAt = 1 << 16;
    Rank r(rank, ranks, store, kAt + kSlice * ranks);
    if (!r.window) return;
    const auto gradient_of = [&](int owner) {
      std::mt19937_64 random(static_cast<uint64_t>(owner) + 11);
      std::vector<uint16_t> values(static_cast<size_t>(kNumel * ranks));
      for (uint16_t& value : values)
        value = static_cast<uint16_t>(0x3c00 + random() % 0x800 + (random() % 2) * 0x8000);
      return values;
    };
    const std::vector<uint16_t> gradient = gradient_of(rank);
    DeviceBytes device_gradient(gradient.size() * 2), shard(kNumel * 4);
    device_gradient.write(gradient.data());
    for (int k = 1; k < ranks; ++k) {
      const int owner = (rank + k) % ranks;
      const CopyBlock block = {static_cast<char*>(r.window->peer(owner)) + kAt + rank * kSlice,
                               device_gradient.get() + owner * kNumel * 2,
                               1,
                               kNumel * 2,
                               0,
                               0};
      ASSERT_TRUE(r.fabric->copy(2, &block, 1).is_ok());
      ASSERT_TRUE(r.fabric->signal(2, r.at(owner, rank), 1).is_ok());
    }
    AccumulateBlock sum;
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer != rank) {
        ASSERT_TRUE(r.fabric->wait(3, r.own(peer), 1, guard_of()).is_ok());
      }
      const char* slice = static_cast<char*>(r.window->own()) + kAt + peer * kSlice;
      sum.slices.push_back(peer == rank ? device_gradient.get() + rank * kNumel * 2 : slice);
    }
    sum.output = shard.get();
    sum.numel = kNumel;
    sum.slice_dtype = DType::kBFloat16;
    AccumulateOptions options;
    options.scale = 1.0 / ranks;
    ASSERT_TRUE(r.fabric->accumulate(3, &sum, 1, options).is_ok());
    r.finish(3);
    std::vector<std::vector<uint16_t>> all;
    for (int peer = 0; peer < ranks; ++peer) all.push_back(gradient_of(peer));
    std::vector<float> expected(kNumel);
    AccumulateBlock twin = sum;
    for (int peer = 0; peer < ranks; ++peer)
      twin.slices[static_cast<size_t>(peer)] =
          all[static_cast<size_t>(peer)].data() + rank * kNumel;
    twin.output = expected.data();
    ASSERT_TRUE(accumulate_block(twin, options).is_ok());
    EXPECT_EQ(std::memcmp(shard.read().data(), expected.data(), expected.size() * 4), 0);
    r.fabric->close();
  });
}

// The user's thread sits in the driver's free (which waits for the device) while a stream waits for
// a peer that never signals: poison must release both.
TEST_F(CudaFabricOnOneGpu, PoisonReleasesAThreadThatSitsInFree) {
  on_ranks(2, [](int rank, KeyValueStore& store) {
    Rank r(rank, 2, store, 1 << 16);
    if (!r.window) return;
    if (rank == 1) {
      ASSERT_TRUE(becomes_true([&] { return !r.fabric->peer_status(0).is_ok(); }));
      r.fabric->close();
      return;
    }
    std::atomic<int> failures{0};
    Status heard;
    r.fabric->on_wait_failure([&](const Status& status) {
      heard = status;
      ++failures;
    });
    DevicePointer memory = 0;
    TIDE_EXPECT_CUDA(TestCalls::get().allocate(&memory, 1 << 20));
    ASSERT_TRUE(r.fabric->wait(0, r.own(5), 1, guard_of(milliseconds(1500))).is_ok());
    const Deadline begin = Clock::now();
    TIDE_EXPECT_CUDA(TestCalls::get().free(memory));
    const auto sat = std::chrono::duration_cast<milliseconds>(Clock::now() - begin).count();
    std::printf("freed after %ld ms\n", static_cast<long>(sat));
    EXPECT_TRUE(becomes_true([&] { return failures.load() == 1 && r.fabric->is_drained(); }));
    EXPECT_EQ(heard.kind(), ErrorKind::kTimeout);
    r.fabric->fail(heard);
    r.fabric->close();
  });
}

TEST_F(CudaFabricOnOneGpu, SurvivorsOfAKillAreReleasedAndANewGroupWorks) {
  test::FileStore store;
  test::Processes processes;
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(processes.start("rank " + std::to_string(rank), [&, rank] {
      {
        Rank r(rank, 3, store, 1 << 16);
        if (!r.window) return;
        std::atomic<int> failures{0};
        r.fabric->on_wait_failure([&](const Status&) { ++failures; });
        WaitGuard guard = guard_of(seconds(60));
        guard.check = [&] { return r.fabric->peer_status(2); };
        ASSERT_TRUE(r.fabric->wait(0, r.own(2), 1, guard).is_ok());
        if (rank == 2) {
          std::this_thread::sleep_for(milliseconds(300));
          ::kill(::getpid(), SIGKILL);
        }
        EXPECT_TRUE(becomes_true([&] { return failures.load() == 1 && r.fabric->is_drained(); }));
        r.fabric->close();
      }
      Rank again(rank, 2, store, 1 << 16, "again");
      if (!again.window) return;
      ASSERT_TRUE(again.fabric->signal(0, again.at(1 - rank, 1), 1).is_ok());
      ASSERT_TRUE(again.fabric->wait(0, again.own(1), 1, guard_of()).is_ok());
      again.finish(0);
      again.fabric->close();
    }));
  }
  const int status = processes.end_of(ranks[2]);
  EXPECT_TRUE(WIFSIGNALED(status));
  processes.expect_success(ranks[0]);
  processes.expect_success(ranks[1]);
}

TEST_F(CudaFabricOnOneGpu, OneHardwareConnectionIsAReasonOnAllRanks) {
  on_ranks(2, [](int rank, KeyValueStore& store) {
    if (rank == 1) ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
    CudaFabricOptions options;
    options.host.rank = rank;
    options.host.size = 2;
    options.host.group = "test";
    options.host.deadline = within(seconds(60));
    options.api = driver();
    options.images = kernel_images();
    auto made = connect_cuda_fabric(options, store);
    EXPECT_THAT(made.status().to_string(), HasSubstr("rank 1"));
    EXPECT_THAT(made.status().to_string(), HasSubstr("CUDA_DEVICE_MAX_CONNECTIONS=1"));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaFabricOnGpu, testing::Values(2, 4, 8));

}  // namespace
}  // namespace tide::cuda
