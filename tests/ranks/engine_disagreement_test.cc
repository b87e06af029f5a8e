// Ranks that do not make the same calls: an error on every rank that says what differs, never a
// hang.
#include "tests/ranks/engine_numbers.h"

namespace tide::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

Parameter tensor(const std::string& name, int64_t shard_numel, int ranks,
                 DType dtype = DType::kBFloat16) {
  return {name, dtype, shard_numel, ranks * shard_numel, 1, dtype};
}

std::shared_ptr<GroupLayout> layout_of(const std::vector<int64_t>& shard_numels, int ranks,
                                       DType dtype = DType::kBFloat16) {
  std::vector<Parameter> parameters;
  for (size_t i = 0; i < shard_numels.size(); ++i) {
    parameters.push_back(tensor("tensor " + std::to_string(i), shard_numels[i], ranks, dtype));
  }
  return std::make_shared<GroupLayout>(parameters, ranks);
}

// Memory for list calls of any layout used here.
struct Buffers {
  std::vector<std::vector<uint8_t>> inputs, outputs;
  explicit Buffers(size_t tensors)
      : inputs(tensors, std::vector<uint8_t>(4096)), outputs(tensors, std::vector<uint8_t>(4096)) {}
};

// Of this rank's group, made before the calls that differ.
thread_local std::unique_ptr<Outputs> outputs_of_rank;

void run_list_ranks(int ranks, const WorldOptions& options,
                    const std::function<void(int, Group&)>& body) {
  run_ranks(ranks, options, [&](int rank, Group& group) {
    outputs_of_rank = std::make_unique<Outputs>(group, 16 * 4096);
    body(rank, group);
    outputs_of_rank.reset();
  });
}

Status gather_list(Group& group, const std::shared_ptr<GroupLayout>& layout) {
  Buffers buffers(static_cast<size_t>(layout->size()));
  std::vector<void*> outputs;
  for (int p = 0; p < layout->size(); ++p) outputs.push_back(outputs_of_rank->at(p * 4096));
  auto operation = group.gather_list(layout, pointers(buffers.inputs), outputs);
  return operation.is_ok() ? operation.value()->wait() : operation.status();
}

Status reduce_list(Group& group, const std::shared_ptr<GroupLayout>& layout,
                   const AccumulateOptions& options = {}) {
  Buffers buffers(static_cast<size_t>(layout->size()));
  auto operation =
      group.reduce_list(layout, pointers(buffers.inputs), mutable_pointers(buffers.outputs),
                        layout->parameter(0).dtype, options);
  return operation.is_ok() ? operation.value()->wait() : operation.status();
}

// Runs `body` on 3 ranks of which rank 1 is the odd one; every rank's status must name `wanted`,
// and the group stays broken with the same error. Bounded far below the group's timeout.
void expect_error_everywhere(const std::function<Status(int, Group&)>& body,
                             const std::string& wanted) {
  const auto begin = Clock::now();
  run_list_ranks(3, {}, [&](int rank, Group& group) {
    const Status status = body(rank, group);
    ASSERT_FALSE(status.is_ok()) << "rank " << rank;
    EXPECT_THAT(status.message(), HasSubstr(wanted)) << "rank " << rank;
    EXPECT_THAT(status.message(),
                AnyOf(HasSubstr("group 'test', rank " + std::to_string(rank)),
                      HasSubstr("rank " + std::to_string(rank) + " of group 'test'")));
    EXPECT_EQ(group.error().message(), status.message());
    const Status later = gather_list(group, layout_of({8}, 3));
    EXPECT_EQ(later.message(), status.message());
  });
  EXPECT_LT(Clock::now() - begin, 30s);
}

TEST(EngineDisagreement, AnotherSizeNamesTheTensor) {
  const std::string wanted = "parameter 1 is the first that differs in gather_list of 3 tensors";
  expect_error_everywhere(
      [](int rank, Group& group) {
        TIDE_RETURN_IF_ERROR(gather_list(group, layout_of({8, 16, 24}, 3)));
        return gather_list(group, layout_of({8, rank == 1 ? 17 : 16, 24}, 3));
      },
      wanted);
}

TEST(EngineDisagreement, AnotherDtypeInAReduceNamesTheTensor) {
  expect_error_everywhere(
      [](int rank, Group& group) {
        return reduce_list(group,
                           layout_of({8, 16}, 3, rank == 1 ? DType::kFloat32 : DType::kBFloat16));
      },
      "parameter 0 is the first that differs in reduce_list");
}

TEST(EngineDisagreement, AnotherNumberOfTensors) {
  expect_error_everywhere(
      [](int rank, Group& group) {
        return gather_list(group, rank == 1 ? layout_of({8, 16}, 3) : layout_of({8, 16, 5}, 3));
      },
      "tensors differ");
}

TEST(EngineDisagreement, EmptyListOnOneRank) {
  expect_error_everywhere(
      [](int rank, Group& group) {
        TIDE_RETURN_IF_ERROR(gather_list(group, rank == 1 ? layout_of({0}, 3) : layout_of({8}, 3)));
        return reduce_list(group, layout_of({8}, 3));  // what the odd rank notices
      },
      "gather_list of 1 tensors");
}

TEST(EngineDisagreement, AnotherScale) {
  expect_error_everywhere(
      [](int rank, Group& group) {
        AccumulateOptions options;
        options.scale = rank == 1 ? 0.5 : 1.0;
        return reduce_list(group, layout_of({8}, 3), options);
      },
      "scaled by 0.5");
}

TEST(EngineDisagreement, SkippedCallThenOtherDirection) {
  expect_error_everywhere(
      [](int rank, Group& group) {
        if (rank != 1) TIDE_RETURN_IF_ERROR(gather_list(group, layout_of({8}, 3)));
        return reduce_list(group, layout_of({16}, 3));
      },
      "reduce_list of 1 tensors");
}

TEST(EngineDisagreement, AllocateInsteadOfACollective) {
  expect_error_everywhere(
      [](int rank, Group& group) {
        if (rank == 1) return group.allocate(4096).status();
        return reduce_list(group, layout_of({16}, 3));
      },
      "allocate of 4096 bytes");
}

std::vector<PlanRequest> two_layers(int ranks) {
  std::vector<PlanRequest> requests(2);
  for (int g = 0; g < 2; ++g) {
    requests[g].name = "layers." + std::to_string(g + 3);
    requests[g].parameters = {tensor("w", 40, ranks), tensor("b", 8, ranks)};
  }
  return requests;
}

Status planned_gather(Group& group, int plan) {
  std::vector<std::vector<uint8_t>> shards(2, std::vector<uint8_t>(4096));
  auto started = group.gather({plan, pointers(shards)});
  return started.is_ok() ? started.value().operation->wait() : started.status();
}

Status planned_reduce(Group& group, int plan, const std::vector<int>& parameters) {
  Buffers buffers(parameters.size());
  ReduceCall call;
  call.plan = plan;
  call.parameters = parameters;
  call.gradient_dtypes.assign(parameters.size(), DType::kBFloat16);
  call.gradients = pointers(buffers.inputs);
  call.outputs = mutable_pointers(buffers.outputs);
  auto operation = group.reduce(call);
  return operation.is_ok() ? operation.value()->wait() : operation.status();
}

// Equal shapes in another order: nothing but the plan's number tells them apart.
TEST(EngineDisagreement, GroupsOfEqualShapeInAnotherOrder) {
  expect_error_everywhere(
      [](int rank, Group& group) {
        TIDE_RETURN_IF_ERROR(group.plan(two_layers(3), 1).status());
        TIDE_RETURN_IF_ERROR(planned_gather(group, rank == 1 ? 1 : 0));
        return planned_gather(group, rank == 1 ? 0 : 1);
      },
      "gather of 'layers.4'");
}

TEST(EngineDisagreement, ReduceWhereOthersGather) {
  expect_error_everywhere(
      [](int rank, Group& group) {
        TIDE_RETURN_IF_ERROR(group.plan(two_layers(3), 1).status());
        if (rank == 1) return planned_reduce(group, 0, {0, 1});
        return planned_gather(group, 1);
      },
      "reduce of 'layers.3'");
}

TEST(EngineDisagreement, AnotherSubsetOfGradients) {
  expect_error_everywhere(
      [](int rank, Group& group) {
        TIDE_RETURN_IF_ERROR(group.plan(two_layers(3), 1).status());
        return planned_reduce(group, 0, {rank == 1 ? 1 : 0});
      },
      "parameter 0 is the first that differs in reduce of 'layers.3'");
}

TEST(EngineDisagreement, ForgottenVacate) {
  expect_error_everywhere(
      [](int rank, Group& group) {
        TIDE_RETURN_IF_ERROR(group.plan(two_layers(3), 1).status());
        TIDE_RETURN_IF_ERROR(planned_gather(group, 0));
        if (rank != 1) TIDE_RETURN_IF_ERROR(group.vacate(0));
        TIDE_RETURN_IF_ERROR(planned_gather(group, 1));
        return planned_reduce(group, 0, {0, 1});
      },
      "reduce of 'layers.3', which makes an area");
}

TEST(EngineDisagreement, PlanInsteadOfAGather) {
  expect_error_everywhere(
      [](int rank, Group& group) {
        TIDE_RETURN_IF_ERROR(group.plan(two_layers(3), 1).status());
        if (rank == 1) return group.plan(two_layers(3), 1).status();
        return planned_gather(group, 0);
      },
      "plan");
}

// A rank that makes no further call leaves nothing to compare: the deadline names it.
TEST(EngineDisagreement, SkippedLastCallEndsAtTheDeadline) {
  WorldOptions options;
  options.group.timeout = 400ms;
  std::atomic<int> ended{0};
  run_list_ranks(3, options, [&](int rank, Group& group) {
    TIDE_ASSERT_OK(gather_list(group, layout_of({8}, 3)));
    if (rank == 1) {
      while (ended < 2) std::this_thread::sleep_for(5ms);
      return;
    }
    const Status status = gather_list(group, layout_of({8}, 3));
    ++ended;
    EXPECT_THAT(status.message(),
                AnyOf(HasSubstr("waited 400 ms for landing_credit from rank 1, wanted 2, got 1"),
                      HasSubstr("rank 1")));
    EXPECT_THAT(status.message(), HasSubstr("gather_list"));
  });
}

// Told by its caller, or refused by the group itself over its arguments.
TEST(EngineDisagreement, ARefusedCallIsToldToThoseThatMakeIt) {
  for (const bool by_caller : {true, false}) {
    std::atomic<int> ended{0};
    run_list_ranks(3, {}, [&](int rank, Group& group) {
      TIDE_ASSERT_OK(gather_list(group, layout_of({8}, 3)));
      // Refused alike: no difference.
      group.refuse("by all");
      TIDE_ASSERT_OK(gather_list(group, layout_of({8}, 3)));
      if (rank == 1) {
        if (by_caller) {
          group.refuse("rank 1: tensor 2 is wrong");
        } else {
          EXPECT_FALSE(group.gather_list(layout_of({8}, 3), {}, {}).is_ok());
        }
        while (ended < 2) std::this_thread::sleep_for(5ms);
        EXPECT_FALSE(group.error().is_ok());
        return;
      }
      const Status status =
          by_caller ? group.allocate(64).status() : gather_list(group, layout_of({8}, 3));
      ++ended;
      const std::string reason =
          by_caller ? "tensor 2 is wrong" : "gather_list wants 1 inputs and outputs, got 0 and 0";
      EXPECT_THAT(status.message(), HasSubstr(reason));
      EXPECT_THAT(status.message(), HasSubstr("rank 1"));
    });
  }
}

// The same when the rank is gone: at once, not at the deadline.
TEST(EngineDisagreement, RankThatLeftIsNamedAtOnce) {
  run_list_ranks(3, {}, [&](int rank, Group& group) {
    TIDE_ASSERT_OK(gather_list(group, layout_of({8}, 3)));
    if (rank == 1) return;
    const Status status = gather_list(group, layout_of({8}, 3));
    EXPECT_EQ(status.kind(), ErrorKind::kPeerLost) << status.to_string();
    EXPECT_THAT(status.message(), HasSubstr("rank 1"));
  });
}

}  // namespace
}  // namespace tide::testing
