// Gather between nodes: the paper's worked example as text, and every schedule and pacing proven
// for 1..17 nodes of 1..8 ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <random>

#include "backend/plan/checker.h"
#include "backend/plan/checker_sequence.h"
#include "backend/plan/node_gather_plan.h"
#include "tests/unit/plan_fixture.h"

namespace tide {
namespace {

using testing::all_processes;
using testing::column_parameter;
using testing::flat_parameter;
using testing::make_layout;
using testing::random_parameters;

constexpr GatherSchedule kSchedules[] = {GatherSchedule::kDoubling, GatherSchedule::kRing,
                                         GatherSchedule::kDirect};
constexpr Pacing kPacings[] = {Pacing::kOff, Pacing::kConfirmWhole, Pacing::kConfirmHead,
                               Pacing::kGrant};

// Ranks in node order, or in an order of `random`'s.
Topology make_topology(int nodes, int locals, std::mt19937* random = nullptr) {
  std::vector<RankLocation> locations;
  for (int node = 0; node < nodes; ++node) {
    for (int local = 0; local < locals; ++local)
      locations.push_back({"host" + std::to_string(node), local});
  }
  if (random != nullptr) std::shuffle(locations.begin(), locations.end(), *random);
  EXPECT_EQ(Topology::check(locations), "");
  return Topology(locations);
}

std::string name_of(const Topology& topology, const NodeGatherOptions& options) {
  return std::to_string(topology.nodes()) + " nodes of " + std::to_string(topology.local_ranks()) +
         ", " + gather_schedule_name(options.schedule) + ", pacing " + pacing_name(options.pacing) +
         ", head " + std::to_string(options.head_bytes) + ", parts of " +
         std::to_string(options.part_bytes);
}

int rounds_of(const Program& program) {
  int rounds = 0;
  for (const Step& step : program.steps) {
    if (step.op == Op::kPut) rounds = std::max(rounds, step.round + 1);
  }
  return rounds;
}

// The same gather `times` times in one slot, each used before the next; new shards between.
CheckedSequence gathers(const std::shared_ptr<const GroupLayout>& layout, const Topology& topology,
                        const NodeGatherOptions& options, int times) {
  SequenceBuilder builder(layout->ranks());
  const int group = builder.add_group(all_processes(layout->ranks()));
  for (int i = 0; i < times; ++i) {
    const int gather = builder.gather(group, layout, topology, options, 0);
    builder.operation(gather).slot = 0;
    builder.act(Action::kIssue, gather);
    builder.act(Action::kWaitRead, gather);
    builder.act(Action::kUpdateShards, gather);
    builder.act(Action::kWait, gather);
    builder.act(Action::kUseGathered, gather);
  }
  return builder.sequence();
}

TEST(NodeGatherPlanTest, WorkedExample) {
  const auto layout = make_layout({flat_parameter(100, 10)}, 10);
  NodeGatherOptions options;
  options.part_bytes = 0;
  const Program program = plan_node_gather(*layout, make_topology(5, 2), 0, options);
  EXPECT_EQ(
      to_string(program),
      "gather, rank 0 of 10, 1 pieces, node 0 of 5, pacing confirm of the head\n"
      "rail         grant 0.0 to node 1\n"
      "rail         grant 1.0 to node 2\n"
      "rail         grant 2.0 to node 4\n"
      "gather_push  signal gather_credit to all = 1\n"
      "own          copy pieces [0, 1) of shard 0: shard -> slot\n"
      "rail         arrive grant 0.0 from node 4\n"
      "rail         put 0.0, pieces [0, 1) of 1 shards from node 0 on: shard -> slot of node 4, "
      "20 bytes, head 20\n"
      "gather_push  wait gather_credit from 1 >= 1\n"
      "gather_push  copy pieces [0, 1) of shard 0: shard -> slot of 1\n"
      "gather_push  signal gather_arrival to 1 = 1\n"
      "rail         arrive head 0.0 from node 1, 20 bytes\n"
      "rail         confirm 0.0 to node 1\n"
      "rail         arrive arrival 0.0 from node 1, 20 bytes\n"
      "rail         signal rail_arrival to self = 1\n"
      "rail         arrive confirm 0.0 from node 4\n"
      "rail         arrive grant 1.0 from node 3\n"
      "rail         put 1.0, pieces [0, 1) of 1 shards from node 0 on: shard -> slot of node 3, "
      "20 bytes, head 20\n"
      "rail         put 1.1, pieces [0, 1) of 1 shards from node 1 on: shard -> slot of node 3, "
      "20 bytes, head 20\n"
      "gather_push  wait rail_arrival from self >= 1\n"
      "gather_push  copy pieces [0, 1) of shard 2: slot -> slot of 1\n"
      "gather_push  signal gather_arrival to 1 = 2\n"
      "rail         arrive head 1.0 from node 2, 20 bytes\n"
      "rail         arrive head 1.1 from node 2, 20 bytes\n"
      "rail         confirm 1.0 to node 2\n"
      "rail         arrive confirm 1.0 from node 3\n"
      "rail         arrive grant 2.0 from node 1\n"
      "rail         put 2.0, pieces [0, 1) of 1 shards from node 0 on: shard -> slot of node 1, "
      "20 bytes, head 0\n"
      "rail         arrive arrival 1.0 from node 2, 20 bytes\n"
      "rail         signal rail_arrival to self = 2\n"
      "rail         arrive arrival 1.1 from node 2, 20 bytes\n"
      "rail         signal rail_arrival to self = 3\n"
      "rail         arrive arrival 2.0 from node 4, 20 bytes\n"
      "rail         signal rail_arrival to self = 4\n"
      "gather_push  wait rail_arrival from self >= 2\n"
      "gather_push  copy pieces [0, 1) of shard 4: slot -> slot of 1\n"
      "gather_push  signal gather_arrival to 1 = 3\n"
      "gather_push  wait rail_arrival from self >= 3\n"
      "gather_push  copy pieces [0, 1) of shard 6: slot -> slot of 1\n"
      "gather_push  signal gather_arrival to 1 = 4\n"
      "gather_push  wait rail_arrival from self >= 4\n"
      "gather_push  copy pieces [0, 1) of shard 8: slot -> slot of 1\n"
      "gather_push  signal gather_arrival to 1 = 5\n"
      "rail         drain\n"
      "arrive       wait gather_arrival from 1 >= 5\n"
      "arrive       wait rail_arrival from self >= 4\n");
}

TEST(NodeGatherPlanTest, OneNodeIsTheGatherInsideANode) {
  const auto layout = make_layout({flat_parameter(100, 3), column_parameter(3, 4, 3)}, 3);
  for (int rank = 0; rank < 3; ++rank) {
    const Program program = plan_node_gather(*layout, make_topology(1, 3), rank, {});
    EXPECT_EQ(to_string(program), to_string(plan_gather(*layout, rank, {})));
    EXPECT_EQ(program.hash, plan_gather(*layout, rank, {}).hash);
  }
}

TEST(NodeGatherPlanTest, RoundsAndHashes) {
  for (int nodes = 2; nodes <= 17; ++nodes) {
    const auto layout = make_layout({flat_parameter(nodes * 10, nodes)}, nodes);
    const Topology topology = make_topology(nodes, 1);
    std::vector<uint64_t> hashes;
    for (GatherSchedule schedule : kSchedules) {
      for (Pacing pacing : kPacings) {
        NodeGatherOptions options{schedule, pacing, 8, 0};
        const int wanted = schedule == GatherSchedule::kDoubling
                               ? std::bit_width(static_cast<unsigned>(nodes - 1))
                               : nodes - 1;
        for (int rank = 0; rank < nodes; ++rank) {
          const Program program = plan_node_gather(*layout, topology, rank, options);
          EXPECT_EQ(rounds_of(program), wanted) << name_of(topology, options);
          EXPECT_EQ(program.hash, plan_node_gather(*layout, topology, 0, options).hash);
        }
        hashes.push_back(plan_node_gather(*layout, topology, 0, options).hash);
        options.head_bytes = 9;
        hashes.push_back(plan_node_gather(*layout, topology, 0, options).hash);
        options.part_bytes = 1;
        hashes.push_back(plan_node_gather(*layout, topology, 0, options).hash);
      }
    }
    std::sort(hashes.begin(), hashes.end());
    EXPECT_EQ(std::adjacent_find(hashes.begin(), hashes.end()), hashes.end());
  }
}

TEST(NodeGatherPlanTest, CutOfARound) {
  const std::vector<RailPart> parts = cut_round({6, 6, 6}, 8, 14);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].shards, 2);
  EXPECT_EQ(parts[0].bytes, 12);
  EXPECT_EQ(parts[0].head_bytes, 12);
  EXPECT_EQ(parts[1].first, 2);
  EXPECT_EQ(parts[1].shards, 1);
  EXPECT_EQ(parts[1].head_bytes, 2);
  EXPECT_EQ(cut_round({0, 5, 0}, 0, 0).size(), 3u);
}

class NodeGatherCheckTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Nodes, NodeGatherCheckTest, ::testing::Range(1, 18));

// All schedules and pacings with every number of local ranks. Small groups run in all orders, large
// ones in one order of the list and one random order each.
TEST_P(NodeGatherCheckTest, EverySize) {
  std::mt19937 random(1000 + GetParam());
  for (int locals = 1; locals <= 8; ++locals) {
    const int ranks = GetParam() * locals;
    const bool small = ranks <= 6;
    for (GatherSchedule schedule : kSchedules) {
      for (Pacing pacing : kPacings) {
        const Topology topology = make_topology(GetParam(), locals, &random);
        const auto layout =
            make_layout(random_parameters(random, ranks, small ? 3 : 2, small ? 8 : 2), ranks);
        const NodeGatherOptions options{schedule, pacing, static_cast<int64_t>(random() % 4) * 8,
                                        static_cast<int64_t>(random() % 3) * 16};
        const CheckedSequence sequence = gathers(layout, topology, options, small ? 2 : 1);
        if (small) {
          ASSERT_EQ(check_all(sequence, 2).error, "") << name_of(topology, options);
          continue;
        }
        const std::vector<Schedule> orders = schedules_for(sequence, 2);
        const Schedule& order = orders[random() % orders.size()];
        ASSERT_EQ(check(sequence, order).error, "") << name_of(topology, options);
      }
    }
  }
}

}  // namespace
}  // namespace tide
