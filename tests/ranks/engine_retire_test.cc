// Plans whose groups are gone: what they held serves others, and only once nobody needs it.
#include <atomic>

#include "tests/ranks/engine_world.h"

namespace tide::testing {
namespace {

constexpr int kRanks = 3;

// A root that stays unsharded and two blocks that share the ring, sized by `scale`.
struct Model {
  std::vector<PlanRequest> requests;
  std::vector<GroupLayout> layouts;
  std::vector<int> plans;

  explicit Model(int64_t scale, int blocks = 2, bool root = true) {
    for (int g = 0; g < blocks + (root ? 1 : 0); ++g) {
      PlanRequest& request = requests.emplace_back();
      request.name = "group " + std::to_string(g);
      request.stays_unsharded = root && g == 0;
      const int64_t numel = 700 * scale + 64 * g;
      request.parameters = {{"w", DType::kBFloat16, numel, kRanks * numel, 1, DType::kBFloat16},
                            {"b", DType::kBFloat16, 3, 2 * kRanks + 1, 1, DType::kBFloat16}};
      layouts.emplace_back(request.parameters, kRanks);
    }
  }

  void plan(Group& group, int depth = 1) {
    auto answers = group.plan(requests, depth);
    TIDE_ASSERT_OK(answers.status());
    plans.clear();
    for (const PlanAnswer& answer : answers.value()) {
      ASSERT_TRUE(answer.accepted) << answer.reason;
      plans.push_back(answer.plan);
    }
  }

  Result<GatherStarted> gather(Group& group, int g, int rank) const {
    const auto shards = make_shards(layouts[g], rank);
    auto started = group.gather({plans[g], pointers(shards)});
    if (started.is_ok()) {
      const Status done = started.value().operation->wait();
      if (!done.is_ok()) return done;
    }
    return started;
  }

  int64_t wrong(int g, const GatherStarted& started) const {
    int64_t sum = 0;
    for (int p = 0; p < layouts[g].size(); ++p)
      sum += wrong_bytes(layouts[g], p, started.places[p]);
    return sum;
  }

  void use(Group& group, int rank) const {
    for (int g = 0; g < static_cast<int>(plans.size()); ++g) {
      auto started = gather(group, g, rank);
      TIDE_ASSERT_OK(started.status());
      ASSERT_EQ(wrong(g, started.value()), 0) << "group " << g;
      started = Status(ErrorKind::kInvalidUse, "released");
      TIDE_ASSERT_OK(group.vacate(plans[g]));
    }
  }

  void forget(Group& group) const {
    for (const int plan : plans) group.forget(plan);
  }
};

// What a group holds that has planned these models and nothing else.
int64_t arena_of(std::vector<Model> models) {
  std::atomic<int64_t> bytes{0};
  run_ranks(kRanks, {}, [&](int rank, Group& group) {
    for (Model& model : models) {
      Model own = model;
      own.plan(group);
    }
    if (rank == 0) bytes = group.counters().arena_bytes;
  });
  return bytes;
}

TEST(Retire, ModelsInTurnHoldNoMoreThanTheLargestAndWhatIsAlive) {
  const int64_t alone = arena_of({Model(11)});
  const int64_t beside = arena_of({Model(2), Model(11)});
  ASSERT_GT(beside, alone);
  run_ranks(kRanks, {}, [&](int rank, Group& group) {
    for (int round = 0; round < 20; ++round) {
      Model model(1 + round * 7 % 11);
      model.plan(group);
      model.use(group, rank);
      EXPECT_LE(group.counters().arena_bytes, alone) << "round " << round;
      EXPECT_EQ(group.counters().plans, 3);
      model.forget(group);
    }
    Model alive(2);
    alive.plan(group);
    for (int round = 0; round < 20; ++round) {
      Model model(1 + round * 7 % 11);
      model.plan(group);
      model.use(group, rank);
      alive.use(group, rank);
      EXPECT_LE(group.counters().arena_bytes, beside) << "round " << round;
      EXPECT_EQ(group.counters().plans, 6);
      model.forget(group);
    }
    alive.forget(group);
    TIDE_ASSERT_OK(group.plan({}, 0).status());
    EXPECT_EQ(group.counters().plans, 0);
    // A lane lets go of an operation's memory a moment after the operation is done.
    const Deadline patience = Clock::now() + 10s;
    while (group.counters().arena_bytes > 0 && Clock::now() < patience)
      std::this_thread::sleep_for(1ms);
    EXPECT_EQ(group.counters().arena_bytes, 0);
  });
}

TEST(Retire, APlanGoesOnceEveryRankHasForgottenIt) {
  run_ranks(kRanks, {}, [&](int rank, Group& group) {
    Model model(1);
    model.plan(group);
    for (int forgetful = 0; forgetful < kRanks; ++forgetful) {
      TIDE_ASSERT_OK(group.plan({}, 0).status());
      ASSERT_EQ(group.counters().plans, 3) << forgetful << " ranks have forgotten it";
      if (rank == forgetful) model.forget(group);
    }
    TIDE_ASSERT_OK(group.plan({}, 0).status());
    EXPECT_EQ(group.counters().plans, 0);
    const auto gone = model.gather(group, 1, rank);
    EXPECT_EQ(gone.status().kind(), ErrorKind::kInvalidUse);
    EXPECT_THAT(gone.status().message(), ::testing::HasSubstr("not one of the group's 0 plans"));
    Model next(1);
    next.plan(group);
    EXPECT_GT(next.plans[0], model.plans[2]);  // numbers never come back
    next.use(group, rank);
  });
}

TEST(Retire, AGroupThatDiedUnshardedGivesItsSlotsToAGatherThatFindsNone) {
  run_ranks(kRanks, {}, [&](int rank, Group& group) {
    Model alive(3, 2, false);
    alive.plan(group);
    for (int round = 0; round < 5; ++round) {
      Model dies(3, 3, false);
      dies.plan(group);
      for (int g = 0; g < 3; ++g) TIDE_ASSERT_OK(dies.gather(group, g, rank).status());
      dies.forget(group);  // all slots of the ring are held, no storage is bound
      const uint64_t operations = group.counters().operations;
      alive.use(group, rank);
      EXPECT_EQ(group.counters().operations, operations + 2);
      EXPECT_EQ(group.counters().plans, 2);
    }
  });
}

TEST(Retire, MemoryThatAStorageOfOneRankIsBoundToStaysItsOwn) {
  run_ranks(kRanks, {}, [&](int rank, Group& group) {
    Model alive(3, 1, false);
    Model dies(3, 3, false);
    alive.plan(group);
    dies.plan(group);
    std::vector<GatherStarted> held;
    for (int g = 0; g < 3; ++g) {
      auto started = dies.gather(group, g, rank);
      TIDE_ASSERT_OK(started.status());
      held.push_back(started.value());
    }
    dies.forget(group);
    for (GatherStarted& started : held) {
      started.operation.reset();
      if (rank != 1) started.lease.reset();
    }
    for (int call = 0; call < 3; ++call) {  // a vote, a call without one, a vote
      const auto refused = alive.gather(group, 0, rank);
      EXPECT_EQ(refused.status().kind(), ErrorKind::kUnsupported) << refused.status().to_string();
      EXPECT_THAT(refused.status().message(), ::testing::HasSubstr("no slot is free"));
    }
    if (rank == 1) {
      for (int g = 0; g < 3; ++g) EXPECT_EQ(dies.wrong(g, held[g]), 0);
      held[0].lease.reset();
    }
    int calls = 1;  // the pause between votes has grown to 3 calls
    auto started = alive.gather(group, 0, rank);
    for (; !started.is_ok() && calls < 10; ++calls) started = alive.gather(group, 0, rank);
    TIDE_ASSERT_OK(started.status());
    EXPECT_EQ(calls, 4);
    EXPECT_EQ(alive.wrong(0, started.value()), 0);
    if (rank == 1) {
      for (int g = 1; g < 3; ++g) EXPECT_EQ(dies.wrong(g, held[g]), 0);
    }
    EXPECT_EQ(group.counters().plans, 3);  // two are still bound on rank 1
  });
}

TEST(Retire, TheArenaLimitCountsWhatAVoteFrees) {
  const int64_t one = arena_of({Model(5)});
  WorldOptions options;
  // The ranks share this process, and its bytes.
  options.group.arena_limit_bytes = kRanks * one;
  run_ranks(kRanks, options, [](int, Group& group) {
    for (int round = 0; round < 3; ++round) {
      Model model(5);
      auto answers = group.plan(model.requests, 1);
      TIDE_ASSERT_OK(answers.status());
      for (const PlanAnswer& answer : answers.value()) {
        EXPECT_TRUE(answer.accepted) << "round " << round << ": " << answer.reason;
        model.plans.push_back(answer.plan);
      }
      model.forget(group);
    }
  });
}

}  // namespace
}  // namespace tide::testing
