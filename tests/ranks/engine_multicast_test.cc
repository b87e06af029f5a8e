// Groups whose slots and seats are open to all, emulated: gathers by one store to every rank,
// bit-exact; between nodes sums by the switch, within the bound of fp32 sums in any order; and
// wherever one rank refuses, pushes on all.
#include "tests/ranks/engine_numbers.h"
#ifndef TIDE_TEST_OVER_CUDA
#include "tests/ranks/engine_nodes_world.h"
#endif

namespace tide::testing {
namespace {

constexpr int kLeastRanks = kOverCuda ? 3 : 2;  // with fewer there is nothing to store to

PlanRequest request_of(const std::string& name, const std::vector<Parameter>& parameters) {
  PlanRequest request;
  request.name = name;
  request.parameters = parameters;
  return request;
}

// Shards of some parameters are fp32 and cast into their places.
std::vector<Parameter> with_masters(std::vector<Parameter> parameters) {
  for (size_t p = 0; p < parameters.size(); p += 2) {
    parameters[p].dtype = DType::kBFloat16;
    parameters[p].shard_dtype = DType::kFloat32;
  }
  return parameters;
}

TEST(EngineMulticast, AGatherIsOneCopyAndBitExact) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    WorldOptions options;
    options.fabric.multicast = true;
    run_ranks(ranks, options, [ranks](int rank, Group& group) {
      std::mt19937 random(100 + ranks);
      const auto parameters = random_parameters(
          random, ranks, 9, {DType::kBFloat16, DType::kFloat32, DType::kUInt8, DType::kComplex128});
      const GroupLayout layout(parameters, ranks);
      auto answers = group.plan({request_of("layers.0", parameters)}, 1);
      TIDE_ASSERT_OK(answers.status());
      for (int round = 0; round < 5; ++round) gather_and_check(group, 0, rank, layout);
      const GroupCounters counters = group.counters();
      const auto shard = static_cast<uint64_t>(valid_bytes(layout, rank));
      const bool is_open = ranks >= kLeastRanks;
      EXPECT_EQ(counters.copies_to_all, is_open ? 5u : 0u);
      EXPECT_EQ(counters.bytes_pushed,
                5 * shard * (is_open ? 1 : static_cast<uint64_t>(ranks - 1)));
      EXPECT_EQ(group.no_multicast().empty(), is_open || (!kOverCuda && ranks == 1));
    });
  }
}

TEST(EngineMulticast, CastPlacesGoToAllToo) {
  for (int ranks : {3, 5}) {
    WorldOptions options;
    options.fabric.multicast = true;
    run_ranks(ranks, options, [ranks](int rank, Group& group) {
      std::mt19937 random(200 + ranks);
      const auto parameters = with_masters(random_parameters(random, ranks, 6, {DType::kBFloat16}));
      const GroupLayout layout(parameters, ranks);
      auto answers = group.plan({request_of("layers.0", parameters)}, 1);
      TIDE_ASSERT_OK(answers.status());
      std::vector<std::vector<float>> shards;
      for (int p = 0; p < layout.size(); ++p) {
        shards.emplace_back(static_cast<size_t>(layout.parameter(p).shard_numel));
        if (layout.parameter(p).shard_dtype == DType::kFloat32) {
          for (size_t i = 0; i < shards.back().size(); ++i) {
            shards.back()[i] = gradient_at(
                0, p, place_of(layout.parameter(p), ranks, rank, static_cast<int64_t>(i)));
          }
        } else {
          for (size_t i = 0; i < shards.back().size(); ++i) {
            store(shards.back().data(), static_cast<int64_t>(i), DType::kBFloat16,
                  gradient_at(0, p,
                              place_of(layout.parameter(p), ranks, rank, static_cast<int64_t>(i))));
          }
        }
      }
      for (int round = 0; round < 3; ++round) {
        auto started = group.gather({0, pointers(shards)});
        TIDE_ASSERT_OK(started.status());
        TIDE_ASSERT_OK(started.value().operation->wait());
        for (int p = 0; p < layout.size(); ++p) {
          for (int64_t i = 0; i < layout.parameter(p).unsharded_numel; ++i) {
            ASSERT_EQ(load(started.value().places[p], i, DType::kBFloat16),
                      float_of_bf16(bf16_of(gradient_at(0, p, i))))
                << "parameter " << p << " at " << i;
          }
        }
        TIDE_ASSERT_OK(group.vacate(0));
      }
      EXPECT_EQ(group.counters().copies_to_all, 3u);
    });
  }
}

TEST(EngineMulticast, WhereOneRankRefusesAllPush) {
  for (int refusing = 0; refusing < 3; ++refusing) {
    WorldOptions options;
    options.fabric.multicast = true;
    options.fabric.refuse_multicast = [refusing](int rank) {
      return rank == refusing ? Status(ErrorKind::kUnsupported, "not here") : Status::ok();
    };
    run_ranks(3, options, [refusing](int rank, Group& group) {
      std::mt19937 random(300);
      const auto parameters = random_parameters(random, 3, 5, {DType::kBFloat16});
      const GroupLayout layout(parameters, 3);
      auto answers = group.plan({request_of("layers.0", parameters)}, 1);
      TIDE_ASSERT_OK(answers.status());
      ASSERT_TRUE(answers.value()[0].accepted) << answers.value()[0].reason;
      for (int round = 0; round < 3; ++round) gather_and_check(group, 0, rank, layout);
      EXPECT_EQ(group.counters().copies_to_all, 0u);
      EXPECT_EQ(group.counters().bytes_pushed,
                static_cast<uint64_t>(3 * 2 * valid_bytes(layout, rank)));
      EXPECT_EQ(group.no_multicast(), "rank " + std::to_string(refusing) + ": not here");
    });
  }
}

// Slots go from gathers to staging of reduces and back, two groups under way.
TEST(EngineMulticast, SlotsAreHandedOnBetweenGathersAndReduces) {
  WorldOptions options;
  options.fabric.multicast = true;
  run_ranks(4, options, [](int rank, Group& group) {
    std::mt19937 random(400);
    std::vector<PlanRequest> requests;
    std::vector<GroupLayout> layouts;
    for (int g = 0; g < 3; ++g) {
      requests.push_back(request_of("layers." + std::to_string(g),
                                    random_parameters(random, 4, 5, {DType::kBFloat16})));
      layouts.emplace_back(requests.back().parameters, 4);
    }
    auto answers = group.plan(requests, 1);
    TIDE_ASSERT_OK(answers.status());
    for (int round = 0; round < 4; ++round) {
      for (int g = 0; g < 3; ++g) {
        const auto shards = make_shards(layouts[g], rank);
        const int next = (g + 1) % 3;
        const auto next_shards = make_shards(layouts[next], rank);
        auto started = group.gather({g, pointers(shards)});
        TIDE_ASSERT_OK(started.status());
        auto ahead = group.gather({next, pointers(next_shards)});
        TIDE_ASSERT_OK(ahead.status());
        TIDE_ASSERT_OK(started.value().operation->wait());
        for (int p = 0; p < layouts[g].size(); ++p)
          EXPECT_EQ(wrong_bytes(layouts[g], p, started.value().places[p]), 0);
        TIDE_ASSERT_OK(group.vacate(g));
        const ReduceCase made = random_case(random, layouts[g]);
        auto outputs = make_outputs(layouts[g], made.output_dtype);
        reduce_and_wait(group, g, layouts[g], rank, made, round, &outputs);
        check_outputs(layouts[g], rank, made, outputs, round);
        TIDE_ASSERT_OK(ahead.value().operation->wait());
        for (int p = 0; p < layouts[next].size(); ++p)
          EXPECT_EQ(wrong_bytes(layouts[next], p, ahead.value().places[p]), 0);
        TIDE_ASSERT_OK(group.vacate(next));
      }
    }
    EXPECT_EQ(group.counters().copies_to_all, 24u);
  });
}

#ifndef TIDE_TEST_OVER_CUDA
struct Shape {
  int nodes;
  int locals;
};
constexpr Shape kShapes[] = {{2, 2}, {3, 2}, {2, 4}, {5, 3}};

NodesOptions open_nodes() {
  NodesOptions options;
  options.fabric.multicast = true;
  options.is_shuffled = true;
  options.fate = [](int local) { return random_delays(local + 5, 300us); };
  return options;
}

TEST(EngineMulticast, BetweenNodesGathersAreBitExactInEverySchedule) {
  for (const Shape shape : kShapes) {
    for (const GatherSchedule schedule :
         {GatherSchedule::kDoubling, GatherSchedule::kRing, GatherSchedule::kDirect}) {
      NodesOptions options = open_nodes();
      options.group.rail_gather = {schedule, Pacing::kConfirmHead, 700, 2000};
      run_nodes(shape.nodes, shape.locals, options, [&](int rank, Group& group, auto& world) {
        const int ranks = world.topology.ranks();
        std::mt19937 random(500 + ranks);
        const auto parameters =
            random_parameters(random, ranks, 6, {DType::kBFloat16, DType::kFloat32});
        const GroupLayout layout(parameters, ranks);
        auto answers = group.plan({request_of("layers.0", parameters)}, 1);
        TIDE_ASSERT_OK(answers.status());
        for (int round = 0; round < 3; ++round) gather_and_check(group, 0, rank, layout);
        EXPECT_EQ(group.no_multicast(), "");
        EXPECT_GE(group.counters().copies_to_all, 3u * static_cast<uint64_t>(shape.nodes));
        uint64_t stored = 0;  // every shard on the own rail, once
        for (int node = 0; node < shape.nodes; ++node) {
          stored += static_cast<uint64_t>(
              valid_bytes(layout, world.topology.rank(node, world.topology.local(rank))));
        }
        EXPECT_EQ(group.counters().bytes_pushed, 3 * stored);
      });
    }
  }
}

// Each output beside the fp64 sum; the bound is that of `ranks` fp32 additions in any order, and
// one rounding to the output's type.
void check_near(const GroupLayout& layout, int rank, const ReduceCase& made,
                const std::vector<std::vector<uint8_t>>& outputs, int round) {
  const auto before = make_outputs(layout, made.output_dtype);
  const double rounding = made.output_dtype == DType::kFloat32 ? 0x1p-23 : 0x1p-7;
  for (int p = 0; p < layout.size(); ++p) {
    if (made.dtypes[p] == DType::kBytes) {
      EXPECT_EQ(outputs[p], before[p]);
      continue;
    }
    const Parameter& parameter = layout.parameter(p);
    for (int64_t i = 0; i < parameter.shard_numel; ++i) {
      const int64_t place = place_of(parameter, layout.ranks(), rank, i);
      double sum = 0;
      double magnitude = 0;
      for (int r = 0; r < layout.ranks() && place < parameter.unsharded_numel; ++r) {
        float slice = gradient_at(r, p, place, round);
        if (made.dtypes[p] == DType::kBFloat16) slice = float_of_bf16(bf16_of(slice));
        sum += slice;
        magnitude += std::abs(slice);
      }
      double expected = sum * made.options.scale;
      const double held = load(before[p].data(), i, made.output_dtype);
      if (made.options.add_to_output) expected += held;
      const double bound = layout.ranks() * 0x1p-24 * magnitude * made.options.scale +
                           rounding * (std::abs(expected) + std::abs(held) * 0x1p-16);
      ASSERT_NEAR(load(outputs[p].data(), i, made.output_dtype), expected, bound)
          << "parameter " << p << " at " << i << ", rank " << rank << ", round " << round;
    }
  }
}

// Sums by the switch, and between them what it cannot add: the least of the gradients, by pushes.
TEST(EngineMulticast, BetweenNodesTheSwitchAdds) {
  for (const Shape shape : kShapes) {
    for (const bool deterministic : {false, true}) {
      NodesOptions options = open_nodes();
      options.group.staging_slice_bytes = 4096;  // many turns
      options.group.deterministic = deterministic;
      run_nodes(shape.nodes, shape.locals, options, [=](int rank, Group& group, auto& world) {
        const int ranks = world.topology.ranks();
        std::mt19937 random(7 * ranks);
        PlanRequest request =
            request_of("layers.0", random_parameters(random, ranks, 10, {DType::kBFloat16}, 900));
        const GroupLayout layout(request.parameters, ranks);
        TIDE_ASSERT_OK(group.plan({request}, 1).status());
        for (int round = 0; round < 9; ++round) {
          if (round % 4 == 0) gather_and_check(group, 0, rank, layout);
          ReduceCase made = random_case(random, layout);
          if (round % 3 == 2) {
            made.options.op = ReduceOp::kMin;
            made.options.scale = 1.0;
            made.options.add_to_output = false;
          }
          const uint64_t before = group.counters().read_adds;
          auto outputs = make_outputs(layout, made.output_dtype);
          reduce_and_wait(group, 0, layout, rank, made, round, &outputs);
          const bool by_switch = !deterministic && made.options.op == ReduceOp::kSum;
          EXPECT_EQ(group.counters().read_adds > before, by_switch);
          if (by_switch) {
            check_near(layout, rank, made, outputs, round);
          } else {
            check_outputs(layout, rank, made, outputs, round, sources_of(world.topology, rank));
          }
        }
      });
    }
  }
}

// One rank of one node refuses: the programs of all nodes are those of pushes.
TEST(EngineMulticast, BetweenNodesOneRefusalIsEverybodys) {
  NodesOptions options = open_nodes();
  options.refuse_multicast = [](int node, int local) {
    return node == 1 && local == 1 ? Status(ErrorKind::kUnsupported, "no slots left")
                                   : Status::ok();
  };
  run_nodes(3, 2, options, [](int rank, Group& group, auto& world) {
    std::mt19937 random(600);
    PlanRequest request =
        request_of("layers.0", random_parameters(random, 6, 5, {DType::kBFloat16}));
    const GroupLayout layout(request.parameters, 6);
    TIDE_ASSERT_OK(group.plan({request}, 1).status());
    for (int round = 0; round < 2; ++round) {
      gather_and_check(group, 0, rank, layout);
      const ReduceCase made = random_case(random, layout);
      auto outputs = make_outputs(layout, made.output_dtype);
      reduce_and_wait(group, 0, layout, rank, made, round, &outputs);
      check_outputs(layout, rank, made, outputs, round, sources_of(world.topology, rank));
    }
    EXPECT_EQ(group.counters().copies_to_all + group.counters().read_adds, 0u);
    EXPECT_THAT(group.no_multicast(), ::testing::HasSubstr("no slots left"));
  });
}
#endif

}  // namespace
}  // namespace tide::testing
