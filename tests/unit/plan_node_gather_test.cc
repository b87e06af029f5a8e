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
using testing::make_topology;
using testing::random_parameters;

constexpr GatherSchedule kSchedules[] = {GatherSchedule::kDoubling, GatherSchedule::kRing,
                                         GatherSchedule::kDirect};
constexpr Pacing kPacings[] = {Pacing::kOff, Pacing::kConfirmWhole, Pacing::kConfirmHead,
                               Pacing::kGrant};

std::string name_of(const Topology& topology, const NodeGatherOptions& options) {
  return std::to_string(topology.nodes()) + " nodes of " + std::to_string(topology.local_ranks()) +
         ", " + gather_schedule_name(options.schedule) + ", pacing " + pacing_name(options.pacing) +
         ", head " + std::to_string(options.head_bytes) + ", parts of " +
         std::to_string(options.part_bytes) + ", landing " +
         std::to_string(options.landing_slice_bytes) + (options.to_all ? ", to all" : "");
}

int rounds_of(const Program& program) {
  int rounds = 0;
  for (const Step& step : program.steps) {
    if (step.op == Op::kPut) rounds = std::max(rounds, step.round + 1);
  }
  return rounds;
}

// The same gather `times` times, `flying` of them under way at a time in slots of their own; new
// shards between.
CheckedSequence gathers(const std::shared_ptr<const GroupLayout>& layout, const Topology& topology,
                        const NodeGatherOptions& options, int times, int flying = 1) {
  SequenceBuilder builder(layout->ranks());
  const int group = builder.add_group(all_processes(layout->ranks()));
  const auto use = [&](int gather) {
    builder.act(Action::kWait, gather);
    builder.act(Action::kUseGathered, gather);
  };
  for (int i = 0; i < times; ++i) {
    const int gather = builder.gather(group, layout, topology, options, i % flying);
    builder.operation(gather).slot = i % flying;
    if (i >= flying) use(gather - flying);
    builder.act(Action::kIssue, gather);
    builder.act(Action::kWaitRead, gather);
    builder.act(Action::kUpdateShards, gather);
  }
  for (int i = std::max(0, times - flying); i < times; ++i) use(i);
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

// One chunk of two shards that go through landing; the rail of rank 0 of two nodes.
TEST(NodeGatherPlanTest, WorkedExampleThroughLanding) {
  const auto layout = make_layout({flat_parameter(20, 2), flat_parameter(6, 2)}, 2);
  NodeGatherOptions options;
  options.landing_slice_bytes = 128;
  const Program program = plan_node_gather(*layout, make_topology(2, 1), 0, options);
  EXPECT_EQ(to_string(program),
            "gather, rank 0 of 2, 2 pieces, node 0 of 2, pacing confirm of the head\n"
            "rail         grant 0.0 to node 1\n"
            "own          wait left from self >= 0\n"
            "own          copy pieces [0, 2) of shard 0: shard -> landing[0][0]\n"
            "own          signal packed to self = 1\n"
            "rail         wait packed from self >= 1\n"
            "own          copy pieces [0, 2) of shard 0: shard -> slot\n"
            "rail         arrive grant 0.0 from node 1\n"
            "rail         put 0.0, pieces [0, 2) of 1 shards from node 0 on: landing[0][0] -> "
            "landing[0][0] of node 1, 26 bytes, head 0\n"
            "rail         arrive arrival 0.0 from node 1, 26 bytes\n"
            "rail         signal rail_arrival to self = 1\n"
            "rail         confirm 0.1 to node 1\n"
            "unpack       wait rail_arrival from self >= 1\n"
            "unpack       copy pieces [0, 2) of shard 1: landing[0][1] -> slot\n"
            "unpack       signal placed to self = 1\n"
            "rail         wait placed from self >= 1\n"
            "rail         arrive confirm 0.1 from node 1\n"
            "rail         signal left to self = 1\n"
            "rail         drain\n"
            "arrive       wait placed from self >= 1\n");
}

// The landing ring's size does not grow with the group, and a chunk of a shard is one run of bytes.
TEST(NodeGatherPlanTest, LandingIsFixedAndPacked) {
  for (int pieces : {1, 40, 400}) {
    std::vector<Parameter> parameters;
    for (int p = 0; p < pieces; ++p) parameters.push_back(flat_parameter(33 * 6, 6));
    const auto layout = make_layout(parameters, 6);
    NodeGatherOptions options;
    options.landing_slice_bytes = 256;
    const Program program = plan_node_gather(*layout, make_topology(3, 2), 0, options);
    EXPECT_LE(program.areas, 2);
    EXPECT_EQ(program.slice_bytes, 256);
    EXPECT_EQ(program.slices(Space::kLanding), 3);
    for (const Step& step : program.steps) {
      if (step.op != Op::kPut) continue;
      int64_t at = 0;
      for (int i = step.first_piece; i < step.last_piece; ++i) {
        EXPECT_EQ(program.pieces[i].packed_offset, at);
        at += program.pieces[i].numel * 2;
      }
      EXPECT_LE(at, program.slice_bytes);
      EXPECT_EQ(step.bytes, at * step.shards);
    }
  }
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
        NodeGatherOptions options{schedule, pacing, 8, 0, 0};
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
        options.landing_slice_bytes = 64;
        hashes.push_back(plan_node_gather(*layout, topology, 0, options).hash);
        options.to_all = true;
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

// Several chunks, so that areas are used again, and straight gathers of the same group between.
TEST(NodeGatherPlanTest, ManyChunksThroughLanding) {
  std::mt19937 random(11);
  for (const auto& [nodes, locals] : {std::pair(2, 1), std::pair(3, 2), std::pair(5, 1)}) {
    for (GatherSchedule schedule : kSchedules) {
      for (Pacing pacing : kPacings) {
        const Topology topology = make_topology(nodes, locals, &random);
        std::vector<Parameter> parameters =
            random_parameters(random, topology.ranks(), 3, 120 / nodes);
        parameters.push_back(flat_parameter(64 * topology.ranks(), topology.ranks()));
        parameters.back().shard_dtype = random() % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
        const auto layout = make_layout(parameters, topology.ranks());
        const NodeGatherOptions options{schedule, pacing, 8, 24, 64};
        ASSERT_EQ(check_all(gathers(layout, topology, options, 3, 2), 1).error, "")
            << name_of(topology, options);
      }
    }
  }
}

// Every schedule and pacing by stores to all, with casts in half of the groups.
TEST(NodeGatherPlanTest, ToAllInEveryForm) {
  std::mt19937 random(12);
  for (const auto& [nodes, locals] : {std::pair(2, 2), std::pair(3, 3), std::pair(5, 2)}) {
    for (GatherSchedule schedule : kSchedules) {
      for (Pacing pacing : kPacings) {
        for (int64_t landing : {0, 64}) {
          const Topology topology = make_topology(nodes, locals, &random);
          std::vector<Parameter> parameters = random_parameters(random, topology.ranks(), 3, 12);
          if (random() % 2 == 0) parameters[0].shard_dtype = DType::kFloat32;
          const auto layout = make_layout(parameters, topology.ranks());
          const NodeGatherOptions options{schedule, pacing, 8, 24, landing, true};
          ASSERT_EQ(check_all(gathers(layout, topology, options, 3, 2), 1).error, "")
              << name_of(topology, options);
          const Program program = plan_node_gather(*layout, topology, 0, options);
          for (const Step& step : program.steps) {
            if (step.op == Op::kCopy && step.queue == Queue::kGatherPush) {
              EXPECT_EQ(step.peer, kAllRanks);
            }
          }
        }
      }
    }
  }
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
        // Large groups take turns: straight or through landing, in another size of chunk.
        for (int64_t landing : {0, 64}) {
          if (!small && (locals + static_cast<int>(pacing)) % 2 == (landing > 0)) continue;
          const bool to_all = random() % 2 == 0;
          const NodeGatherOptions options{schedule,
                                          pacing,
                                          static_cast<int64_t>(random() % 4) * 8,
                                          static_cast<int64_t>(random() % 3) * 16,
                                          landing,
                                          to_all};
          const CheckedSequence sequence =
              gathers(layout, topology, options, small ? 3 : 1, small ? 2 : 1);
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
}

}  // namespace
}  // namespace tide
