// Wrong programs inside a node; plan_mutations.h says what is demanded.
#include <gtest/gtest.h>

#include "tests/unit/plan_fixture.h"
#include "tests/unit/plan_mutations.h"

namespace tide {
namespace {

using testing::all_processes;
using testing::column_parameter;
using testing::flat_parameter;
using testing::Form;
using testing::make_layout;
using testing::reduce_all;

constexpr int kRanks = 3;
constexpr int kTimes = 3;

Form gather_form(const std::string& name, std::shared_ptr<const GroupLayout> layout,
                 const GatherOptions& options) {
  SequenceBuilder builder(kRanks);
  const int group = builder.add_group(all_processes(kRanks));
  for (int i = 0; i < kTimes; ++i) {
    const int gather = builder.gather(group, layout, options, 0);
    builder.operation(gather).slot = options.destination == Space::kSlot ? 0 : -1;
    for (Action action :
         {Action::kIssue, Action::kWait, Action::kUseGathered, Action::kUpdateShards}) {
      builder.act(action, gather);
    }
  }
  return {name, builder.sequence()};
}

// Calls run into each other: only the gradients of the last but one call must have been read.
Form reduce_form(const std::string& name, std::shared_ptr<const GroupLayout> layout,
                 const ReduceOptions& options) {
  SequenceBuilder builder(kRanks);
  const int group = builder.add_group(all_processes(kRanks));
  for (int i = 0; i < kTimes; ++i) {
    const int reduce = builder.reduce(group, layout, options);
    CheckedOperation& operation = builder.operation(reduce);
    operation.outputs = i;
    operation.gradients = i % 2;
    operation.slot = options.areas == 1 ? i % 2 : -1;
    if (i >= 2) {
      operation.after = {{reduce - 2, Dependency::Until::kSummed}};
      builder.act(Action::kWaitRead, reduce - 2);
    }
    builder.act(Action::kWriteGradients, reduce);
    builder.act(Action::kIssue, reduce);
  }
  for (int i = 0; i < kTimes; ++i) {
    builder.act(Action::kWait, i);
    builder.act(Action::kReadSummed, i);
  }
  return {name, builder.sequence()};
}

std::vector<Form> right_forms() {
  const auto layout = make_layout({flat_parameter(100, kRanks), column_parameter(3, 10, kRanks),
                                   flat_parameter(2, kRanks), flat_parameter(64, kRanks)},
                                  kRanks);
  Parameter master = flat_parameter(50, kRanks);
  master.shard_dtype = DType::kFloat32;
  const auto masters = make_layout({master, flat_parameter(31, kRanks), master}, kRanks);
  ReduceOptions subset = reduce_all(*layout, 2, 64);
  subset.subset = {0, 3};
  subset.dtypes = {DType::kBFloat16, DType::kFloat32};
  std::vector<Form> forms;
  forms.push_back(gather_form("gather to slots", layout, {}));
  forms.push_back(gather_form("gather with casts", masters, {}));
  GatherOptions to_all;
  to_all.to_all = true;
  forms.push_back(gather_form("gather to all", layout, to_all));
  forms.push_back(gather_form("gather to all with casts", masters, to_all));
  forms.push_back(gather_form("straight gather to outputs", layout, {Space::kOutput, false, 64}));
  forms.push_back(gather_form("bounced gather", layout, {Space::kOutput, true, 64}));
  forms.push_back(reduce_form("leased reduce", layout, reduce_all(*layout, 1, 0)));
  forms.push_back(reduce_form("area reduce", layout, reduce_all(*layout, 2, 64)));
  forms.push_back(reduce_form("area reduce of a subset", layout, subset));
  return forms;
}

TEST(CheckerMutationsTest, AllCaughtOrEqual) {
  testing::expect_caught_or_equal(right_forms(), 140, testing::kLocalMutations);
}

}  // namespace
}  // namespace tide
