// What goes wrong between nodes: every rank of every node hears of it, by name, and in time.
#include "tests/ranks/engine_nodes_world.h"

namespace tide::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

std::vector<PlanRequest> layers(int count, int ranks, int64_t shard_numel = 1000) {
  std::vector<PlanRequest> requests(static_cast<size_t>(count));
  for (int g = 0; g < count; ++g) {
    requests[g].name = "layers." + std::to_string(g);
    requests[g].parameters = {
        {"w", DType::kBFloat16, shard_numel, ranks * shard_numel, 1, DType::kBFloat16}};
  }
  return requests;
}

Result<GatherStarted> gather(Group& group, int plan, const std::vector<uint8_t>& shard) {
  return group.gather({plan, {shard.data()}});
}

// Gathers until the group breaks; its error.
Status gather_until_broken(Group& group, int plan, const std::vector<uint8_t>& shard) {
  while (true) {
    const auto started = gather(group, plan, shard);
    if (!started.is_ok()) return started.status();
    const Status done = started.value().operation->wait();
    if (!done.is_ok()) return done;
    const Status vacated = group.vacate(plan);
    if (!vacated.is_ok()) return vacated;
  }
}

TEST(EngineNodesFailure, ARankThatDiesIsNamedOnEveryNode) {
  std::mutex mutex;
  std::vector<std::string> heard;
  NodesOptions options;
  run_nodes(3, 2, options, [&](int rank, Group& group, NodesWorld& world) {
    const std::vector<uint8_t> shard(2000);
    TIDE_ASSERT_OK(group.plan(layers(1, 6), 1).status());
    if (rank == 3) {
      for (int i = 0; i < 5; ++i) {
        TIDE_ASSERT_OK(gather(group, 0, shard).value().operation->wait());
        TIDE_ASSERT_OK(group.vacate(0));
      }
      break_memory_fabric(*world.fabrics[3]);
      break_memory_network(*world.networks[3]);
      return;
    }
    const Status status = gather_until_broken(group, 0, shard);
    EXPECT_THAT(status.message(), HasSubstr("group 'test', rank " + std::to_string(rank)));
    EXPECT_EQ(status.message(), group.error().message());
    std::lock_guard<std::mutex> lock(mutex);
    heard.push_back(status.message());
  });
  EXPECT_EQ(heard.size(), 5u);
  // Who shares the dead rank's rail may hear of it from the network first, which knows nodes alone.
  int named = 0;
  for (const std::string& message : heard) {
    named += message.find("rank 3") != std::string::npos ||
             message.find("node 1 died") != std::string::npos;
  }
  EXPECT_EQ(named, 5) << heard[0] << "\n" << heard[1] << "\n" << heard[2];
}

TEST(EngineNodesFailure, ABlackHoleEndsByTheDeadlineNamingRoundNodeAndRank) {
  NodesOptions options;
  options.group.timeout = 700ms;
  std::atomic<bool> hole{false};
  options.fate = [&](int) {
    return [&](const MemoryMessage& message) {
      return MemoryFate{0us,
                        hole && message.from == 1 && message.event.kind == EventKind::kArrival};
    };
  };
  std::atomic<int> ready{0};
  run_nodes(2, 2, options, [&](int rank, Group& group, NodesWorld& world) {
    const std::vector<uint8_t> shard(2000);
    TIDE_ASSERT_OK(group.plan(layers(1, 4), 1).status());
    TIDE_ASSERT_OK(gather(group, 0, shard).value().operation->wait());
    TIDE_ASSERT_OK(group.vacate(0));
    for (++ready; ready < 4;) std::this_thread::yield();
    hole = true;
    const Status status = gather_until_broken(group, 0, shard);
    if (world.topology.node(rank) == 0) {
      EXPECT_THAT(
          status.message(),
          AllOf(HasSubstr("gather 2 of 'layers.0'"),
                AnyOf(HasSubstr("waited 700 ms for arrival of round 0, part 0 from node 1 "
                                "(rank " +
                                std::to_string(world.topology.rank(1, world.topology.local(rank))) +
                                "), wanted 2000, got 0"),
                      HasSubstr("failed"), HasSubstr("node 1 reported: timeout"))));
    }
    EXPECT_FALSE(status.is_ok());
  });
}

TEST(EngineNodesFailure, AbortOnOneRankEndsAllNodesWithItsReason) {
  run_nodes(3, 2, {}, [&](int rank, Group& group, NodesWorld&) {
    const std::vector<uint8_t> shard(2000);
    TIDE_ASSERT_OK(group.plan(layers(1, 6), 1).status());
    if (rank == 4) {
      group.abort(Status(ErrorKind::kInvalidUse, "the script has had enough"));
      return;
    }
    // A rank that the reason reaches late may first see that a node which had it has left.
    EXPECT_THAT(gather_until_broken(group, 0, shard).message(),
                AnyOf(HasSubstr("the script has had enough"), HasSubstr("has finished and left")));
  });
}

TEST(EngineNodesFailure, NodesInDifferentCallsAreTold) {
  run_nodes(2, 2, {}, [&](int rank, Group& group, NodesWorld& world) {
    const std::vector<uint8_t> shard(2000);
    TIDE_ASSERT_OK(group.plan(layers(2, 4), 1).status());
    TIDE_ASSERT_OK(gather(group, 0, shard).value().operation->wait());
    // Equal shapes in another order: only the calls' own names tell them apart.
    const auto started = gather(group, world.topology.node(rank) == 0 ? 1 : 0, shard);
    const Status status = started.is_ok() ? started.value().operation->wait() : started.status();
    EXPECT_THAT(status.message(),
                AllOf(HasSubstr("operation 3"), HasSubstr("gather of 'layers."),
                      HasSubstr("all ranks must make the same calls in the same order")));
  });
}

TEST(EngineNodesFailure, OneNodePlansWhereTheOtherGathers) {
  run_nodes(2, 1, {}, [&](int rank, Group& group, NodesWorld&) {
    const std::vector<uint8_t> shard(2000);
    TIDE_ASSERT_OK(group.plan(layers(1, 2), 1).status());
    Status status;
    if (rank == 0) {
      status = group.plan(layers(1, 2), 1).status();
    } else {
      const auto started = gather(group, 0, shard);
      status = started.is_ok() ? started.value().operation->wait() : started.status();
    }
    EXPECT_THAT(status.message(), HasSubstr("operation 2"));
  });
}

TEST(EngineNodesFailure, ARefusedRegionIsEveryRanksAnswer) {
  NodesOptions options;
  std::atomic<bool> refuses{true};
  options.refuse_region = [&](int node, int local) {
    return refuses && node == 1 && local == 1
               ? Status(ErrorKind::kSystem, "the adapter pins no more")
               : Status::ok();
  };
  std::atomic<int> tried{0};
  run_nodes(2, 2, options, [&](int rank, Group& group, NodesWorld&) {
    const auto answers = group.plan(layers(2, 4), 1);
    TIDE_ASSERT_OK(answers.status());
    for (const PlanAnswer& answer : answers.value()) {
      EXPECT_FALSE(answer.accepted);
      EXPECT_THAT(answer.reason, HasSubstr("the adapter pins no more"));
    }
    for (++tried; tried < 4;) std::this_thread::yield();
    refuses = false;
    TIDE_ASSERT_OK(group.error());
    const auto again = group.plan(layers(2, 4), 1);
    TIDE_ASSERT_OK(again.status());
    EXPECT_TRUE(again.value()[1].accepted);
    const GroupLayout layout(layers(1, 4)[0].parameters, 4);
    const auto shards = make_shards(layout, rank);
    auto started = gather(group, 1, shards[0]);
    TIDE_ASSERT_OK(started.status());
    TIDE_ASSERT_OK(started.value().operation->wait());
    EXPECT_EQ(wrong_bytes(layout, 0, started.value().places[0]), 0);
  });
}

TEST(EngineNodesFailure, TheArenaLimitOfOneRankRefusesAListOnAllNodes) {
  NodesOptions options;
  options.per_rank = [](int rank, GroupOptions& group) {
    if (rank == 2) group.arena_limit_bytes = 1;
  };
  run_nodes(2, 2, options, [&](int, Group& group, NodesWorld&) {
    auto layout = std::make_shared<GroupLayout>(layers(1, 4)[0].parameters, 4);
    const std::vector<uint8_t> shard(2000);
    std::vector<uint8_t> output(8000);
    const auto started = group.gather_list(layout, {shard.data()}, {output.data()});
    EXPECT_EQ(started.status().kind(), ErrorKind::kUnsupported);
    EXPECT_THAT(started.status().message(),
                AllOf(HasSubstr("rank 2: "), HasSubstr("TIDE_ARENA_LIMIT")));
    TIDE_ASSERT_OK(group.error());
  });
}

}  // namespace
}  // namespace tide::testing
