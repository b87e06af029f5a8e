// Gathers over ranks as threads: every byte at its place.
#include "tests/ranks/engine_world.h"

namespace tide::testing {
namespace {

PlanRequest request_of(const std::string& name, const std::vector<Parameter>& parameters) {
  PlanRequest request;
  request.name = name;
  request.parameters = parameters;
  return request;
}

TEST(EngineGather, PlannedGroupIsBitExactForAllRankCounts) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    run_ranks(ranks, {}, [ranks](int rank, Group& group) {
      std::mt19937 random(100 + ranks);
      const auto parameters = random_parameters(
          random, ranks, 9, {DType::kBFloat16, DType::kFloat32, DType::kUInt8, DType::kComplex128});
      const GroupLayout layout(parameters, ranks);
      auto answers = group.plan({request_of("layers.0", parameters)}, 1);
      TIDE_ASSERT_OK(answers.status());
      ASSERT_TRUE(answers.value()[0].accepted) << answers.value()[0].reason;
      const auto shards = make_shards(layout, rank);
      for (int round = 0; round < 5; ++round) {
        auto started = group.gather({answers.value()[0].plan, pointers(shards)});
        TIDE_ASSERT_OK(started.status());
        TIDE_ASSERT_OK(started.value().operation->wait());
        for (int p = 0; p < layout.size(); ++p)
          EXPECT_EQ(wrong_bytes(layout, p, started.value().places[p]), 0);
        TIDE_ASSERT_OK(group.vacate(0));
      }
      EXPECT_EQ(group.counters().bytes_pushed,
                static_cast<uint64_t>(5 * (ranks - 1) * valid_bytes(layout, rank)));
    });
  }
}

TEST(EngineGather, ListsBounceOrGoStraight) {
  for (int ranks : {1, 2, 3, 4, 7}) {
    for (const bool straight : {false, true}) {
      if (kOverCuda && !straight) continue;  // refused, see group.h
      WorldOptions options;
      options.group.landing_slice_bytes = 1024;
      run_ranks(ranks, options, [=](int rank, Group& group) {
        std::mt19937 random(200 + ranks);
        const auto parameters =
            random_parameters(random, ranks, 12, {DType::kBFloat16, DType::kInt64, DType::kBool});
        auto layout = std::make_shared<GroupLayout>(parameters, ranks);
        const auto shards = make_shards(*layout, rank);
        std::vector<std::vector<uint8_t>> outputs;
        std::vector<void*> places;
        std::shared_ptr<void> memory;
        if (straight) {
          auto allocated = group.allocate(std::max<int64_t>(1, layout->slot_bytes()));
          TIDE_ASSERT_OK(allocated.status());
          memory = allocated.value();
          for (int p = 0; p < layout->size(); ++p) {
            places.push_back(static_cast<char*>(memory.get()) + layout->slot_offset(p));
          }
        } else {
          for (const Parameter& parameter : parameters) {
            outputs.emplace_back(
                static_cast<size_t>(parameter.unsharded_numel * dtype_bytes(parameter.dtype)));
          }
          places = mutable_pointers(outputs);
        }
        for (int round = 0; round < 4; ++round) {
          auto operation = group.gather_list(layout, pointers(shards), places);
          TIDE_ASSERT_OK(operation.status());
          TIDE_ASSERT_OK(operation.value()->wait());
          for (int p = 0; p < layout->size(); ++p) EXPECT_EQ(wrong_bytes(*layout, p, places[p]), 0);
        }
      });
    }
  }
}

}  // namespace
}  // namespace tide::testing
