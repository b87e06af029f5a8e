// Groups over several nodes, ranks as threads: gathers bit-exact, reduces bit-equal to fp32 sums in
// the topology's order, bytes on the rails as few as possible.
#include "tests/ranks/engine_nodes_world.h"

namespace tide::testing {
namespace {

struct Shape {
  int nodes;
  int locals;
};
constexpr Shape kShapes[] = {{2, 1}, {3, 1}, {2, 2}, {3, 2}, {4, 2}, {5, 1}, {8, 1}, {2, 4}};

PlanRequest request_of(const std::string& name, const std::vector<Parameter>& parameters) {
  PlanRequest request;
  request.name = name;
  request.parameters = parameters;
  return request;
}

// What one gather puts on the rail of `rank`: nothing twice to any node.
uint64_t least_sent(const GroupLayout& layout, const Topology& topology) {
  uint64_t bytes = 0;
  for (int rank = 0; rank < topology.ranks(); ++rank)
    bytes += static_cast<uint64_t>((topology.nodes() - 1) * valid_bytes(layout, rank));
  return bytes;
}

TEST(EngineNodes, GathersAreBitExactInEverySchedule) {
  for (const Shape shape : kShapes) {
    for (const GatherSchedule schedule :
         {GatherSchedule::kDoubling, GatherSchedule::kRing, GatherSchedule::kDirect}) {
      for (const Pacing pacing :
           {Pacing::kOff, Pacing::kConfirmWhole, Pacing::kConfirmHead, Pacing::kGrant}) {
        NodesOptions options;
        options.group.rail_gather = {schedule, pacing, 700, 2000};
        options.is_shuffled = true;
        options.fate = [](int local) { return random_delays(local + 5, 300us); };
        std::atomic<uint64_t> sent{0};
        uint64_t least = 0;
        run_nodes(shape.nodes, shape.locals, options, [&](int rank, Group& group, auto& world) {
          const int ranks = world.topology.ranks();
          std::mt19937 random(100 + ranks);
          const auto parameters = random_parameters(
              random, ranks, 9, {DType::kBFloat16, DType::kFloat32, DType::kComplex128});
          const GroupLayout layout(parameters, ranks);
          auto answers = group.plan({request_of("layers.0", parameters)}, 1);
          TIDE_ASSERT_OK(answers.status());
          ASSERT_TRUE(answers.value()[0].accepted) << answers.value()[0].reason;
          for (int round = 0; round < 3; ++round) gather_and_check(group, 0, rank, layout);
          sent += group.counters().bytes_sent;
          if (rank == 0) least = 3 * least_sent(layout, world.topology);
        });
        EXPECT_EQ(sent, least) << shape.nodes << "x" << shape.locals;
      }
    }
  }
}

void run_reduces(Shape shape, bool slot_reuse) {
  NodesOptions options;
  options.group.staging_slice_bytes = 4096;  // many turns
  options.is_shuffled = true;
  options.fate = [](int local) { return random_delays(local + 9, 300us); };
  run_nodes(shape.nodes, shape.locals, options, [=](int rank, Group& group, auto& world) {
    const int ranks = world.topology.ranks();
    std::mt19937 random(7 * ranks);
    PlanRequest request =
        request_of("layers.0", random_parameters(random, ranks, 10, {DType::kBFloat16}, 900));
    const GroupLayout layout(request.parameters, ranks);
    auto answers = group.plan({request}, 1);
    TIDE_ASSERT_OK(answers.status());
    ASSERT_TRUE(answers.value()[0].accepted) << answers.value()[0].reason;
    EXPECT_EQ(answers.value()[0].staging, Staging::kArea);
    for (int round = 0; round < 5; ++round) {
      gather_and_check(group, 0, rank, layout);
      ReduceCase made = random_case(random, layout);
      made.slot_reuse = slot_reuse;
      auto outputs = make_outputs(layout, made.output_dtype);
      reduce_and_wait(group, 0, layout, rank, made, round, &outputs);
      check_outputs(layout, rank, made, outputs, round, sources_of(world.topology, rank));
    }
  });
}

TEST(EngineNodes, ReducesEqualTheReference) {
  for (const Shape shape : kShapes) run_reduces(shape, false);
}
TEST(EngineNodes, ReducesOfMovedGradientsEqualTheReference) {
  for (const Shape shape : kShapes) run_reduces(shape, true);
}

// Casts, several groups in flight, slots passed on, gathers and reduces at once.
TEST(EngineNodes, TrainingStepsWithManyOperationsInFlight) {
  for (const Shape shape : {Shape{2, 1}, Shape{2, 2}, Shape{3, 2}, Shape{5, 1}}) {
    NodesOptions options;
    options.group.staging_slice_bytes = 8192;
    options.group.rail_gather.part_bytes = 1000;
    options.is_shuffled = true;
    options.fate = [](int local) { return random_delays(local + 1, 500us); };
    run_nodes(shape.nodes, shape.locals, options, [=](int rank, Group& group, auto& world) {
      constexpr int kGroups = 4;
      const int ranks = world.topology.ranks();
      std::mt19937 random(3 * ranks);
      std::vector<PlanRequest> requests;
      std::vector<GroupLayout> layouts;
      for (int g = 0; g < kGroups; ++g) {
        requests.push_back(request_of("layers." + std::to_string(g),
                                      random_parameters(random, ranks, 5, {DType::kBFloat16})));
        requests.back().stays_unsharded = g == 0;
        layouts.emplace_back(requests.back().parameters, ranks);
      }
      auto answers = group.plan(requests, 1);
      TIDE_ASSERT_OK(answers.status());
      std::vector<std::vector<std::vector<uint8_t>>> shards;
      for (int g = 0; g < kGroups; ++g) shards.push_back(make_shards(layouts[g], rank));
      for (int step = 0; step < 4; ++step) {
        std::vector<std::shared_ptr<Operation>> reduces;
        std::vector<std::vector<std::vector<uint8_t>>> gradients, outputs;
        std::vector<ReduceCase> cases;
        const auto gather = [&](int g) {
          auto started = group.gather({g, pointers(shards[g])});
          EXPECT_TRUE(started.is_ok()) << started.status().to_string();
          return started.value();
        };
        GatherStarted next = gather(0);
        for (int g = 0; g < kGroups; ++g) {
          const GatherStarted now = next;
          if (g + 1 < kGroups) next = gather(g + 1);
          TIDE_ASSERT_OK(now.operation->wait());
          for (int p = 0; p < layouts[g].size(); ++p)
            EXPECT_EQ(wrong_bytes(layouts[g], p, now.places[p]), 0);
          TIDE_ASSERT_OK(group.vacate(g));
          cases.push_back(random_case(random, layouts[g]));
          gradients.push_back(make_gradients(layouts[g], rank, cases[g].dtypes, step));
          outputs.push_back(make_outputs(layouts[g], cases[g].output_dtype));
          auto reduce = group.reduce(call_of(g, cases[g], gradients[g], outputs[g]));
          TIDE_ASSERT_OK(reduce.status());
          reduces.push_back(reduce.value());
        }
        for (int g = 0; g < kGroups; ++g) {
          TIDE_ASSERT_OK(reduces[g]->wait());
          check_outputs(layouts[g], rank, cases[g], outputs[g], step,
                        sources_of(world.topology, rank));
        }
      }
    });
  }
}

TEST(EngineNodes, ListsGrowTheirSlotAndEqualTheReference) {
  for (const Shape shape : {Shape{2, 1}, Shape{2, 2}, Shape{3, 2}, Shape{5, 1}}) {
    NodesOptions options;
    options.is_shuffled = true;
    run_nodes(shape.nodes, shape.locals, options, [=](int rank, Group& group, auto& world) {
      const int ranks = world.topology.ranks();
      std::mt19937 random(40 + ranks);
      for (int round = 0; round < 5; ++round) {
        auto gathered = std::make_shared<GroupLayout>(
            random_parameters(random, ranks, 6, {DType::kBFloat16, DType::kInt64, DType::kBool},
                              500 << round),
            ranks);
        const auto shards = make_shards(*gathered, rank);
        std::vector<std::vector<uint8_t>> places;
        for (const Parameter& parameter : gathered->parameters())
          places.emplace_back(parameter.unsharded_numel * dtype_bytes(parameter.dtype));
        auto layout = std::make_shared<GroupLayout>(
            random_parameters(random, ranks, 8, {DType::kFloat32}), ranks);
        ReduceCase made;
        made.dtypes.assign(8, DType::kFloat32);
        made.options.scale = 0.25;
        if (round == 4) made.options = {ReduceOp::kMax, 1.0, false};
        const auto gradients = make_gradients(*layout, rank, made.dtypes, round);
        auto outputs = make_outputs(*layout, DType::kFloat32);
        auto gather = group.gather_list(gathered, pointers(shards), mutable_pointers(places));
        TIDE_ASSERT_OK(gather.status());
        auto reduce = group.reduce_list(layout, pointers(gradients), mutable_pointers(outputs),
                                        DType::kFloat32, made.options);
        TIDE_ASSERT_OK(reduce.status());
        TIDE_ASSERT_OK(gather.value()->wait());
        TIDE_ASSERT_OK(reduce.value()->wait());
        for (int p = 0; p < gathered->size(); ++p)
          EXPECT_EQ(wrong_bytes(*gathered, p, places[p].data()), 0);
        check_outputs(*layout, rank, made, outputs, round, sources_of(world.topology, rank));
      }
      auto bytes =
          std::make_shared<GroupLayout>(random_parameters(random, ranks, 2, {DType::kInt8}), ranks);
      std::vector<std::vector<uint8_t>> none(2, std::vector<uint8_t>(100000));
      const auto refused =
          group.reduce_list(bytes, pointers(none), mutable_pointers(none), DType::kInt8, {});
      EXPECT_EQ(refused.status().kind(), ErrorKind::kUnsupported);
      EXPECT_THAT(refused.status().message(), ::testing::HasSubstr("between nodes"));
    });
  }
}

}  // namespace
}  // namespace tide::testing
