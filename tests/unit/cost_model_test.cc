// The closed forms of the cost model, beside formulas and beside the simulator.
#include "backend/plan/cost_model.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "tests/unit/simulator_fixture.h"

namespace tide::testing {
namespace {

constexpr int64_t kHead = 8 << 20;

TEST(CostModel, EveryConstantHasASource) {
  std::set<std::string> names;
  for (const Constant& constant : cost_constants()) {
    EXPECT_TRUE(names.insert(constant.name).second) << constant.name;
    EXPECT_GT(constant.value, 0) << constant.name;
    const std::string source = constant.source;
    bool known = false;
    for (const char* kind : {"H200 pair:", "rank 0 of 64:", "the paper, section", "data sheet of",
                             "assumed:", "tide's kernels", "put, answer"}) {
      known = known || source.starts_with(kind);
    }
    EXPECT_TRUE(known) << constant.name << ": " << source;
  }
}

TEST(CostModel, OneCallOrBatches) {
  const FabricModel fabric;
  EXPECT_DOUBLE_EQ(push_start_s(fabric, 1), fabric.push_start_s);
  EXPECT_DOUBLE_EQ(push_start_s(fabric, 2), fabric.batch_start_s);
  EXPECT_DOUBLE_EQ(push_start_s(fabric, 128), fabric.batch_start_s);
  EXPECT_DOUBLE_EQ(push_start_s(fabric, 129), 2 * fabric.batch_start_s);
}

TEST(CostModel, SumsAreBoundByCtasThenByMemory) {
  const FabricModel fabric;
  EXPECT_DOUBLE_EQ(sum_s(fabric, 1 << 30, 8), 2 * sum_s(fabric, 1 << 30, 16));
  EXPECT_DOUBLE_EQ(sum_s(fabric, 1 << 30, 64), sum_s(fabric, 1 << 30, 132));
}

TEST(CostModel, SmallShardsGoByDoubling) {
  const RailModel rail;
  for (int nodes : {3, 4, 5, 8, 17, 64, 512}) {
    EXPECT_EQ(choose_schedule(rail, nodes, 4 << 10, Pacing::kConfirmHead, kHead),
              GatherSchedule::kDoubling)
        << nodes;
  }
}

// Rounds of a single shard that nobody forwards keep the rail busy: with large shards nothing is
// left to win but doubling's waits, and with slow messages and no pacing these are what counts.
TEST(CostModel, DirectWinsWhereForwardingWaits) {
  RailModel rail;
  rail.latency_s = 5e-3;
  EXPECT_EQ(choose_schedule(rail, 8, 1 << 20, Pacing::kOff, kHead), GatherSchedule::kDirect);
  EXPECT_EQ(choose_schedule(rail, 8, 1 << 20, Pacing::kConfirmWhole, kHead),
            GatherSchedule::kDoubling);
}

TEST(CostModel, TwoNodesHaveOneSchedule) {
  EXPECT_EQ(choose_schedule({}, 2, 1 << 20, Pacing::kOff, kHead), GatherSchedule::kDoubling);
  EXPECT_EQ(choose_schedule({}, 1, 1 << 20, Pacing::kOff, kHead), GatherSchedule::kDoubling);
}

// The estimate leaves out what the fabric adds; ranks alone in their nodes show it bare.
TEST(CostModel, EstimatesAreWhatTheSimulatorSays) {
  for (int nodes : {2, 3, 5, 8, 16}) {
    const Topology topology = uniform_topology(nodes, 1);
    for (int64_t shard : {int64_t{1} << 16, int64_t{1} << 22, int64_t{1} << 26}) {
      const auto layout = bf16_layout({shard / 2 * nodes}, nodes);
      for (Pacing pacing : {Pacing::kOff, Pacing::kConfirmWhole, Pacing::kConfirmHead}) {
        const GatherEstimate estimate = estimate_gather({}, nodes, shard, pacing, kHead);
        NodeGatherOptions options;
        options.pacing = pacing;
        options.part_bytes = 0;
        const double fabric_s = FabricModel().credit_s;
        for (const auto& [schedule, expected] :
             {std::pair{GatherSchedule::kDoubling, estimate.doubling_s},
              {GatherSchedule::kRing, estimate.ring_s},
              {GatherSchedule::kDirect, estimate.direct_s}}) {
          options.schedule = schedule;
          const double simulated =
              run(gather(layout, topology, options), topology).end_s[0] - fabric_s;
          EXPECT_NEAR(simulated, expected, 0.02 * expected)
              << nodes << " nodes, " << shard << " bytes, " << gather_schedule_name(schedule)
              << ", " << pacing_name(pacing);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tide::testing
