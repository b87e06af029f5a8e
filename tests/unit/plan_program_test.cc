#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <set>

#include "backend/plan/cut.h"
#include "backend/plan/gather_plan.h"
#include "backend/plan/program_cache.h"
#include "backend/plan/reduce_plan.h"
#include "tests/unit/plan_fixture.h"

namespace tide {
namespace {

using testing::column_parameter;
using testing::flat_parameter;
using testing::reduce_all;

uint32_t advance_of(const Program& program, Counter counter) {
  return program.advance[static_cast<size_t>(counter)];
}

int count_steps(const Program& program, Op op) {
  int count = 0;
  for (const Step& step : program.steps) count += step.op == op;
  return count;
}

TEST(GatherPlanTest, TextOfTheWorkedExample) {
  const GroupLayout layout({flat_parameter(6, 3), flat_parameter(9, 3)}, 3);
  EXPECT_EQ(to_string(plan_gather(layout, 1, {})),
            "gather, rank 1 of 3, 2 pieces\n"
            "gather_push  signal gather_credit to all = 1\n"
            "own          copy pieces [0, 2) of shard 1: shard -> slot\n"
            "gather_push  wait gather_credit from 2 >= 1\n"
            "gather_push  copy pieces [0, 2) of shard 1: shard -> slot of 2\n"
            "gather_push  signal gather_arrival to 2 = 1\n"
            "gather_push  wait gather_credit from 0 >= 1\n"
            "gather_push  copy pieces [0, 2) of shard 1: shard -> slot of 0\n"
            "gather_push  signal gather_arrival to 0 = 1\n"
            "arrive       wait gather_arrival from 0 >= 1\n"
            "arrive       wait gather_arrival from 2 >= 1\n");
}

TEST(GatherPlanTest, TextOfTheWorkedExampleToAll) {
  const GroupLayout layout({flat_parameter(6, 3), flat_parameter(9, 3)}, 3);
  GatherOptions options;
  options.to_all = true;
  EXPECT_EQ(to_string(plan_gather(layout, 1, options)),
            "gather, rank 1 of 3, 2 pieces\n"
            "gather_push  signal gather_credit to all = 1\n"
            "gather_push  wait gather_credit from 2 >= 1\n"
            "gather_push  wait gather_credit from 0 >= 1\n"
            "gather_push  copy pieces [0, 2) of shard 1: shard -> slot of all ranks\n"
            "gather_push  signal gather_arrival to all = 1\n"
            "arrive       wait gather_arrival from 0 >= 1\n"
            "arrive       wait gather_arrival from 2 >= 1\n");
  EXPECT_NE(plan_gather(layout, 1, options).hash, plan_gather(layout, 1, {}).hash);
  const GroupLayout alone({flat_parameter(6, 1)}, 1);
  EXPECT_EQ(to_string(plan_gather(alone, 0, options)), to_string(plan_gather(alone, 0, {})));
}

TEST(GatherPlanTest, CastWritesTheOwnPlaceAndPushesReadIt) {
  Parameter master = flat_parameter(8, 2);
  master.shard_dtype = DType::kFloat32;
  const GroupLayout layout({master, flat_parameter(4, 2), master}, 2);
  const Program program = plan_gather(layout, 0, {});
  EXPECT_EQ(to_string(program),
            "gather, rank 0 of 2, 3 pieces\n"
            "gather_push  signal gather_credit to all = 1\n"
            "own          cast pieces [0, 1) of shard 0: shard -> slot\n"
            "own          copy pieces [1, 2) of shard 0: shard -> slot\n"
            "own          cast pieces [2, 3) of shard 0: shard -> slot\n"
            "own          signal cast to self = 1\n"
            "gather_push  wait cast from self >= 1\n"
            "gather_push  wait gather_credit from 1 >= 1\n"
            "gather_push  copy pieces [0, 3) of shard 0: slot -> slot of 1\n"
            "gather_push  signal gather_arrival to 1 = 1\n"
            "arrive       wait gather_arrival from 1 >= 1\n");
  EXPECT_EQ(advance_of(program, Counter::kCast), 1u);
}

TEST(GatherPlanTest, BouncedTextOfTheWorkedExample) {
  // 96 bf16 elements a shard = 192 bytes: three chunks of 64.
  const GroupLayout layout({flat_parameter(192, 2)}, 2);
  EXPECT_EQ(to_string(plan_gather(layout, 0, {Space::kOutput, true, 64})),
            "gather, rank 0 of 2, 3 pieces\n"
            "unpack       signal landing_credit to all = 2\n"
            "own          copy pieces [0, 3) of shard 0: shard -> output\n"
            "gather_push  wait landing_credit from 1 >= 2\n"
            "gather_push  copy pieces [0, 1) of shard 0: shard -> landing[0][0] of 1\n"
            "gather_push  signal gather_arrival to 1 = 1\n"
            "gather_push  copy pieces [1, 2) of shard 0: shard -> landing[1][0] of 1\n"
            "gather_push  signal gather_arrival to 1 = 2\n"
            "unpack       wait gather_arrival from 1 >= 1\n"
            "unpack       copy pieces [0, 1) of shard 1: landing[0][1] -> output\n"
            "unpack       signal landing_credit to all = 3\n"
            "gather_push  wait landing_credit from 1 >= 3\n"
            "gather_push  copy pieces [2, 3) of shard 0: shard -> landing[0][0] of 1\n"
            "gather_push  signal gather_arrival to 1 = 3\n"
            "unpack       wait gather_arrival from 1 >= 2\n"
            "unpack       copy pieces [1, 2) of shard 1: landing[1][1] -> output\n"
            "unpack       wait gather_arrival from 1 >= 3\n"
            "unpack       copy pieces [2, 3) of shard 1: landing[0][1] -> output\n");
}

TEST(GatherPlanTest, StraightAndBouncedFormAreInterchangeable) {
  std::mt19937 random(3);
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (int round = 0; round < 10; ++round) {
      const GroupLayout layout(testing::random_parameters(random, ranks, 5, 200), ranks);
      for (int rank = 0; rank < ranks; ++rank) {
        const Program straight = plan_gather(layout, rank, {Space::kOutput, false, 128});
        const Program bounced = plan_gather(layout, rank, {Space::kOutput, true, 128});
        EXPECT_EQ(straight.advance, bounced.advance);
        EXPECT_EQ(straight.hash, bounced.hash);
        EXPECT_EQ(straight.areas, 0);
      }
    }
  }
}

TEST(ReducePlanTest, LeasedTextOfTheWorkedExample) {
  const GroupLayout layout({flat_parameter(6, 3), flat_parameter(9, 3)}, 3);
  const Program program = plan_reduce(layout, 1, reduce_all(layout, 1, 4096));
  EXPECT_EQ(to_string(program),
            "reduce, rank 1 of 3, 2 pieces\n"
            "reduce_push  signal lease_credit to all = 1\n"
            "reduce_push  wait lease_credit from 2 >= 1\n"
            "reduce_push  copy pieces [0, 2) of shard 2: gradient -> staging[0][1] of 2\n"
            "reduce_push  signal reduce_arrival to 2 = 1\n"
            "reduce_push  wait lease_credit from 0 >= 1\n"
            "reduce_push  copy pieces [0, 2) of shard 0: gradient -> staging[0][1] of 0\n"
            "reduce_push  signal reduce_arrival to 0 = 1\n"
            "sum          wait reduce_arrival from 0 >= 1\n"
            "sum          wait reduce_arrival from 2 >= 1\n"
            "sum          accumulate pieces [0, 2) of shard 1: staging[0] + gradient -> output\n");
  EXPECT_EQ(program.last_gradient_read, 9);
  EXPECT_EQ(program.slice_bytes, 128);
}

TEST(ReducePlanTest, AreaTextOfTheWorkedExample) {
  const GroupLayout layout({flat_parameter(192, 2)}, 2);
  EXPECT_EQ(to_string(plan_reduce(layout, 0, reduce_all(layout, 2, 64))),
            "reduce, rank 0 of 2, 3 pieces\n"
            "sum          signal reduce_credit to all = 2\n"
            "reduce_push  wait reduce_credit from 1 >= 2\n"
            "reduce_push  copy pieces [0, 1) of shard 1: gradient -> staging[0][0] of 1\n"
            "reduce_push  signal reduce_arrival to 1 = 1\n"
            "reduce_push  copy pieces [1, 2) of shard 1: gradient -> staging[1][0] of 1\n"
            "reduce_push  signal reduce_arrival to 1 = 2\n"
            "sum          wait reduce_arrival from 1 >= 1\n"
            "sum          accumulate pieces [0, 1) of shard 0: staging[0] + gradient -> output\n"
            "sum          signal reduce_credit to all = 3\n"
            "reduce_push  wait reduce_credit from 1 >= 3\n"
            "reduce_push  copy pieces [2, 3) of shard 1: gradient -> staging[0][0] of 1\n"
            "reduce_push  signal reduce_arrival to 1 = 3\n"
            "sum          wait reduce_arrival from 1 >= 2\n"
            "sum          accumulate pieces [1, 2) of shard 0: staging[1] + gradient -> output\n"
            "sum          wait reduce_arrival from 1 >= 3\n"
            "sum          accumulate pieces [2, 3) of shard 0: staging[0] + gradient -> output\n");
}

TEST(ReducePlanTest, LargeLeasedReduceIsDividedIntoSums) {
  const GroupLayout layout({flat_parameter(kSmallestSumBytes * 4, 2)}, 2);
  ReduceOptions options = reduce_all(layout, 1, 0);
  Program program = plan_reduce(layout, 0, options);
  EXPECT_EQ(count_steps(program, Op::kAccumulate), 2);
  EXPECT_EQ(advance_of(program, Counter::kReduceArrival), 2u);
  EXPECT_EQ(advance_of(program, Counter::kLeaseCredit), 1u);
  EXPECT_EQ(program.slice_bytes, packed_shard_bytes(layout, options));
  options.sums = 1;
  EXPECT_EQ(count_steps(plan_reduce(layout, 0, options), Op::kAccumulate), 1);
  options.sums = 100;  // each part must keep kSmallestSumBytes
  EXPECT_EQ(count_steps(plan_reduce(layout, 0, options), Op::kAccumulate), 4);
}

TEST(ReducePlanTest, SubsetTouchesNothingElse) {
  const GroupLayout layout({flat_parameter(8, 2), flat_parameter(8, 2), flat_parameter(8, 2)}, 2);
  ReduceOptions options;
  options.subset = {0, 2};
  options.dtypes = {DType::kFloat32, DType::kBFloat16};
  options.staging_slice_bytes = 4096;
  const Program program = plan_reduce(layout, 1, options);
  ASSERT_EQ(program.pieces.size(), 2u);
  EXPECT_EQ(program.pieces[0].parameter, 0);
  EXPECT_EQ(program.pieces[1].parameter, 2);
  EXPECT_EQ(program.pieces[1].packed_offset, 64);
  ReduceOptions other = options;
  other.subset = {0, 1};
  EXPECT_NE(plan_reduce(layout, 1, other).hash, program.hash);
  other = options;
  other.dtypes[0] = DType::kBFloat16;
  EXPECT_NE(plan_reduce(layout, 1, other).hash, program.hash);
}

TEST(PlanTest, HashAndAdvanceAreEqualOnAllRanks) {
  std::mt19937 random(5);
  const GroupLayout layout(testing::random_parameters(random, 8, 9, 100), 8);
  for (int rank = 1; rank < 8; ++rank) {
    EXPECT_EQ(plan_gather(layout, rank, {}).hash, plan_gather(layout, 0, {}).hash);
    EXPECT_EQ(plan_gather(layout, rank, {}).advance, plan_gather(layout, 0, {}).advance);
    EXPECT_EQ(plan_reduce(layout, rank, reduce_all(layout, 2, 256)).hash,
              plan_reduce(layout, 0, reduce_all(layout, 2, 256)).hash);
    EXPECT_EQ(plan_reduce(layout, rank, reduce_all(layout, 2, 256)).advance,
              plan_reduce(layout, 0, reduce_all(layout, 2, 256)).advance);
  }
  EXPECT_NE(plan_gather(layout, 0, {}).hash,
            plan_gather(layout, 0, {Space::kOutput, false, 64}).hash);
}

TEST(PlanTest, EmptyLayoutsHaveNoSteps) {
  const GroupLayout layout({flat_parameter(0, 4), flat_parameter(0, 4)}, 4);
  for (const Program& program :
       {plan_gather(layout, 1, {}), plan_gather(layout, 1, {Space::kOutput, true, 64}),
        plan_reduce(layout, 1, reduce_all(layout, 1, 64)),
        plan_reduce(layout, 1, reduce_all(layout, 2, 64))}) {
    EXPECT_TRUE(program.steps.empty());
    EXPECT_EQ(program.last_gradient_read, -1);
    for (uint32_t advance : program.advance) EXPECT_EQ(advance, 0u);
  }
}

TEST(PlanTest, OneRankNeedsNoCounters) {
  const GroupLayout layout({flat_parameter(40, 1)}, 1);
  for (const Program& program :
       {plan_gather(layout, 0, {}), plan_gather(layout, 0, {Space::kOutput, true, 64}),
        plan_reduce(layout, 0, reduce_all(layout, 1, 64)),
        plan_reduce(layout, 0, reduce_all(layout, 2, 64))}) {
    EXPECT_GE(program.steps.size(), 1u);
    EXPECT_EQ(count_steps(program, Op::kSignal) + count_steps(program, Op::kWait), 0);
  }
}

TEST(PlanTest, StepsDoNotGrowWithTheNumberOfParameters) {
  std::vector<Parameter> parameters;
  for (int p = 0; p < 1000; ++p) parameters.push_back(flat_parameter(64 + p, 4));
  const GroupLayout few({parameters[0]}, 4);
  const GroupLayout many(parameters, 4);
  EXPECT_EQ(plan_gather(many, 2, {}).steps.size(), plan_gather(few, 2, {}).steps.size());
  EXPECT_EQ(plan_gather(many, 2, {}).pieces.size(), 1000u);
  EXPECT_EQ(plan_reduce(many, 2, reduce_all(many, 2, 1 << 20)).steps.size(),
            plan_reduce(few, 2, reduce_all(few, 2, 1 << 20)).steps.size());
}

TEST(PlanTest, SizesBeyond32Bits) {
  constexpr int64_t kNumel = int64_t{5} << 32;
  const GroupLayout layout({flat_parameter(kNumel, 4), flat_parameter(kNumel, 4)}, 4);
  const Program gather = plan_gather(layout, 0, {});
  EXPECT_EQ(gather.pieces[1].numel, kNumel / 4);
  const ReduceOptions leased = reduce_all(layout, 1, 0);
  EXPECT_EQ(packed_shard_bytes(layout, leased), kNumel);
  EXPECT_EQ(plan_reduce(layout, 0, leased).slice_bytes, kNumel);
  const int64_t slice_bytes = int64_t{1} << 30;
  EXPECT_EQ(advance_of(plan_reduce(layout, 0, reduce_all(layout, 2, slice_bytes)),
                       Counter::kReduceArrival),
            static_cast<uint32_t>(kNumel / slice_bytes));
}

TEST(PlanTest, EachCounterIsSignalledFromOneQueueInEveryProgram) {
  const GroupLayout layout({flat_parameter(1000, 3), column_parameter(4, 30, 3)}, 3);
  std::vector<Program> programs;
  programs.push_back(plan_gather(layout, 1, {}));
  for (bool bounced : {false, true})
    programs.push_back(plan_gather(layout, 1, {Space::kOutput, bounced, 128}));
  for (int areas : {1, 2})
    programs.push_back(plan_reduce(layout, 1, reduce_all(layout, areas, 128)));
  std::array<std::set<Queue>, kCounterCount> queues;
  for (const Program& program : programs) {
    for (const Step& step : program.steps) {
      if (step.op == Op::kSignal) queues[static_cast<size_t>(step.counter)].insert(step.queue);
    }
  }
  for (const std::set<Queue>& of_counter : queues) EXPECT_LE(of_counter.size(), 1u);
}

TEST(CutTest, WorkedExample) {
  CutLimits limits;
  limits.largest_bytes = 128;
  const Cut cut = cut_chunks({{0, 40, 4}, {1, 10, 4}}, limits);
  ASSERT_EQ(cut.chunks(), 2);
  ASSERT_EQ(cut.pieces.size(), 3u);
  EXPECT_EQ(cut.pieces[0].numel, 32);
  EXPECT_EQ(cut.pieces[1].begin, 32);
  EXPECT_EQ(cut.pieces[1].packed_offset, 0);
  EXPECT_EQ(cut.pieces[2].packed_offset, 64);
}

TEST(CutTest, CoversEveryElementOnceWithinTheLimit) {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    std::vector<CutItem> items;
    for (int i = 0; i < 6; ++i) {
      items.push_back({i, static_cast<int64_t>(random() % 300), int64_t{1} << (random() % 5)});
    }
    CutLimits limits;
    limits.largest_bytes = 1 + static_cast<int64_t>(random() % 1000);
    limits.wanted_chunks = 1 + random() % 4;
    limits.smallest_bytes = 512;
    limits.one_slice = round % 2 == 1;
    const Cut cut = cut_chunks(items, limits);
    const int64_t room = std::max<int64_t>(64, limits.largest_bytes / 64 * 64);
    std::vector<int64_t> reached(items.size(), 0);
    for (int chunk = 0; chunk < cut.chunks(); ++chunk) {
      int64_t used = limits.one_slice && chunk > 0 ? -1 : 0;
      int64_t start = 0;
      for (int i = cut.first(chunk); i < cut.ends[chunk]; ++i) {
        const Piece& piece = cut.pieces[i];
        if (used < 0) used = piece.packed_offset;
        if (i == cut.first(chunk)) start = used;
        EXPECT_EQ(piece.packed_offset, used);
        EXPECT_EQ(piece.begin, reached[piece.parameter]);
        EXPECT_GT(piece.numel, 0);
        reached[piece.parameter] += piece.numel;
        used += align_piece(piece.numel * items[piece.parameter].element_bytes);
      }
      EXPECT_GT(used, start);
      EXPECT_LE(used - start, room);
    }
    for (size_t i = 0; i < items.size(); ++i) EXPECT_EQ(reached[i], items[i].numel);
  }
}

TEST(ProgramCacheTest, KeepsTheMostRecentlyUsed) {
  const GroupLayout layout({flat_parameter(100, 2)}, 2);
  ProgramCache cache(0, 3);
  const auto straight = cache.gather(layout, {});
  EXPECT_EQ(cache.gather(layout, {}), straight);
  EXPECT_EQ(cache.planned(), 1u);
  const auto to_outputs = cache.gather(layout, {Space::kOutput, false, 64});
  EXPECT_NE(cache.gather(layout, {Space::kOutput, true, 64}), to_outputs);
  EXPECT_EQ(cache.planned(), 3u);
  cache.gather(layout, {});  // used again, so the oldest is now a gather to outputs
  cache.reduce(layout, reduce_all(layout, 2, 64));
  EXPECT_EQ(cache.size(), 3u);
  EXPECT_EQ(cache.gather(layout, {}), straight);
  EXPECT_EQ(cache.planned(), 4u);
  cache.gather(layout, {Space::kOutput, false, 64});
  EXPECT_EQ(cache.planned(), 5u);
}

TEST(ProgramCacheTest, TellsLayoutsSubsetsAndDtypesApart) {
  const GroupLayout layout({flat_parameter(100, 2), flat_parameter(100, 2)}, 2);
  const GroupLayout other({flat_parameter(100, 2), flat_parameter(102, 2)}, 2);
  ProgramCache cache(1);
  ReduceOptions options = reduce_all(layout, 2, 64);
  std::set<std::shared_ptr<const Program>> programs = {cache.reduce(layout, options),
                                                       cache.reduce(other, options)};
  options.dtypes[1] = DType::kFloat32;
  programs.insert(cache.reduce(layout, options));
  options.subset = {0};
  options.dtypes = {DType::kFloat32};
  programs.insert(cache.reduce(layout, options));
  options.areas = 1;
  programs.insert(cache.reduce(layout, options));
  EXPECT_EQ(programs.size(), 5u);
}

// Not a pass/fail limit: prints what planning costs on this machine.
TEST(PlanTest, PrintsPlanningTime) {
  const auto microseconds = [](auto make) {
    constexpr int kTimes = 20;
    const auto start = std::chrono::steady_clock::now();
    size_t steps = 0;
    for (int i = 0; i < kTimes; ++i) steps += make().steps.size();
    EXPECT_GT(steps, 0u);
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
               .count() /
           kTimes;
  };
  for (int count : {1, 2000}) {
    std::vector<Parameter> parameters(static_cast<size_t>(count), flat_parameter(8 * 3000, 8));
    const GroupLayout layout(parameters, 8);
    const ReduceOptions leased = reduce_all(layout, 1, 0);
    const ReduceOptions area = reduce_all(layout, 2, 64 << 10);
    std::printf(
        "%4d pieces: gather %.1f us, bounced %.1f us, leased reduce %.1f us, area reduce %.1f us\n",
        count, microseconds([&] { return plan_gather(layout, 3, {}); }), microseconds([&] {
          return plan_gather(layout, 3, {Space::kOutput, true, 64 << 10});
        }),
        microseconds([&] { return plan_reduce(layout, 3, leased); }),
        microseconds([&] { return plan_reduce(layout, 3, area); }));
  }
}

}  // namespace
}  // namespace tide
