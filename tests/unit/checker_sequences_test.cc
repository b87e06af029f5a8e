// Sequences: whole training steps, because slot, lease and area mistakes show only between
// operations.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "backend/plan/checker.h"
#include "backend/plan/checker_sequence.h"
#include "tests/unit/plan_fixture.h"

namespace tide {
namespace {

using testing::all_processes;
using ::testing::HasSubstr;
using testing::make_layout;
using testing::random_parameters;
using testing::reduce_all;

std::vector<std::shared_ptr<const GroupLayout>> make_layers(int layers, int ranks, int seed) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  std::vector<std::shared_ptr<const GroupLayout>> layouts;
  for (int layer = 0; layer < layers; ++layer) {
    layouts.push_back(make_layout(random_parameters(random, ranks, 3, 20), ranks));
  }
  return layouts;
}

void train(Training& training, int steps) {
  for (int step = 0; step < steps; ++step) {
    for (int layer = 0; layer < training.layers(); ++layer) training.forward(layer);
    for (int layer = training.layers() - 1; layer >= 0; --layer) training.backward(layer);
    training.update();
  }
}

// The memory and staging modes that exist: Slot-Reuse never leases.
std::vector<TrainingOptions> all_modes(int prefetch) {
  TrainingOptions options;
  options.prefetch = prefetch;
  std::vector<TrainingOptions> modes(3, options);
  modes[0].leased = true;
  modes[1].leased = false;
  modes[2].slot_reuse = true;
  return modes;
}

TEST(CheckerSequenceTest, FourGroupsForwardAndBackward) {
  for (int ranks : {1, 2, 3, 4, 8}) {
    for (int prefetch : {1, 2}) {
      for (TrainingOptions options : all_modes(prefetch)) {
        options.keep_last = prefetch == 2;
        SequenceBuilder builder(ranks);
        options.group = builder.add_group(all_processes(ranks));
        Training training(&builder, make_layers(4, ranks, ranks), options);
        train(training, 2);
        const CheckReport report = check_all(builder.sequence(), ranks > 4 ? 0 : 2);
        EXPECT_EQ(report.error, "") << ranks << " ranks, prefetch " << prefetch << ", leased "
                                    << options.leased << ", slot reuse " << options.slot_reuse;
      }
    }
  }
}

TEST(CheckerSequenceTest, SecondRootInTheSameGroup) {
  for (TrainingOptions options : all_modes(1)) {
    SequenceBuilder builder(3);
    options.group = builder.add_group(all_processes(3));
    options.ring = std::make_shared<CheckedSlots>(2 * slots_for(options));
    TrainingOptions other = options;
    other.first_shards = 4;
    other.first_gradients = 2;
    Training first(&builder, make_layers(4, 3, 1), options);
    Training second(&builder, make_layers(4, 3, 2), other);
    for (int step = 0; step < 2; ++step) {
      for (int layer = 0; layer < 4; ++layer) {
        first.forward(layer);
        second.forward(layer);
      }
      for (int layer = 3; layer >= 0; --layer) {
        second.backward(layer);
        first.backward(layer);
      }
      first.update();
      second.update();
    }
    EXPECT_EQ(check_all(builder.sequence(), 2).error, "");
  }
}

TEST(CheckerSequenceTest, SecondGroupOfOtherRanksInterleaved) {
  // Four processes in one group, and in two pairs, ranks of the pairs in another order.
  for (TrainingOptions options : all_modes(1)) {
    SequenceBuilder builder(4);
    options.group = builder.add_group(all_processes(4));
    TrainingOptions pair = options;
    pair.first_gradients = 2;
    pair.group = builder.add_group({1, 0});
    TrainingOptions other_pair = pair;
    other_pair.group = builder.add_group({2, 3});
    Training world(&builder, make_layers(3, 4, 3), options);
    Training left(&builder, make_layers(3, 2, 4), pair);
    Training right(&builder, make_layers(3, 2, 5), other_pair);
    for (int step = 0; step < 2; ++step) {
      for (int layer = 0; layer < 3; ++layer) {
        for (Training* training : {&world, &left, &right}) training->forward(layer);
      }
      for (int layer = 2; layer >= 0; --layer) {
        for (Training* training : {&left, &right, &world}) training->backward(layer);
      }
      for (Training* training : {&right, &world, &left}) training->update();
    }
    EXPECT_EQ(check_all(builder.sequence(), 2).error, "");
  }
}

// Gathers to slots, straight and bounced gathers to outputs, and both kinds of reduce share one
// group's counters.
TEST(CheckerSequenceTest, AllFormsInTurnWithoutWaiting) {
  std::mt19937 random(21);
  for (int ranks : {2, 3, 5}) {
    SequenceBuilder builder(ranks);
    const int group = builder.add_group(all_processes(ranks));
    std::vector<int> gathers, reduces;
    for (int i = 0; i < 12; ++i) {
      const auto layout = make_layout(random_parameters(random, ranks, 3, 60), ranks);
      if (i % 5 >= 3) {
        const bool leased = i % 5 == 3;
        const int reduce =
            builder.reduce(group, layout, reduce_all(*layout, leased ? 1 : 2, 64 + 64 * (i % 3)));
        builder.operation(reduce).slot = leased ? 100 + i : -1;
        builder.operation(reduce).gradients = builder.operation(reduce).outputs = i;
        builder.operation(reduce).outputs += 100;
        builder.act(Action::kWriteGradients, reduce);
        builder.act(Action::kIssue, reduce);
        reduces.push_back(reduce);
        continue;
      }
      const GatherOptions options = {i % 5 == 0 ? Space::kSlot : Space::kOutput, i % 5 == 1,
                                     64 + 64 * (i % 2)};
      const int gather = builder.gather(group, layout, options, i);
      builder.operation(gather).slot = i % 5 == 0 ? i : -1;
      builder.act(Action::kIssue, gather);
      gathers.push_back(gather);
    }
    for (int gather : gathers) {
      builder.act(Action::kWait, gather);
      builder.act(Action::kUseGathered, gather);
    }
    for (int reduce : reduces) {
      builder.act(Action::kWait, reduce);
      builder.act(Action::kReadSummed, reduce);
    }
    EXPECT_EQ(check_all(builder.sequence(), 4).error, "") << ranks << " ranks";
  }
}

// ---- What the checker must not let pass ----

CheckedSequence training_sequence(TrainingOptions options, int ranks = 3) {
  SequenceBuilder builder(ranks);
  options.group = builder.add_group(all_processes(ranks));
  Training training(&builder, make_layers(4, ranks, 8), options);
  train(training, 2);
  return builder.sequence();
}

TEST(CheckerCatchesTest, SlotHandedOutBeforeTheSum) {
  CheckedSequence sequence = training_sequence(all_modes(1)[0]);
  ASSERT_EQ(check(sequence, {}).error, "");
  for (CheckedOperation& operation : sequence.operations) operation.after.clear();
  EXPECT_NE(check(sequence, {}).error, "");
}

TEST(CheckerCatchesTest, SlotHandedOutBeforeMovedGradientsWereRead) {
  CheckedSequence sequence = training_sequence(all_modes(1)[2]);
  ASSERT_EQ(check(sequence, {}).error, "");
  for (CheckedOperation& operation : sequence.operations) operation.after.clear();
  EXPECT_NE(check(sequence, {}).error, "");
}

TEST(CheckerCatchesTest, GatherIntoASlotThatIsStillUsed) {
  for (const TrainingOptions& options : all_modes(1)) {
    CheckedSequence sequence = training_sequence(options);
    // The prefetched second gather takes the slot of the first.
    sequence.operations[1].slot = sequence.operations[0].slot;
    EXPECT_NE(check(sequence, {}).error, "");
  }
}

TEST(CheckerCatchesTest, StagingLeasedFromASlotThatIsStillUsed) {
  CheckedSequence sequence = training_sequence(all_modes(1)[0]);
  for (size_t o = 1; o < sequence.operations.size(); ++o) {
    CheckedOperation& operation = sequence.operations[o];
    if (operation.programs[0]->direction == Direction::kGather) continue;
    operation.slot = sequence.operations[o - 1].slot;  // of the group that was prefetched
    EXPECT_NE(check(sequence, {}).error, "");
    return;
  }
  FAIL() << "no reduce in the sequence";
}

TEST(CheckerCatchesTest, GradientsWrittenBeforeTheyWereRead) {
  for (const TrainingOptions& options : {all_modes(1)[0], all_modes(1)[1]}) {
    CheckedSequence sequence = training_sequence(options);
    std::erase_if(sequence.script, [&](const ScriptItem& item) {
      return item.action == Action::kWaitRead &&
             sequence.operations[item.operation].programs[0]->direction == Direction::kReduce;
    });
    EXPECT_THAT(check(sequence, {}).error, HasSubstr("gradients"));
  }
}

TEST(CheckerCatchesTest, UseBeforeWait) {
  CheckedSequence sequence = training_sequence(all_modes(1)[0]);
  const auto wait =
      std::find_if(sequence.script.begin(), sequence.script.end(),
                   [](const ScriptItem& item) { return item.action == Action::kWait; });
  sequence.script.erase(wait);
  // Also in an order in which the script is the last to go on, so that the data happens to be
  // there.
  EXPECT_THAT(check(sequence, {Schedule::Kind::kStarveQueue, kQueueCount, false}).error,
              HasSubstr("reads byte"));
}

TEST(CheckerCatchesTest, RanksThatIssueInAnotherOrder) {
  CheckedSequence sequence = training_sequence(all_modes(1)[0]);
  std::swap(sequence.operations[1].programs[2], sequence.operations[2].programs[2]);
  EXPECT_NE(check(sequence, {}).error, "");
}

// Replaces one program of every operation of a direction.
void change_programs(CheckedSequence* sequence, Direction direction,
                     const std::function<void(Program&)>& change) {
  for (CheckedOperation& operation : sequence->operations) {
    for (auto& program : operation.programs) {
      if (program->direction != direction) continue;
      Program changed = *program;
      change(changed);
      program = std::make_shared<const Program>(std::move(changed));
    }
  }
}

TEST(CheckerCatchesTest, AreaCreditAheadOfEarlierSums) {
  CheckedSequence sequence = training_sequence(all_modes(1)[1]);
  ASSERT_EQ(check(sequence, {}).error, "");
  change_programs(&sequence, Direction::kReduce, [](Program& program) {
    for (Step& step : program.steps) {
      if (step.op == Op::kSignal && step.counter == Counter::kReduceCredit) {
        step.queue = Queue::kReducePush;
        break;
      }
    }
  });
  EXPECT_NE(check(sequence, {}).error, "");
}

TEST(CheckerCatchesTest, OneCounterFromTwoQueues) {
  // A gather to slots signals its credit from the push queue; the bounced one from the unpack
  // queue.
  SequenceBuilder builder(2);
  const int group = builder.add_group({0, 1});
  const auto layout = make_layout({testing::flat_parameter(400, 2)}, 2);
  for (bool bounced : {true, false}) {
    const int gather = builder.gather(group, layout, {Space::kOutput, bounced, 64}, 0);
    builder.operation(gather).outputs = gather;
    builder.act(Action::kIssue, gather);
  }
  ASSERT_EQ(check(builder.sequence(), {}).error, "");
  CheckedSequence sequence = builder.sequence();
  for (auto& program : sequence.operations[1].programs) {
    Program changed = *program;
    changed.steps.front().queue = Queue::kGatherPush;
    program = std::make_shared<const Program>(std::move(changed));
  }
  // Seen as two writers of a counter, or as what the early credit lets happen.
  EXPECT_THAT(check(sequence, {}).error,
              ::testing::AnyOf(HasSubstr("counter"), HasSubstr("which nobody has read")));
}

TEST(CheckerCatchesTest, OrderThatOnlyAFifoCannotRun) {
  // Sum 0 before push 0: with a queue each, no harm; merged into one FIFO, every rank waits for the
  // others' pushes.
  const auto layout = make_layout({testing::flat_parameter(64, 2)}, 2);
  SequenceBuilder builder(2);
  const int group = builder.add_group({0, 1});
  const int reduce = builder.reduce(group, layout, reduce_all(*layout, 1, 0));
  builder.operation(reduce).slot = 0;
  builder.act(Action::kWriteGradients, reduce);
  builder.act(Action::kIssue, reduce);
  builder.act(Action::kWait, reduce);
  builder.act(Action::kReadSummed, reduce);
  CheckedSequence sequence = builder.sequence();
  change_programs(&sequence, Direction::kReduce, [](Program& program) {
    std::stable_partition(program.steps.begin(), program.steps.end(),
                          [](const Step& step) { return step.queue == Queue::kSum; });
    program.last_gradient_read = static_cast<int>(program.steps.size()) - 1;
  });
  EXPECT_EQ(check(sequence, {Schedule::Kind::kForward, 0, false}).error, "");
  EXPECT_THAT(check(sequence, {Schedule::Kind::kForward, 0, true}).error, HasSubstr("deadlock"));
}

}  // namespace
}  // namespace tide
