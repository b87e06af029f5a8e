// Reduce between nodes: a worked example as text, and both forms proven for 2..17 nodes of 1..8
// ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "backend/plan/checker.h"
#include "backend/plan/checker_sequence.h"
#include "backend/plan/node_reduce_plan.h"
#include "tests/unit/plan_fixture.h"

namespace tide {
namespace {

using testing::all_processes;
using testing::flat_parameter;
using testing::make_layout;
using testing::make_topology;
using testing::node_reduce_all;
using testing::random_parameters;

// `times` reduces under way at once; gradients are written anew as soon as they were read.
CheckedSequence reduces(const std::shared_ptr<const GroupLayout>& layout, const Topology& topology,
                        const NodeReduceOptions& options, int times) {
  SequenceBuilder builder(layout->ranks());
  const int group = builder.add_group(all_processes(layout->ranks()));
  for (int i = 0; i < times; ++i) {
    const int reduce = builder.reduce(group, layout, topology, options);
    builder.operation(reduce).outputs = i;
    if (i > 0) builder.act(Action::kWaitRead, reduce - 1);
    builder.act(Action::kWriteGradients, reduce);
    builder.act(Action::kIssue, reduce);
  }
  for (int i = 0; i < times; ++i) {
    builder.act(Action::kWait, i);
    builder.act(Action::kReadSummed, i);
  }
  return builder.sequence();
}

TEST(NodeReducePlanTest, AQuarterLeavesTheNode) {
  // 8 ranks of one node hold bf16 slices of 2 bytes; one fp32 sum leaves: a quarter.
  const auto layout = make_layout({flat_parameter(16 * 128, 16)}, 16);
  const Topology topology = make_topology(2, 8);
  const CheckReport report =
      check(reduces(layout, topology, node_reduce_all(*layout, 64), 1), Schedule{});
  ASSERT_EQ(report.error, "");
  int64_t bytes = 0;
  for (int rank : topology.members(0)) bytes += report.rail_bytes[rank];
  const int64_t slices_bytes = int64_t{8} * (8 * 128) * 2;  // what eight ranks would send
  EXPECT_EQ(4 * bytes, slices_bytes);
}

// The square's example: B is number 2 of D, so its local 1 puts segment 3, and D's local 1 hands on
// seats 0 (C), 1 (own), 2 (A), 3 (B); each rank adds four sources.
TEST(NodeReducePlanTest, WorkedExample) {
  constexpr int kD = 3;
  constexpr int kB = 1;  // (3 - 1) % 4 = 2
  const auto layout = make_layout({flat_parameter(16 * 128, 16)}, 16);
  const Topology topology = make_topology(4, 4);
  const NodeReduceOptions options = node_reduce_all(*layout, 64);
  const Program source = plan_node_reduce(*layout, topology, topology.rank(kB, 1), options);
  std::vector<std::string> puts;
  for (const Step& step : source.steps) {
    if (step.op == Op::kPut && step.node == kD) puts.push_back(to_string(step));
  }
  EXPECT_EQ(puts, std::vector<std::string>{
                      "reduce_rail  put 0.0, pieces [3, 4) of 4 blocks: partial[0][8] -> "
                      "seat[0][12] of node 3, 512 bytes"});
  const Program target = plan_node_reduce(*layout, topology, topology.rank(kD, 1), options);
  std::vector<std::string> texts;
  for (const Step& step : target.steps) {
    const bool handed = step.queue == Queue::kUnpack && step.op == Op::kCopy && step.peer == 14;
    if (handed || step.op == Op::kCombine) texts.push_back(to_string(step));
  }
  EXPECT_EQ(texts,
            (std::vector<std::string>{
                "unpack       copy pieces [1, 2) of shard 14: seat[0][6] -> block[0][1] of 14",
                "unpack       copy pieces [2, 3) of shard 14: seat[0][10] -> block[0][6] of 14",
                "unpack       copy pieces [3, 4) of shard 14: seat[0][14] -> block[0][11] of 14",
                "unpack       copy pieces [0, 1) of shard 14: seat[0][2] -> block[0][12] of 14",
                "combine      combine pieces [0, 1) of shard 13: 4 sources from number 0, "
                "block[0][0] -> output",
                "combine      combine pieces [1, 2) of shard 13: 4 sources from number 0, "
                "block[0][1] -> output",
                "combine      combine pieces [2, 3) of shard 13: 4 sources from number 0, "
                "block[0][2] -> output",
                "combine      combine pieces [3, 4) of shard 13: 4 sources from number 0, "
                "block[0][3] -> output"}));
}

// FSDP2's backward: gathers and reduces under way together on one rail.
TEST(NodeReducePlanTest, GathersAndReducesInFlight) {
  std::mt19937 random(5);
  for (const auto& [nodes, locals] : {std::pair(2, 1), std::pair(3, 2), std::pair(5, 1)}) {
    const int ranks = nodes * locals;
    const Topology topology = make_topology(nodes, locals, &random);
    const auto layout = make_layout(random_parameters(random, ranks, 3, 40), ranks);
    SequenceBuilder builder(ranks);
    const int group = builder.add_group(all_processes(ranks));
    for (int i = 0; i < 3; ++i) {
      const int gather = builder.gather(group, layout, topology,
                                        {GatherSchedule::kDoubling, Pacing::kConfirmHead, 8, 0}, 0);
      builder.operation(gather).slot = i;
      const int reduce = builder.reduce(group, layout, topology, node_reduce_all(*layout, 64));
      builder.operation(reduce).outputs = i;
      builder.operation(reduce).gradients = i;
      builder.act(Action::kWriteGradients, reduce);
      builder.act(Action::kIssue, reduce);
      builder.act(Action::kIssue, gather);
    }
    for (int i = 0; i < 6; ++i) {
      builder.act(Action::kWait, i);
      builder.act(i % 2 == 0 ? Action::kUseGathered : Action::kReadSummed, i);
    }
    EXPECT_EQ(check_all(builder.sequence(), 3).error, "") << nodes << " nodes of " << locals;
  }
}

// Some of the parameters have no gradients in a call; others do in the next.
NodeReduceOptions random_subset(const NodeReduceOptions& whole, std::mt19937* random) {
  NodeReduceOptions options = whole;
  options.subset.clear();
  options.dtypes.clear();
  for (size_t i = 0; i < whole.subset.size(); ++i) {
    if ((*random)() % 2 != 0) continue;
    options.subset.push_back(whole.subset[i]);
    options.dtypes.push_back((*random)() % 2 == 0 ? DType::kFloat32 : whole.dtypes[i]);
  }
  return options;
}

// The last step's text in the read-add form: a short batch's empty seats are zeroed once, and one
// access adds the node's seats.
TEST(NodeReducePlanTest, WorkedExampleOfReadAdd) {
  const auto layout = make_layout({flat_parameter(8 * 128, 8)}, 8);
  const Topology topology = make_topology(2, 4);
  const Program program =
      plan_node_reduce(*layout, topology, 1, node_reduce_all(*layout, 64, true));
  std::vector<std::string> texts;
  for (const Step& step : program.steps) {
    if (step.op == Op::kZero || step.op == Op::kReadAdd) texts.push_back(to_string(step));
  }
  // Local 1 has the seats 1 (its own node's sums) and 2 (the other's); 3 and 0 are empty.
  EXPECT_EQ(texts,
            (std::vector<std::string>{
                "sum          zero 4 slices: seat[0][0]", "sum          zero 4 slices: seat[0][12]",
                "combine      read and add pieces [0, 1) of shard 1: 2 sources from number 0, "
                "seat[0][1] of all -> output",
                "combine      read and add pieces [1, 2) of shard 1: 2 sources from number 0, "
                "seat[0][5] of all -> output",
                "combine      read and add pieces [2, 3) of shard 1: 2 sources from number 0, "
                "seat[0][9] of all -> output",
                "combine      read and add pieces [3, 4) of shard 1: 2 sources from number 0, "
                "seat[0][13] of all -> output"}));
}

// Full and short batches in turn, in areas where full ones lay: the zeros come again each time.
TEST(NodeReducePlanTest, EmptySeatsReadZeroWhereOldDataLay) {
  std::mt19937 random(8);
  for (const auto& [nodes, locals] :
       {std::pair(3, 2), std::pair(5, 2), std::pair(2, 3), std::pair(4, 3), std::pair(5, 3)}) {
    const Topology topology = make_topology(nodes, locals, &random);
    const auto layout =
        make_layout({flat_parameter(200 * topology.ranks(), topology.ranks())}, topology.ranks());
    const NodeReduceOptions options = node_reduce_all(*layout, 64, true);
    const CheckedSequence sequence = reduces(layout, topology, options, 3);
    ASSERT_EQ(check_all(sequence, 1).error, "") << nodes << " nodes of " << locals;

    CheckedSequence without = sequence;
    for (CheckedOperation& operation : without.operations) {
      for (auto& program : operation.programs) {
        Program changed = *program;
        std::erase_if(changed.steps, [](const Step& step) { return step.op == Op::kZero; });
        program = std::make_shared<const Program>(std::move(changed));
      }
    }
    EXPECT_THAT(check(without, Schedule{}).error,
                ::testing::AnyOf(::testing::HasSubstr("before anything was written"),
                                 ::testing::HasSubstr("needs zeros and finds something")));
  }
}

// Both forms in turn, all under way at once. Without behind_read_adds, seats would be written
// before peers have read them: the checker sees it.
TEST(NodeReducePlanTest, BothFormsInTurn) {
  std::mt19937 random(9);
  for (const auto& [nodes, locals] : {std::pair(2, 2), std::pair(3, 2), std::pair(2, 3)}) {
    const int ranks = nodes * locals;
    const Topology topology = make_topology(nodes, locals, &random);
    const auto layout = make_layout({flat_parameter(100 * ranks, ranks)}, ranks);
    for (const bool knows : {true, false}) {
      SequenceBuilder builder(ranks);
      const int group = builder.add_group(all_processes(ranks));
      for (int i = 0; i < 4; ++i) {
        NodeReduceOptions options = node_reduce_all(*layout, 64, i % 2 == 0);
        options.behind_read_adds = knows && !options.read_add;
        const int reduce = builder.reduce(group, layout, topology, options);
        builder.operation(reduce).outputs = builder.operation(reduce).gradients = i;
        builder.act(Action::kWriteGradients, reduce);
        builder.act(Action::kIssue, reduce);
      }
      for (int i = 0; i < 4; ++i) {
        builder.act(Action::kWait, i);
        builder.act(Action::kReadSummed, i);
      }
      const std::string error = check_all(builder.sequence(), 3).error;
      EXPECT_EQ(error.empty(), knows) << nodes << " nodes of " << locals << ": " << error;
    }
  }
}

class NodeReduceCheckTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Nodes, NodeReduceCheckTest, ::testing::Range(2, 18));

TEST_P(NodeReduceCheckTest, EverySize) {
  std::mt19937 random(3000 + GetParam());
  for (int locals = 1; locals <= 8; ++locals) {
    for (bool read_add : {false, true}) {
      const int ranks = GetParam() * locals;
      const bool small = ranks <= 6;
      const Topology topology = make_topology(GetParam(), locals, &random);
      const int64_t largest = small ? 60 : 24;
      const auto layout =
          make_layout(random_parameters(random, ranks, small ? 3 : 2, largest), ranks);
      const NodeReduceOptions whole = node_reduce_all(*layout, 64 << (random() % 2), read_add);
      CheckedSequence sequence = reduces(layout, topology, whole, small ? 2 : 1);
      const std::string name = std::to_string(GetParam()) + " nodes of " + std::to_string(locals) +
                               (read_add ? ", read-add" : ", pushes");
      if (small) {
        ASSERT_EQ(check_all(sequence, 2).error, "") << name;
        sequence = reduces(layout, topology, random_subset(whole, &random), 2);
        ASSERT_EQ(check_all(sequence, 1).error, "") << name << ", some parameters";
        continue;
      }
      const std::vector<Schedule> orders = schedules_for(sequence, 2);
      ASSERT_EQ(check(sequence, orders[random() % orders.size()]).error, "") << name;
      ASSERT_EQ(check(sequence, {Schedule::Kind::kForward, 0, true}).error, "") << name;
    }
  }
}

}  // namespace
}  // namespace tide
