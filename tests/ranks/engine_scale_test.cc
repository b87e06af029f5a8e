// Many tensors, tensors past 2 GiB, cast groups, Slot-Reuse's promise, and what the counters say.
#include <sys/mman.h>
#include <unistd.h>

#include "backend/engine/control_page.h"
#include "tests/ranks/engine_numbers.h"

namespace tide::testing {
namespace {

using ::testing::HasSubstr;

TEST(EngineScale, ManyTensorsOfOddSizes) {
  for (const int tensors : {1000, kTableTensors + 500}) {  // the second: more than a table can post
    run_ranks(3, {}, [tensors](int rank, Group& group) {
      std::mt19937 random(5);
      auto layout = std::make_shared<GroupLayout>(
          random_parameters(random, 3, tensors, {DType::kFloat32}, 40), 3);
      auto memory = group.allocate(layout->slot_bytes());
      TIDE_ASSERT_OK(memory.status());
      std::vector<void*> outputs;
      for (int p = 0; p < tensors; ++p) {
        outputs.push_back(static_cast<char*>(memory.value().get()) + layout->slot_offset(p));
      }
      const auto shards = make_shards(*layout, rank);
      auto gathered = group.gather_list(layout, pointers(shards), outputs);
      TIDE_ASSERT_OK(gathered.status());
      TIDE_ASSERT_OK(gathered.value()->wait());
      for (int p = 0; p < tensors; ++p) ASSERT_EQ(wrong_bytes(*layout, p, outputs[p]), 0) << p;

      const std::vector<DType> dtypes(static_cast<size_t>(tensors), DType::kFloat32);
      const auto gradients = make_gradients(*layout, rank, dtypes);
      std::vector<std::vector<float>> sums;
      for (int p = 0; p < tensors; ++p)
        sums.emplace_back(static_cast<size_t>(layout->parameter(p).shard_numel));
      auto reduced = group.reduce_list(layout, pointers(gradients), mutable_pointers(sums),
                                       DType::kFloat32, {});
      TIDE_ASSERT_OK(reduced.status());
      TIDE_ASSERT_OK(reduced.value()->wait());
      for (int p = 0; p < tensors; ++p) {
        const std::vector<uint8_t> before(sums[p].size() * 4);
        const auto expected =
            expected_shard(*layout, p, rank, DType::kFloat32, DType::kFloat32, {}, before);
        ASSERT_TRUE(expected.empty() ||
                    std::memcmp(expected.data(), sums[p].data(), expected.size()) == 0)
            << p;
      }
    });
  }
}

// `bytes` of address space whose pages all alias the same few, but for the last ones.
class AliasedMemory {
 public:
  static constexpr int64_t kPeriod = 16 << 20;

  explicit AliasedMemory(int64_t bytes) : bytes_((bytes + kPeriod - 1) / kPeriod * kPeriod) {
    const int file = memfd_create("aliased", 0);
    EXPECT_EQ(ftruncate(file, 2 * kPeriod), 0);
    base_ = static_cast<char*>(mmap(nullptr, static_cast<size_t>(bytes_), PROT_NONE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (int64_t at = 0; at < bytes_; at += kPeriod) {
      mmap(base_ + at, kPeriod, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
           at + kPeriod == bytes_ ? kPeriod : 0);
    }
    ::close(file);
  }
  ~AliasedMemory() { munmap(base_, static_cast<size_t>(bytes_)); }
  AliasedMemory(const AliasedMemory&) = delete;
  AliasedMemory& operator=(const AliasedMemory&) = delete;
  char* get() const { return base_; }

 private:
  int64_t bytes_;
  char* base_;
};

TEST(EngineScale, OneTensorBeyondTwoGiB) {
  if (kOverCuda) GTEST_SKIP() << "outputs would have to be real memory of 4 GiB";
  constexpr int64_t kShard = (int64_t{1} << 30) + 12'345;
  WorldOptions options;
  options.group.landing_slice_bytes = 16 << 20;
  run_ranks(2, options, [](int rank, Group& group) {
    auto layout = std::make_shared<GroupLayout>(
        std::vector<Parameter>{{"large", DType::kUInt8, kShard, 2 * kShard, 1, DType::kUInt8}}, 2);
    AliasedMemory input(kShard);
    AliasedMemory output(2 * kShard);
    std::memset(input.get() + kShard - 4000, 17 + rank, 4000);
    auto operation = group.gather_list(layout, {input.get()}, {output.get()});
    TIDE_ASSERT_OK(operation.status());
    TIDE_ASSERT_OK(operation.value()->wait());
    for (int64_t i = 1; i <= 4000; ++i) ASSERT_EQ(output.get()[2 * kShard - i], 18);
    EXPECT_EQ(group.counters().bytes_pushed, static_cast<uint64_t>(kShard));
  });
}

TEST(EngineScale, CastGroupsWriteRoundedPlaces) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    run_ranks(ranks, {}, [ranks](int rank, Group& group) {
      std::mt19937 random(77);
      PlanRequest request;
      request.name = "masters";
      request.parameters = random_parameters(random, ranks, 9, {DType::kBFloat16});
      for (int p = 0; p < 9; ++p) {
        if (p % 3 != 2) request.parameters[p].shard_dtype = DType::kFloat32;  // some need no cast
      }
      const GroupLayout layout(request.parameters, ranks);
      auto answers = group.plan({request}, 1);
      TIDE_ASSERT_OK(answers.status());
      ASSERT_TRUE(answers.value()[0].accepted) << answers.value()[0].reason;
      std::vector<std::vector<uint8_t>> shards;
      for (int p = 0; p < 9; ++p) {
        const Parameter& parameter = layout.parameter(p);
        shards.emplace_back(
            static_cast<size_t>(parameter.shard_numel * dtype_bytes(parameter.shard_dtype)));
        for (int64_t i = 0; i < parameter.shard_numel; ++i) {
          store(shards.back().data(), i, parameter.shard_dtype,
                gradient_at(0, p, place_of(parameter, ranks, rank, i)));
        }
      }
      for (int round = 0; round < 3; ++round) {
        auto started = group.gather({0, pointers(shards)});
        TIDE_ASSERT_OK(started.status());
        TIDE_ASSERT_OK(started.value().operation->wait());
        for (int p = 0; p < 9; ++p) {
          for (int64_t i = 0; i < layout.parameter(p).unsharded_numel; ++i) {
            ASSERT_EQ(static_cast<uint16_t*>(started.value().places[p])[i],
                      bf16_of(gradient_at(0, p, i)));
          }
        }
        TIDE_ASSERT_OK(group.vacate(0));
      }
      // Own places are written once, by the cast; nothing else is copied on this rank.
      EXPECT_EQ(group.counters().bytes_copied,
                static_cast<uint64_t>(3 * valid_bytes(layout, rank)));
      EXPECT_EQ(group.counters().bytes_pushed,
                static_cast<uint64_t>(3 * (ranks - 1) * valid_bytes(layout, rank)));
    });
  }
}

// Slot-Reuse frees the gradients before any peer has even made the call; In-Place cannot.
TEST(EngineModes, SlotReuseReadsTheGradientsBeforeThePeersCome) {
  for (const bool slot_reuse : {true, false}) {
    std::atomic<bool> looked{false};
    run_ranks(2, {}, [&](int rank, Group& group) {
      PlanRequest request;
      request.name = "layers.0";
      request.parameters = {{"w", DType::kBFloat16, 500, 1000, 1, DType::kBFloat16}};
      TIDE_ASSERT_OK(group.plan({request}, 1).status());
      const std::vector<uint16_t> shard(500);
      auto started = group.gather({0, {shard.data()}});
      TIDE_ASSERT_OK(started.status());
      TIDE_ASSERT_OK(started.value().operation->wait());
      TIDE_ASSERT_OK(group.vacate(0));
      // In-Place leases the slot; Slot-Reuse's first call makes the area, which is a meeting. Do
      // that before.
      std::vector<uint16_t> gradient(1000, bf16_of(1.0f));
      std::vector<float> output(500);
      ReduceCall call{
          0,  {0},       {DType::kBFloat16}, {gradient.data()}, {output.data()}, DType::kFloat32,
          {}, slot_reuse};
      auto first = group.reduce(call);
      TIDE_ASSERT_OK(first.status());
      TIDE_ASSERT_OK(first.value()->wait());
      const uint64_t copied = group.counters().bytes_copied;

      if (rank == 1) {
        while (!looked) std::this_thread::sleep_for(1ms);
      }
      auto operation = group.reduce(call);
      TIDE_ASSERT_OK(operation.status());
      if (rank == 0 && slot_reuse) {
        TIDE_ASSERT_OK(operation.value()->wait_read());
        EXPECT_FALSE(operation.value()->is_done());
        std::fill(gradient.begin(), gradient.end(), 0);
        EXPECT_EQ(group.counters().bytes_copied - copied, 2000u);
      } else if (rank == 0) {
        EXPECT_EQ(operation.value()->wait(50ms).kind(), ErrorKind::kTimeout);
        EXPECT_EQ(group.counters().bytes_copied, copied);
      }
      looked = true;
      TIDE_ASSERT_OK(operation.value()->wait());
      for (const float value : output) ASSERT_EQ(value, 2.0f);
    });
  }
}

// The next gather may go out before the reduce's last wait; it gets another slot than the one that
// is staging.
TEST(EngineModes, TheStagingSlotGoesOutLast) {
  run_ranks(2, {}, [](int, Group& group) {
    std::vector<PlanRequest> requests(3);
    for (int g = 0; g < 3; ++g) {
      requests[g].name = "layers." + std::to_string(g);
      requests[g].parameters = {{"w", DType::kBFloat16, 500, 1000, 1, DType::kBFloat16}};
    }
    auto answers = group.plan(requests, 1);  // 1 + 1 slots, and one because staging is leased
    TIDE_ASSERT_OK(answers.status());
    EXPECT_EQ(answers.value()[0].staging, Staging::kLeased);
    const std::vector<uint16_t> shard(500, bf16_of(3.0f));
    auto first = group.gather({0, {shard.data()}});
    TIDE_ASSERT_OK(first.status());
    TIDE_ASSERT_OK(first.value().operation->wait());
    TIDE_ASSERT_OK(group.vacate(0));
    const std::vector<uint16_t> gradient(1000, bf16_of(1.0f));
    std::vector<float> output(500);
    auto reduced = group.reduce({0,
                                 {0},
                                 {DType::kBFloat16},
                                 {gradient.data()},
                                 {output.data()},
                                 DType::kFloat32,
                                 {},
                                 false});
    TIDE_ASSERT_OK(reduced.status());
    int slots[2];
    for (int g : {1, 2}) {
      auto started = group.gather({g, {shard.data()}});
      TIDE_ASSERT_OK(started.status());
      slots[g - 1] = started.value().slot;
      TIDE_ASSERT_OK(started.value().operation->wait());
    }
    EXPECT_NE(slots[0], first.value().slot);
    EXPECT_NE(slots[1], first.value().slot);
    TIDE_ASSERT_OK(reduced.value()->wait());
    for (const float value : output) ASSERT_EQ(value, 2.0f);
  });
}

TEST(EngineCounters, StraightListsPushTheMinimumAndCopyOnlyTheOwnShard) {
  run_ranks(4, {}, [](int rank, Group& group) {
    std::mt19937 random(9);
    auto layout =
        std::make_shared<GroupLayout>(random_parameters(random, 4, 6, {DType::kInt64}), 4);
    auto memory = group.allocate(layout->slot_bytes());
    TIDE_ASSERT_OK(memory.status());
    std::vector<void*> straight;
    for (int p = 0; p < 6; ++p)
      straight.push_back(static_cast<char*>(memory.value().get()) + layout->slot_offset(p));
    std::vector<std::vector<uint8_t>> plain;
    for (int p = 0; p < 6; ++p)
      plain.emplace_back(static_cast<size_t>(layout->parameter(p).unsharded_numel * 8));
    const auto shards = make_shards(*layout, rank);
    int64_t own = 0, all = 0, pushed = 0;
    for (int p = 0; p < 6; ++p) {
      own += layout->valid_numel(p, rank) * 8;
      pushed += 3 * layout->valid_numel(p, rank) * 8;
      all += layout->parameter(p).unsharded_numel * 8;
    }
    auto operation = group.gather_list(layout, pointers(shards), straight);
    TIDE_ASSERT_OK(operation.status());
    TIDE_ASSERT_OK(operation.value()->wait());
    EXPECT_EQ(group.counters().bytes_copied, static_cast<uint64_t>(own));
    EXPECT_EQ(group.counters().bytes_pushed, static_cast<uint64_t>(pushed));
    if (kOverCuda) return;
    // One rank's plain memory makes all of them bounce.
    operation =
        group.gather_list(layout, pointers(shards), rank == 2 ? mutable_pointers(plain) : straight);
    TIDE_ASSERT_OK(operation.status());
    TIDE_ASSERT_OK(operation.value()->wait());
    EXPECT_EQ(group.counters().bytes_copied, static_cast<uint64_t>(own + all));
    for (int p = 0; p < 6; ++p)
      EXPECT_EQ(wrong_bytes(*layout, p, rank == 2 ? plain[p].data() : straight[p]), 0);
    EXPECT_THAT(group.flight_record(),
                HasSubstr("\"kind\": \"gather_list\", \"subject\": \"6 tensors"));
  });
}

}  // namespace
}  // namespace tide::testing
