// Wrong programs between nodes: gathers of every schedule and pacing, straight and through landing,
// and reduces of both forms; plan_mutations.h says what is demanded.
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
using testing::make_topology;
using testing::node_reduce_all;

Form gather_form(const NodeGatherOptions& options) {
  constexpr int kRanks = 6;
  // Casts with one schedule.
  std::vector<Parameter> parameters = {flat_parameter(50, kRanks), column_parameter(2, 3, kRanks)};
  if (options.schedule == GatherSchedule::kDoubling) parameters[0].shard_dtype = DType::kFloat32;
  if (options.landing_slice_bytes > 0) parameters.push_back(flat_parameter(70 * kRanks, kRanks));
  const auto layout = make_layout(parameters, kRanks);
  const Topology topology = make_topology(3, 2);
  SequenceBuilder builder(kRanks);
  const int group = builder.add_group(all_processes(kRanks));
  for (int i = 0; i < 2; ++i) {
    const int gather = builder.gather(group, layout, topology, options, 0);
    builder.operation(gather).slot = 0;
    for (Action action : {Action::kIssue, Action::kWaitRead, Action::kUpdateShards, Action::kWait,
                          Action::kUseGathered}) {
      builder.act(action, gather);
    }
  }
  return {std::string(gather_schedule_name(options.schedule)) + ", pacing " +
              pacing_name(options.pacing) +
              (options.landing_slice_bytes > 0 ? ", through landing" : "") +
              (options.to_all ? ", to all" : ""),
          builder.sequence()};
}

std::vector<Form> gather_forms(int64_t landing_slice_bytes) {
  std::vector<Form> forms;
  for (GatherSchedule schedule :
       {GatherSchedule::kDoubling, GatherSchedule::kRing, GatherSchedule::kDirect}) {
    for (Pacing pacing :
         {Pacing::kOff, Pacing::kConfirmWhole, Pacing::kConfirmHead, Pacing::kGrant}) {
      forms.push_back(gather_form({schedule, pacing, 8, 24, landing_slice_bytes}));
    }
  }
  return forms;
}

// Two under way, of the whole group and of some parameters; three turns and more.
Form reduce_form(int nodes, int locals, bool read_add, bool behind_read_adds = false) {
  const int ranks = nodes * locals;
  const auto layout = make_layout(
      {flat_parameter(100 * ranks, ranks), column_parameter(2, 3, ranks), flat_parameter(5, ranks)},
      ranks);
  const Topology topology = make_topology(nodes, locals);
  NodeReduceOptions options = node_reduce_all(*layout, 64, read_add);
  options.behind_read_adds = behind_read_adds;
  SequenceBuilder builder(ranks);
  const int group = builder.add_group(all_processes(ranks));
  for (int i = 0; i < 2; ++i) {
    const int reduce = builder.reduce(group, layout, topology, options);
    builder.operation(reduce).outputs = builder.operation(reduce).gradients = i;
    builder.act(Action::kWriteGradients, reduce);
    builder.act(Action::kIssue, reduce);
  }
  for (int i = 0; i < 2; ++i) {
    builder.act(Action::kWait, i);
    builder.act(Action::kReadSummed, i);
  }
  return {std::to_string(nodes) + " nodes of " + std::to_string(locals) +
              (read_add ? ", read-add" : ", pushes") +
              (behind_read_adds ? " behind read-adds" : ""),
          builder.sequence()};
}

TEST(NodeMutationsTest, AllCaughtOrEqual) {
  std::vector<Form> forms = gather_forms(0);
  for (Form& form : gather_forms(64)) forms.push_back(std::move(form));
  for (int64_t landing : {0, 64}) {
    for (Pacing pacing : {Pacing::kConfirmHead, Pacing::kGrant}) {
      forms.push_back(gather_form({GatherSchedule::kDoubling, pacing, 8, 24, landing, true}));
      forms.push_back(gather_form({GatherSchedule::kRing, pacing, 8, 24, landing, true}));
    }
  }
  for (bool read_add : {false, true}) {
    forms.push_back(reduce_form(2, 2, read_add));
    forms.push_back(reduce_form(3, 2, read_add));
    forms.push_back(reduce_form(2, 3, read_add));
    forms.push_back(reduce_form(3, 1, read_add));
  }
  forms.push_back(reduce_form(3, 2, false, true));
  testing::expect_caught_or_equal(forms, 90, static_cast<int>(testing::Mutation::kCount));
}

}  // namespace
}  // namespace tide
