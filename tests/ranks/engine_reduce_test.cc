// Reduces over ranks as threads: bit-equal to the naive fp32 reference, in every form of staging.
#include "tests/ranks/engine_numbers.h"

namespace tide::testing {
namespace {

enum class Mode { kLeased, kArea, kSlotReuse };

void run_planned(int ranks, Mode mode) {
  WorldOptions options;
  options.group.staging_slice_bytes = 2048;  // many chunks
  run_ranks(ranks, options, [ranks, mode](int rank, Group& group) {
    std::mt19937 random(7 * ranks + static_cast<int>(mode));
    PlanRequest request;
    request.name = "layers.0";
    request.parameters = random_parameters(random, ranks, 10, {DType::kBFloat16});
    request.may_lease = mode == Mode::kLeased;
    const GroupLayout layout(request.parameters, ranks);
    auto answers = group.plan({request}, 1);
    TIDE_ASSERT_OK(answers.status());
    ASSERT_TRUE(answers.value()[0].accepted) << answers.value()[0].reason;
    const Staging staging = ranks == 1              ? Staging::kNone
                            : mode == Mode::kLeased ? Staging::kLeased
                                                    : Staging::kArea;
    EXPECT_EQ(answers.value()[0].staging, staging);
    for (int round = 0; round < 6; ++round) {
      gather_and_check(group, 0, rank, layout);
      ReduceCase made = random_case(random, layout);
      made.slot_reuse = mode == Mode::kSlotReuse;
      auto outputs = make_outputs(layout, made.output_dtype);
      reduce_and_wait(group, 0, layout, rank, made, round, &outputs);
      check_outputs(layout, rank, made, outputs, round);
    }
  });
}

TEST(EngineReduce, LeasedStagingEqualsTheReference) {
  for (int ranks = 1; ranks <= 8; ++ranks) run_planned(ranks, Mode::kLeased);
}
TEST(EngineReduce, AreaStagingEqualsTheReference) {
  for (int ranks = 1; ranks <= 8; ++ranks) run_planned(ranks, Mode::kArea);
}
TEST(EngineReduce, SlotReuseEqualsTheReference) {
  for (int ranks = 1; ranks <= 8; ++ranks) run_planned(ranks, Mode::kSlotReuse);
}

TEST(EngineReduce, ListsEqualTheReference) {
  for (int ranks : {1, 2, 3, 5, 8}) {
    WorldOptions options;
    options.group.staging_slice_bytes = 1536;
    run_ranks(ranks, options, [ranks](int rank, Group& group) {
      std::mt19937 random(40 + ranks);
      for (int round = 0; round < 4; ++round) {
        const bool wide = round % 2 == 1;
        auto layout = std::make_shared<GroupLayout>(
            random_parameters(random, ranks, 8, {wide ? DType::kFloat32 : DType::kBFloat16}),
            ranks);
        ReduceCase made;
        made.dtypes.assign(static_cast<size_t>(layout->size()),
                           wide ? DType::kFloat32 : DType::kBFloat16);
        made.output_dtype = made.dtypes[0];
        made.options.scale = 0.25;
        const auto gradients = make_gradients(*layout, rank, made.dtypes, round);
        auto outputs = make_outputs(*layout, made.output_dtype);
        auto operation = group.reduce_list(layout, pointers(gradients), mutable_pointers(outputs),
                                           made.output_dtype, made.options);
        TIDE_ASSERT_OK(operation.status());
        TIDE_ASSERT_OK(operation.value()->wait());
        check_outputs(*layout, rank, made, outputs, round);
      }
    });
  }
}

TEST(EngineReduce, MinAndMaxOfLists) {
  if (kOverCuda) GTEST_SKIP() << "the kernels of the CUDA fabric only add";
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    run_ranks(4, {}, [op](int rank, Group& group) {
      std::mt19937 random(60);
      auto layout =
          std::make_shared<GroupLayout>(random_parameters(random, 4, 5, {DType::kFloat32}), 4);
      ReduceCase made;
      made.dtypes.assign(5, DType::kFloat32);
      made.options.op = op;
      const auto gradients = make_gradients(*layout, rank, made.dtypes);
      auto outputs = make_outputs(*layout, DType::kFloat32);
      auto operation = group.reduce_list(layout, pointers(gradients), mutable_pointers(outputs),
                                         DType::kFloat32, made.options);
      TIDE_ASSERT_OK(operation.status());
      TIDE_ASSERT_OK(operation.value()->wait());
      check_outputs(*layout, rank, made, outputs, 0);
    });
  }
}

// One large and many small contributions: a running sum in bf16 loses every small one, fp32 keeps
// them.
TEST(EngineReduce, SmallContributionsOfSixtyFourRanksAreNotLost) {
  constexpr int kRanks = 64;
  constexpr float kLarge = 256.0f;
  constexpr float kSmall = 0.5f;  // half a unit in the last place of bf16(256) is 1
  float naive = 0;
  for (int rank = 0; rank < kRanks; ++rank)
    naive = float_of_bf16(bf16_of(naive + (rank == 0 ? kLarge : kSmall)));
  EXPECT_EQ(naive, kLarge);  // all 63 small ones lost
  const float reference = kLarge + 63 * kSmall;

  WorldOptions options;
  options.group.staging_slice_bytes = 4096;
  run_ranks(kRanks, options, [&](int rank, Group& group) {
    Parameter parameter;
    parameter.name = "w";
    parameter.dtype = parameter.shard_dtype = DType::kBFloat16;
    parameter.shard_numel = 100;
    parameter.unsharded_numel = kRanks * 100;
    auto layout = std::make_shared<GroupLayout>(std::vector<Parameter>{parameter}, kRanks);
    const std::vector<uint16_t> gradient(kRanks * 100, bf16_of(rank == 0 ? kLarge : kSmall));
    std::vector<float> output(100);
    auto operation =
        group.reduce_list(layout, {gradient.data()}, {output.data()}, DType::kFloat32, {});
    TIDE_ASSERT_OK(operation.status());
    TIDE_ASSERT_OK(operation.value()->wait());
    for (const float value : output) ASSERT_EQ(value, reference);
  });
}

}  // namespace
}  // namespace tide::testing
