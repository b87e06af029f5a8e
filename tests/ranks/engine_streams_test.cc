// The order between a group's operations and its caller's streams, over the CUDA fabric with a
// driver in ordinary memory: streams are held by words that the test sets.
#include "tests/ranks/engine_world.h"
#include "tests/unit/cuda_driver_fake.h"
#include "transports/cuda/cuda_fabric.h"

namespace tide::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kRanks = 2;
constexpr int64_t kShard = 500;

// One rank: its group, a stream of its own, and a word that holds the stream once hold() was
// called.
class Rank {
 public:
  Rank(cuda::FakeDriver& driver, KeyValueStore& store, std::shared_ptr<KeyValueStore> votes,
       int rank)
      : api_(driver.api(rank)) {
    CudaFabricOptions options;
    options.host.rank = rank;
    options.host.size = kRanks;
    options.host.group = "test";
    options.host.deadline = Clock::now() + 60s;
    options.api = api_;
    options.images = cuda::FakeDriver::images();
    auto fabric = connect_cuda_fabric(options, store);
    EXPECT_TRUE(fabric.is_ok()) << fabric.status().to_string();
    auto made = Group::create({.name = "test", .timeout = 60s}, std::move(fabric.value()), votes);
    EXPECT_TRUE(made.is_ok()) << made.status().to_string();
    group = made.value();
    api_.context_set_current(reinterpret_cast<cuda::Context>(1));
    api_.stream_create(&stream_, cuda::kStreamNonBlocking, 0);
  }
  ~Rank() {
    group->close();
    api_.stream_destroy(stream_);
  }

  void* stream() { return stream_; }
  void hold() {
    ++held_;
    api_.wait_value(stream_, reinterpret_cast<cuda::DevicePointer>(&gate_), held_,
                    cuda::kWaitReached);
  }
  void let_go() { __atomic_store_n(&gate_, held_, __ATOMIC_SEQ_CST); }
  // What the caller computes: a copy on its stream.
  void copy(void* to, const void* from, int64_t bytes) {
    api_.copy(reinterpret_cast<cuda::DevicePointer>(to),
              reinterpret_cast<cuda::DevicePointer>(from), static_cast<size_t>(bytes), stream_);
  }
  bool is_idle() { return api_.stream_query(stream_) == cuda::kSuccess; }
  void wait_idle() {
    while (!is_idle()) std::this_thread::sleep_for(1ms);
  }

  std::shared_ptr<Group> group;

 private:
  cuda::DriverApi api_;
  cuda::Stream stream_ = nullptr;
  alignas(64) uint32_t gate_ = 0;
  uint32_t held_ = 0;
};

void run_streams(const std::function<void(int, Rank&, cuda::FakeDriver&)>& body) {
  cuda::FakeDriver driver;
  driver.devices = 1;
  auto store = std::make_shared<MapStore>();
  std::vector<std::thread> threads;
  std::atomic<int> ended{0};
  for (int r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      Rank rank(driver, *store, store, r);
      body(r, rank, driver);
      // Closing synchronises: not while the other rank still counts.
      for (++ended; ended < kRanks;) std::this_thread::yield();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(driver.misuses(), "");
}

std::vector<PlanRequest> one_layer() {
  PlanRequest request;
  request.name = "layers.0";
  request.parameters = {{"w", DType::kFloat32, kShard, kRanks * kShard, 1, DType::kFloat32}};
  request.gradient_dtype = DType::kFloat32;
  return {request};
}

// The shard is written by the caller's stream just before the gather, and the gathered parameter is
// read by it just after: no host wait in between.
TEST(EngineStreams, AGatherStandsBetweenWhatWasAndWhatIsEnqueued) {
  run_streams([](int r, Rank& rank, cuda::FakeDriver& driver) {
    TIDE_ASSERT_OK(rank.group->plan(one_layer(), 1).status());
    std::vector<float> shard(kShard, -1.0f), seen(kRanks * kShard), source(kShard);
    const uint64_t synchronised = driver.synchronisations();
    for (int round = 0; round < 30; ++round) {
      std::fill(source.begin(), source.end(), static_cast<float>(100 * round + r));
      rank.hold();
      rank.copy(shard.data(), source.data(), kShard * 4);
      auto started = rank.group->gather({0, {shard.data()}, rank.stream()});
      TIDE_ASSERT_OK(started.status());
      TIDE_ASSERT_OK(started.value().operation->release(rank.stream()));
      rank.copy(seen.data(), started.value().places[0], kRanks * kShard * 4);
      TIDE_ASSERT_OK(rank.group->vacate(0, rank.stream()));
      std::this_thread::sleep_for(1ms);
      EXPECT_FALSE(started.value().operation->is_done());  // the stream is held before the shard
      rank.let_go();
      rank.wait_idle();
      for (int64_t i = 0; i < kRanks * kShard; ++i)
        ASSERT_EQ(seen[static_cast<size_t>(i)], 100 * round + i / kShard);
      TIDE_ASSERT_OK(started.value().operation->wait());
    }
    EXPECT_EQ(driver.synchronisations(), synchronised);
  });
}

// A caller that still reads the vacated slot keeps its next tenant out, on the stream alone.
TEST(EngineStreams, TheNextTenantWaitsForTheStreamThatVacated) {
  run_streams([](int r, Rank& rank, cuda::FakeDriver&) {
    auto requests = one_layer();
    requests[0].stays_unsharded = true;  // one slot of its own: the next gather gets it again
    requests[0].may_lease = false;
    TIDE_ASSERT_OK(rank.group->plan(requests, 0).status());
    std::vector<float> shard(kShard, static_cast<float>(r)), seen(kRanks * kShard);
    const std::vector<float> next(kShard, static_cast<float>(10 + r));
    auto first = rank.group->gather({0, {shard.data()}, nullptr});
    TIDE_ASSERT_OK(first.status());
    TIDE_ASSERT_OK(first.value().operation->release(rank.stream()));
    rank.hold();
    rank.copy(seen.data(), first.value().places[0], kRanks * kShard * 4);
    TIDE_ASSERT_OK(rank.group->vacate(0, rank.stream()));
    auto second = rank.group->gather({0, {next.data()}, nullptr});
    TIDE_ASSERT_OK(second.status());
    EXPECT_EQ(second.value().places[0], first.value().places[0]);
    std::this_thread::sleep_for(30ms);
    EXPECT_FALSE(second.value().operation->is_done());
    rank.let_go();
    TIDE_ASSERT_OK(second.value().operation->wait());
    rank.wait_idle();
    for (int64_t i = 0; i < kRanks * kShard; ++i)
      ASSERT_EQ(seen[static_cast<size_t>(i)], static_cast<float>(i / kShard));
    const auto* places = static_cast<const float*>(second.value().places[0]);
    for (int64_t i = 0; i < kRanks * kShard; ++i) ASSERT_EQ(places[i], 10.0f + i / kShard);
  });
}

// Gradients may be overwritten behind release_read, the output read behind release.
TEST(EngineStreams, AReduceFreesItsGradientsInStreamOrder) {
  for (const bool slot_reuse : {false, true}) {
    run_streams([slot_reuse](int r, Rank& rank, cuda::FakeDriver& driver) {
      TIDE_ASSERT_OK(rank.group->plan(one_layer(), 1).status());
      std::vector<float> shard(kShard), gradient(kRanks * kShard), output(kShard), seen(kShard);
      const std::vector<float> value(kRanks * kShard, 1.0f + r), ruin(kRanks * kShard, 1e30f);
      uint64_t synchronised = 0;
      for (int round = 0; round < 20; ++round) {
        if (round == 1) synchronised = driver.synchronisations();  // the first makes the area
        auto started = rank.group->gather({0, {shard.data()}, rank.stream()});
        TIDE_ASSERT_OK(started.status());
        TIDE_ASSERT_OK(started.value().operation->release(rank.stream()));
        TIDE_ASSERT_OK(rank.group->vacate(0, rank.stream()));
        rank.copy(gradient.data(), value.data(), kRanks * kShard * 4);
        ReduceCall call{
            0,  {0},        {DType::kFloat32}, {gradient.data()}, {output.data()}, DType::kFloat32,
            {}, slot_reuse, rank.stream()};
        auto operation = rank.group->reduce(call);
        TIDE_ASSERT_OK(operation.status());
        TIDE_ASSERT_OK(operation.value()->release_read(rank.stream()));
        rank.copy(gradient.data(), ruin.data(), kRanks * kShard * 4);
        TIDE_ASSERT_OK(operation.value()->release(rank.stream()));
        rank.copy(seen.data(), output.data(), kShard * 4);
        rank.wait_idle();
        for (const float sum : seen) ASSERT_EQ(sum, 3.0f);
      }
      // Both ranks are past their first round once one is past its last.
      EXPECT_EQ(driver.synchronisations(), synchronised);
    });
  }
}

TEST(EngineStreams, GradientsThatTheKernelsDoNotAddAreRefusedByVote) {
  run_streams([](int, Rank& rank, cuda::FakeDriver&) {
    auto requests = one_layer();
    requests[0].gradient_dtype = DType::kFloat64;
    auto answers = rank.group->plan(requests, 1);
    TIDE_ASSERT_OK(answers.status());
    EXPECT_FALSE(answers.value()[0].accepted);
    EXPECT_EQ(answers.value()[0].reason, "rank 0: gradients of fp64 cannot be summed on a GPU");
  });
}

TEST(EngineStreams, ARecordingStreamIsRefusedAndTheGroupGoesOn) {
  run_streams([](int, Rank& rank, cuda::FakeDriver& driver) {
    TIDE_ASSERT_OK(rank.group->plan(one_layer(), 1).status());
    const std::vector<float> shard(kShard);
    driver.capturing = true;
    EXPECT_THAT(rank.group->gather({0, {shard.data()}, rank.stream()}).status().message(),
                HasSubstr("records a CUDA graph"));
    // The other rank must have asked too.
    auto memory = rank.group->allocate(64);
    driver.capturing = false;
    TIDE_ASSERT_OK(memory.status());
    auto again = rank.group->allocate(64);
    TIDE_ASSERT_OK(again.status());
    auto started = rank.group->gather({0, {shard.data()}, rank.stream()});
    TIDE_ASSERT_OK(started.status());
    TIDE_ASSERT_OK(started.value().operation->wait());
  });
}

}  // namespace
}  // namespace tide::testing
