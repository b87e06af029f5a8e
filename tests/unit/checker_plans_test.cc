// Single collectives: gather and reduce proven for 1..8 ranks over random layouts, in every form.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "backend/plan/checker.h"
#include "backend/plan/checker_sequence.h"
#include "tests/unit/plan_fixture.h"

namespace tide {
namespace {

using testing::all_processes;
using testing::column_parameter;
using testing::flat_parameter;
using testing::make_layout;
using testing::random_parameters;
using testing::reduce_all;

constexpr int kRandomOrders = 2;

// Bytes that one rank's gather must push: its valid shard elements to every peer.
int64_t gather_minimum(const GroupLayout& layout, int rank) {
  int64_t bytes = 0;
  for (int p = 0; p < layout.size(); ++p) {
    bytes += layout.valid_numel(p, rank) * dtype_bytes(layout.parameter(p).dtype);
  }
  return bytes * (layout.ranks() - 1);
}

// Bytes that one rank's reduce must push: its gradients but its own slice.
int64_t reduce_minimum(const GroupLayout& layout, const ReduceOptions& options, int rank) {
  int64_t bytes = 0;
  for (size_t i = 0; i < options.subset.size(); ++i) {
    const int p = options.subset[i];
    bytes += (layout.parameter(p).unsharded_numel - layout.valid_numel(p, rank)) *
             dtype_bytes(options.dtypes[i]);
  }
  return bytes;
}

// The same gather `times` times in a row, each used before the next; new shards between.
CheckReport check_gather(std::shared_ptr<const GroupLayout> layout, const GatherOptions& options,
                         int times = 2) {
  SequenceBuilder builder(layout->ranks());
  const int group = builder.add_group(all_processes(layout->ranks()));
  for (int i = 0; i < times; ++i) {
    const int gather = builder.gather(group, layout, options, 0);
    builder.operation(gather).slot = options.destination == Space::kSlot ? 0 : -1;
    builder.act(Action::kIssue, gather);
    builder.act(Action::kWait, gather);
    builder.act(Action::kUseGathered, gather);
    builder.act(Action::kUpdateShards, gather);
  }
  CheckReport report = check_all(builder.sequence(), kRandomOrders);
  for (int rank = 0; rank < layout->ranks() && report.is_ok(); ++rank) {
    EXPECT_EQ(report.pushed_bytes[rank], times * gather_minimum(*layout, rank));
  }
  return report;
}

// The same reduce `times` times in a row; gradients are written anew as soon as they were read.
CheckReport check_reduce(std::shared_ptr<const GroupLayout> layout, const ReduceOptions& options,
                         int times = 2) {
  SequenceBuilder builder(layout->ranks());
  const int group = builder.add_group(all_processes(layout->ranks()));
  std::vector<int> reduces;
  for (int i = 0; i < times; ++i) {
    const int reduce = builder.reduce(group, layout, options);
    builder.operation(reduce).outputs = i;
    if (options.areas == 1) {
      builder.operation(reduce).slot = 0;
      if (i > 0) builder.operation(reduce).after = {{reduces.back(), Dependency::Until::kSummed}};
    }
    if (i > 0) builder.act(Action::kWaitRead, reduces.back());
    builder.act(Action::kWriteGradients, reduce);
    builder.act(Action::kIssue, reduce);
    reduces.push_back(reduce);
  }
  for (int reduce : reduces) {
    builder.act(Action::kWait, reduce);
    builder.act(Action::kReadSummed, reduce);
  }
  CheckReport report = check_all(builder.sequence(), kRandomOrders);
  for (int rank = 0; rank < layout->ranks() && report.is_ok(); ++rank) {
    EXPECT_EQ(report.pushed_bytes[rank], times * reduce_minimum(*layout, options, rank));
  }
  return report;
}

class CheckerPlansTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, CheckerPlansTest, ::testing::Range(1, 9));

TEST_P(CheckerPlansTest, GatherToSlots) {
  std::mt19937 random(100 + GetParam());
  for (int round = 0; round < 4; ++round) {
    EXPECT_EQ(
        check_gather(make_layout(random_parameters(random, GetParam(), 4, 24), GetParam()), {})
            .error,
        "");
  }
}

TEST_P(CheckerPlansTest, GatherToOutputsStraightAndBounced) {
  std::mt19937 random(200 + GetParam());
  for (int round = 0; round < 4; ++round) {
    const auto layout = make_layout(random_parameters(random, GetParam(), 4, 40), GetParam());
    EXPECT_EQ(check_gather(layout, {Space::kOutput, false, 64}).error, "");
    EXPECT_EQ(check_gather(layout, {Space::kOutput, true, 64 << round}).error, "");
  }
}

TEST_P(CheckerPlansTest, GatherWithCasts) {
  std::mt19937 random(300 + GetParam());
  for (int round = 0; round < 3; ++round) {
    std::vector<Parameter> parameters = random_parameters(random, GetParam(), 4, 24);
    for (Parameter& parameter : parameters) {
      if (random() % 2 == 0) {
        parameter.dtype = DType::kBFloat16;
        parameter.shard_dtype = DType::kFloat32;
      }
    }
    EXPECT_EQ(check_gather(make_layout(std::move(parameters), GetParam()), {}).error, "");
  }
}

// One store to all, of shards and of places that a cast has written.
TEST_P(CheckerPlansTest, GatherToAll) {
  std::mt19937 random(350 + GetParam());
  GatherOptions options;
  options.to_all = true;
  for (int round = 0; round < 6; ++round) {
    std::vector<Parameter> parameters = random_parameters(random, GetParam(), 4, 24);
    for (Parameter& parameter : parameters) {
      if (round < 3 || random() % 2 == 0) continue;
      parameter.dtype = DType::kBFloat16;
      parameter.shard_dtype = DType::kFloat32;
    }
    const auto layout = make_layout(std::move(parameters), GetParam());
    EXPECT_EQ(check_gather(layout, options, 3).error, "");
    const Program program = plan_gather(*layout, 0, options);
    const auto copies = std::count_if(
        program.steps.begin(), program.steps.end(),
        [](const Step& step) { return step.op == Op::kCopy && step.queue == Queue::kGatherPush; });
    EXPECT_EQ(copies, GetParam() > 1 && !program.pieces.empty() ? 1 : 0);
  }
}

TEST_P(CheckerPlansTest, ReduceLeasedAndArea) {
  std::mt19937 random(400 + GetParam());
  for (int round = 0; round < 4; ++round) {
    const auto layout = make_layout(random_parameters(random, GetParam(), 4, 40), GetParam());
    EXPECT_EQ(check_reduce(layout, reduce_all(*layout, 1, 0)).error, "");
    EXPECT_EQ(check_reduce(layout, reduce_all(*layout, 2, 64 << round)).error, "");
  }
}

TEST_P(CheckerPlansTest, ReduceOfSubsets) {
  std::mt19937 random(500 + GetParam());
  for (int round = 0; round < 3; ++round) {
    const auto layout = make_layout(random_parameters(random, GetParam(), 6, 24), GetParam());
    ReduceOptions options;
    options.staging_slice_bytes = 128;
    options.areas = 1 + round % 2;
    for (int p = 0; p < layout->size(); ++p) {
      if (random() % 2 == 0) continue;
      options.subset.push_back(p);
      options.dtypes.push_back(random() % 2 == 0 ? DType::kFloat32 : layout->parameter(p).dtype);
    }
    EXPECT_EQ(check_reduce(layout, options).error, "");
  }
}

TEST(CheckerOnePlanTest, LeasedReduceInSeveralSums) {
  // Large enough to be divided; whole multiples of 64 bytes keep the number of cells small.
  const auto layout =
      make_layout({flat_parameter(kSmallestSumBytes * 3, 3), flat_parameter(64 * 3, 3)}, 3);
  const ReduceOptions options = reduce_all(*layout, 1, 0);
  ASSERT_EQ(plan_reduce(*layout, 0, options).advance[static_cast<size_t>(Counter::kReduceArrival)],
            2u);
  EXPECT_EQ(check_reduce(layout, options, 1).error, "");
}

TEST(CheckerOnePlanTest, DimensionOneCutInsideRows) {
  // 30 fp32 elements a row in chunks of 64 bytes: pieces start and end inside rows.
  const auto layout = make_layout({column_parameter(7, 30, 4, DType::kFloat32)}, 4);
  EXPECT_EQ(check_gather(layout, {Space::kOutput, true, 64}).error, "");
  EXPECT_EQ(check_reduce(layout, reduce_all(*layout, 2, 64)).error, "");
  EXPECT_EQ(check_reduce(layout, reduce_all(*layout, 1, 0)).error, "");
}

TEST(CheckerOnePlanTest, ManyParameters) {
  std::mt19937 random(9);
  const auto layout = make_layout(random_parameters(random, 4, 300, 6), 4);
  EXPECT_EQ(check_gather(layout, {}, 1).error, "");
  EXPECT_EQ(check_reduce(layout, reduce_all(*layout, 2, 1024), 1).error, "");
}

}  // namespace
}  // namespace tide
