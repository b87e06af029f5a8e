// The simulator beside closed forms, for programs and clusters whose times a formula gives.
#include "backend/plan/simulator.h"

#include <gtest/gtest.h>

#include "backend/plan/simulator_flows.h"
#include "tests/unit/simulator_fixture.h"

namespace tide::testing {
namespace {

constexpr int64_t kShard = 64 << 20;  // bytes

NodeGatherOptions options_of(GatherSchedule schedule, Pacing pacing) {
  NodeGatherOptions options;
  options.schedule = schedule;
  options.pacing = pacing;
  return options;
}

std::shared_ptr<const GroupLayout> shards_of(int64_t bytes, int ranks) {
  return bf16_layout({bytes / 2 * ranks}, ranks);
}

double wire_s(const SimulationOptions& options, int64_t bytes) {
  return static_cast<double>(bytes) / options.cluster.rail.rate;
}

// A grant or a confirm on its way.
double told_s(const SimulationOptions& options) {
  return options.cluster.rail.latency_s + options.cluster.rail.message_s;
}

double gather_s(int nodes, GatherSchedule schedule, Pacing pacing, int64_t shard,
                const SimulationOptions& options) {
  const Topology topology = uniform_topology(nodes, 1);
  return run(gather(shards_of(shard, nodes), topology, options_of(schedule, pacing)), topology,
             options)
      .end_s[0];
}

// What follows the last arrival: the rail's signal to the queue that completes.
double completion_s(const SimulationOptions& options) { return options.cluster.fabric.credit_s; }

TEST(Simulator, OnePutIsLatencyAndBytesOverRate) {
  SimulationOptions options;
  for (int64_t bytes : {int64_t{64} << 10, kShard}) {
    const double expected = told_s(options) + wire_s(options, bytes) +
                            options.cluster.rail.arrival_s() + completion_s(options);
    EXPECT_NEAR(gather_s(2, GatherSchedule::kDoubling, Pacing::kOff, bytes, options), expected,
                1e-9 + 1e-6 * expected);
  }
}

TEST(Simulator, DoublingTakesARoundForEachBit) {
  SimulationOptions options;
  options.cluster.rail.latency_s = 1e-3;  // own copies are over long before
  for (int nodes : {2, 3, 4, 5, 6, 7, 8, 16, 17}) {
    int rounds = 0;
    while ((1 << rounds) < nodes) ++rounds;
    // A short last round that forwards nothing of the round before it follows at once.
    const int last_shards = nodes - (1 << (rounds - 1));
    const int waits = rounds - (rounds > 1 && last_shards <= 1 << (rounds - 2) ? 1 : 0);
    const double expected = told_s(options) + (nodes - 1) * wire_s(options, kShard) +
                            waits * options.cluster.rail.arrival_s() + completion_s(options);
    EXPECT_NEAR(gather_s(nodes, GatherSchedule::kDoubling, Pacing::kOff, kShard, options), expected,
                1e-6 * expected)
        << nodes << " nodes";
  }
}

TEST(Simulator, RingTakesARoundForEachNode) {
  SimulationOptions options;
  for (int nodes : {2, 3, 8}) {
    const double round = wire_s(options, kShard) + options.cluster.rail.arrival_s();
    const double expected = told_s(options) + (nodes - 1) * round + completion_s(options);
    EXPECT_NEAR(gather_s(nodes, GatherSchedule::kRing, Pacing::kOff, kShard, options), expected,
                1e-6 * expected)
        << nodes << " nodes";
  }
}

TEST(Simulator, DirectForwardsNothing) {
  SimulationOptions options;
  for (int nodes : {2, 3, 8}) {
    const double expected = told_s(options) + (nodes - 1) * wire_s(options, kShard) +
                            options.cluster.rail.arrival_s() + completion_s(options);
    EXPECT_NEAR(gather_s(nodes, GatherSchedule::kDirect, Pacing::kOff, kShard, options), expected,
                1e-6 * expected)
        << nodes << " nodes";
  }
}

TEST(Simulator, ConfirmOfTheWholeCostsATripARound) {
  SimulationOptions options;
  const double off = gather_s(8, GatherSchedule::kDirect, Pacing::kOff, kShard, options);
  const double whole = gather_s(8, GatherSchedule::kDirect, Pacing::kConfirmWhole, kShard, options);
  const double trip = options.cluster.rail.arrival_s() + told_s(options);
  EXPECT_NEAR(whole - off, 6 * trip, 1e-6);
}

TEST(Simulator, ConfirmOfTheHeadIsHiddenBehindTheTail) {
  SimulationOptions options;
  const double off = gather_s(8, GatherSchedule::kDirect, Pacing::kOff, kShard, options);
  const double head = gather_s(8, GatherSchedule::kDirect, Pacing::kConfirmHead, kShard, options);
  EXPECT_NEAR(head, off, 1e-6);
}

TEST(SimulatorFlows, SendersIntoOnePortShareIt) {
  simulating::Flows flows;
  const int in = flows.add_port(1e9);
  std::vector<simulating::Flows::End> ends;
  for (int sender = 0; sender < 3; ++sender) {
    ends.clear();
    flows.begin(0, 1e9, {flows.add_port(1e9), in}, &ends);
  }
  ASSERT_EQ(ends.size(), 3u);  // the third changed the first two as well
  for (const auto& end : ends) EXPECT_DOUBLE_EQ(end.time, 3.0);
  // One goes at 1.5 s, half done: the others have a half port each for their halves.
  const int gone = ends[0].flow;
  ends.clear();
  flows.end(1.5, gone, &ends);
  ASSERT_EQ(ends.size(), 2u);
  for (const auto& end : ends) EXPECT_DOUBLE_EQ(end.time, 1.5 + 1.0);
}

// Both nodes' ranks push into the third's only port when nodes are one rank: by hand, three puts
// of equal bytes to one receiver end together.
TEST(Simulator, IncastIsSharedByItsSenders) {
  const int nodes = 4;
  const Topology topology = uniform_topology(nodes, 1);
  const int64_t bytes = kShard;
  const auto layout = shards_of(bytes, nodes);
  SimulatedOperation operation;
  operation.layout = layout;
  operation.program = [&](int rank) {
    Program program;
    program.ranks = nodes;
    program.rank = program.node = rank;
    program.node_ranks = {rank};
    program.rail_ranks = {0, 1, 2, 3};
    Step step;
    step.queue = Queue::kRail;
    step.node = 0;
    step.bytes = bytes;
    if (rank > 0) {
      step.op = Op::kPut;
      program.steps.push_back(step);
      return program;
    }
    step.op = Op::kArrive;
    step.queue = Queue::kArrive;
    for (step.node = 1; step.node < nodes; ++step.node) program.steps.push_back(step);
    return program;
  };
  const SimulationOptions options;
  EXPECT_NEAR(run(operation, topology, options).end_s[0],
              3 * wire_s(options, bytes) + options.cluster.rail.arrival_s(), 1e-9);
}

TEST(Simulator, BytesOnEachRailAreTheLeast) {
  const Topology topology = uniform_topology(5, 2);
  const auto layout = shards_of(1 << 20, 10);
  for (GatherSchedule schedule :
       {GatherSchedule::kDoubling, GatherSchedule::kRing, GatherSchedule::kDirect}) {
    const SimulationReport report =
        run(gather(layout, topology, options_of(schedule, Pacing::kConfirmHead)), topology);
    for (const SimulatedRank& rank : report.ranks) EXPECT_EQ(rank.rail_bytes, 4 << 20);
  }
  // Reduce: fp32 partial sums, twice the bf16 shard to each other node, from the one rank that owns
  // the segment.
  const SimulationReport report = run(node_reduce(layout, topology), topology);
  int64_t sum = 0;
  for (const SimulatedRank& rank : report.ranks) sum += rank.rail_bytes;
  EXPECT_EQ(sum, int64_t{10} * 4 * 2 * (1 << 20));
}

// Two areas of: staging, a slice for each of batch x blocks x locals; partial sums, seats, blocks.
TEST(Simulator, AreasAreCounted) {
  const Topology topology = uniform_topology(2, 2);
  const auto layout = shards_of(4 << 20, 4);
  const SimulationReport report = run(node_reduce(layout, topology), topology);
  const Program program = node_reduce(layout, topology).program(0);
  const int64_t staging = 2 * (2 * 2 * 2) * program.slice_bytes;
  const int64_t partials = 2 * (2 * 2 + 2 * 2 + 2 * 2) * program.partial_bytes;
  EXPECT_EQ(report.area_bytes[0], staging + partials);
}

TEST(Simulator, MulticastPushesOnce) {
  const Topology topology = uniform_topology(2, 8);
  const auto layout = shards_of(1 << 20, 16);
  SimulationOptions options;
  const SimulationReport without = run(gather(layout, topology), topology, options);
  options.cluster.fabric.multicast = true;
  const SimulationReport with = run(gather(layout, topology), topology, options);
  EXPECT_EQ(without.ranks[3].pushed_bytes, 7 * 2 * (1 << 20));
  EXPECT_EQ(with.ranks[3].pushed_bytes, 2 * (1 << 20));
  for (const SimulationReport* report : {&without, &with}) {
    EXPECT_EQ(report->ranks[3].arrived_bytes, 7 * 2 * (1 << 20));
  }
  EXPECT_LT(with.end_s[0], without.end_s[0]);
}

TEST(Simulator, KernelsWaitForProducts) {
  const Topology pair = uniform_topology(1, 2);
  const auto operation = reduce(shards_of(16 << 20, 2), 16 << 20);
  SimulationOptions options;
  const double alone = run(operation, pair, options).end_s[0];
  options.cluster.fabric.product_s = 1e-3;
  EXPECT_NEAR(run(operation, pair, options).end_s[0], alone + 0.5e-3, 1e-9);
  options.cluster.fabric.free_sms = 16;
  EXPECT_NEAR(run(operation, pair, options).end_s[0], alone, 1e-9);
}

// More CTAs than SMs are taken in turn: two operations' sums on a device of one kernel's size.
TEST(Simulator, KernelsShareSms) {
  const Topology pair = uniform_topology(1, 2);
  auto operation = reduce(shards_of(256 << 20, 2), 256 << 20);
  SimulationOptions options;
  options.cluster.fabric.sum_rate_per_cta = 1e9;  // sums are all that takes time
  options.cluster.fabric.sms = 32;
  const auto both = [&] {
    SimulationReport report = simulate({operation, operation}, pair, options);
    EXPECT_EQ(report.error, "");
    return report.end_s[1];
  };
  const double roomy = both();
  options.cluster.fabric.sms = 16;
  EXPECT_NEAR(both(), roomy, 0.01 * roomy);  // one queue sums both: never two at a time
}

TEST(Simulator, OneNodeStandsForAll) {
  for (int nodes : {8, 16, 33}) {
    for (int locals : {1, 2, 4}) {
      const Topology topology = uniform_topology(nodes, locals);
      const auto layout = shards_of(2 << 20, nodes * locals);
      std::vector<SimulatedOperation> operations;
      for (GatherSchedule schedule :
           {GatherSchedule::kDoubling, GatherSchedule::kRing, GatherSchedule::kDirect}) {
        operations.push_back(gather(layout, topology, options_of(schedule, Pacing::kConfirmHead)));
      }
      operations.push_back(node_reduce(layout, topology));
      operations.push_back(node_reduce(layout, topology, true));
      NodeGatherOptions landing;
      landing.landing_slice_bytes = 1 << 20;
      operations.push_back(gather(layout, topology, landing));
      for (const SimulatedOperation& operation : operations) {
        SimulationOptions options;
        options.cluster.fabric.multicast = locals == 4;
        const SimulationReport all = run(operation, topology, options);
        options.one_node = true;
        const SimulationReport one = run(operation, topology, options);
        EXPECT_EQ(one.ranks.size(), static_cast<size_t>(locals));
        EXPECT_NEAR(one.end_s[0], all.end_s[0], 0.01 * all.end_s[0]) << nodes << " x " << locals;
        EXPECT_EQ(one.ranks[0].rail_bytes, all.ranks[0].rail_bytes);
      }
    }
  }
}

TEST(Simulator, AProgramThatWaitsForEverIsNamed) {
  const Topology pair = uniform_topology(1, 2);
  SimulatedOperation operation = gather(shards_of(1 << 20, 2), pair);
  const auto right = operation.program;
  operation.program = [right](int rank) {
    Program program = right(rank);
    if (rank == 1) program.steps.clear();
    return program;
  };
  const SimulationReport report = simulate({operation}, pair, {});
  EXPECT_EQ(report.error,
            "rank 0, operation 0, queue gather_push waits for ever for gather_credit from 1 >= 1");
}

TEST(Simulator, BothDirectionsShareARail) {
  const Topology topology = uniform_topology(4, 1);
  const auto layout = shards_of(kShard, 4);
  const SimulationOptions options;
  const auto gathers = gather(layout, topology);
  const auto reduces = node_reduce(layout, topology);
  const double alone = run(gathers, topology).end_s[0] + run(reduces, topology).end_s[0];
  const SimulationReport both = simulate({gathers, reduces}, topology, options);
  EXPECT_EQ(both.error, "");
  // Three shards one way as bf16 and three as fp32 cross the port, whoever goes first.
  const double bound = wire_s(options, 9 * kShard);
  EXPECT_GT(both.end_s[1], bound);
  EXPECT_LT(both.end_s[1], 1.1 * alone);
}

}  // namespace
}  // namespace tide::testing
