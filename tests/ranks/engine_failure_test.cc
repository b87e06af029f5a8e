// Votes and their refusals, no free slot, timeouts, lost peers, abort, close while memory is in
// use.
#include "tests/ranks/engine_numbers.h"

namespace tide::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Parameter tensor(const std::string& name, int64_t shard_numel, int ranks) {
  return {name, DType::kBFloat16, shard_numel, ranks * shard_numel, 1, DType::kBFloat16};
}

std::vector<PlanRequest> layers(int count, int ranks, int64_t shard_numel = 1000) {
  std::vector<PlanRequest> requests(static_cast<size_t>(count));
  for (int g = 0; g < count; ++g) {
    requests[g].name = "layers." + std::to_string(g);
    requests[g].parameters = {tensor("w" + std::to_string(g), shard_numel, ranks)};
  }
  return requests;
}

struct Gathered {
  std::vector<std::vector<uint8_t>> shards;
  GatherStarted started;
};

Status start_gather(Group& group, int plan, int rank, int ranks, Gathered* gathered,
                    int64_t shard_numel = 1000) {
  gathered->shards = make_shards(GroupLayout({tensor("w", shard_numel, ranks)}, ranks), rank);
  auto started = group.gather({plan, pointers(gathered->shards)});
  if (started.is_ok()) gathered->started = std::move(started.value());
  return started.status();
}

TEST(EngineVote, OneRanksRefusalIsEveryRanksAnswerWithItsReason) {
  run_ranks(3, {}, [](int rank, Group& group) {
    auto requests = layers(3, 3);
    if (rank == 2) requests[1].refusal = "its shard moved";
    auto answers = group.plan(requests, 1);
    TIDE_ASSERT_OK(answers.status());
    EXPECT_TRUE(answers.value()[0].accepted);
    EXPECT_FALSE(answers.value()[1].accepted);
    EXPECT_EQ(answers.value()[1].reason, "rank 2: its shard moved");
    EXPECT_EQ(answers.value()[1].plan, -1);
    EXPECT_EQ(answers.value()[2].plan, 1);
    Gathered gathered;
    TIDE_ASSERT_OK(start_gather(group, 1, rank, 3, &gathered));
    TIDE_ASSERT_OK(gathered.started.operation->wait());
  });
}

TEST(EngineVote, AnotherShapeOnOneRankNamesTheParameter) {
  run_ranks(3, {}, [](int rank, Group& group) {
    auto requests = layers(2, 3);
    if (rank == 1)
      requests[1].parameters[0].shard_numel = requests[1].parameters[0].unsharded_numel = 7;
    auto answers = group.plan(requests, 1);
    TIDE_ASSERT_OK(answers.status());
    EXPECT_TRUE(answers.value()[0].accepted);
    EXPECT_THAT(answers.value()[1].reason,
                AllOf(HasSubstr("ranks disagree about parameter 0 ('w1')"),
                      HasSubstr("rank 1 has 7 x bf16 a shard"),
                      HasSubstr("rank 0 has 1000 x bf16 a shard")));
  });
}

TEST(EngineVote, NoMemoryOnOneRankRefusesOnAll) {
  WorldOptions options;
  options.fabric.refuse_window = [](int rank, int64_t bytes) {
    return rank == 1 && bytes == 6 * 8192 ? Status(ErrorKind::kSystem, "no space left")
                                          : Status::ok();
  };
  run_ranks(3, options, [](int rank, Group& group) {
    auto answers = group.plan(layers(2, 3), 4);  // 6000 bytes a slot, 4 + 1 + 1 slots
    TIDE_ASSERT_OK(answers.status());
    for (const PlanAnswer& answer : answers.value()) {
      EXPECT_FALSE(answer.accepted);
      EXPECT_THAT(answer.reason, HasSubstr("rank 1: no space left"));
    }
    EXPECT_TRUE(group.error().is_ok());
    auto again = group.plan(layers(2, 3), 1);
    TIDE_ASSERT_OK(again.status());
    EXPECT_TRUE(again.value()[1].accepted);
    Gathered gathered;
    TIDE_ASSERT_OK(start_gather(group, 0, rank, 3, &gathered));
    TIDE_ASSERT_OK(gathered.started.operation->wait());
  });
}

TEST(EngineVote, ArenaLimitOfOneProcessRefusesTheLargestOnAll) {
  WorldOptions options;
  options.per_rank = [](int rank, GroupOptions& group) {
    if (rank == 1) group.arena_limit_bytes = 100 << 10;
  };
  run_ranks(2, options, [](int, Group& group) {
    auto requests = layers(2, 2);
    requests[1].parameters = {tensor("large", 100'000, 2)};
    auto answers = group.plan(requests, 1);
    TIDE_ASSERT_OK(answers.status());
    EXPECT_TRUE(answers.value()[0].accepted) << answers.value()[0].reason;
    EXPECT_FALSE(answers.value()[1].accepted);
    EXPECT_THAT(answers.value()[1].reason,
                AllOf(HasSubstr("rank 1: the arena limit"), HasSubstr("TIDE_ARENA_LIMIT")));
    auto allocation = group.allocate(1 << 20);
    EXPECT_EQ(allocation.status().kind(), ErrorKind::kUnsupported);
    EXPECT_THAT(allocation.status().message(),
                HasSubstr("rank 1: its process would pass the arena limit"));
    EXPECT_TRUE(group.error().is_ok());
  });
}

TEST(EngineVote, MissingRankEndsTheVoteAtItsDeadline) {
  WorldOptions options;
  options.group.timeout = 500ms;
  std::atomic<bool> ended{false};
  run_ranks(2, options, [&](int rank, Group& group) {
    if (rank == 1) {
      while (!ended) std::this_thread::sleep_for(5ms);
      return;
    }
    const auto answers = group.plan(layers(1, 2), 1);
    ended = true;
    EXPECT_EQ(answers.status().kind(), ErrorKind::kTimeout);
    EXPECT_THAT(answers.status().message(), HasSubstr("no ballot of rank 1"));
  });
}

TEST(EngineSlots, GoRoundAndRunOutAlikeOnAllRanks) {
  run_ranks(2, {}, [](int rank, Group& group) {
    auto requests = layers(4, 2);
    for (PlanRequest& request : requests) request.may_lease = false;
    TIDE_ASSERT_OK(group.plan(requests, 1).status());  // 2 slots
    Gathered held[4];
    std::vector<int> order;
    for (int g : {0, 1}) {
      TIDE_ASSERT_OK(start_gather(group, g, rank, 2, &held[g]));
      order.push_back(held[g].started.slot);
    }
    const Status refused = start_gather(group, 2, rank, 2, &held[2]);
    EXPECT_EQ(refused.kind(), ErrorKind::kUnsupported);
    EXPECT_THAT(refused.message(), HasSubstr("no slot is free for gather of 'layers.2'"));
    EXPECT_TRUE(group.error().is_ok());
    // Vacated in the order 1, 0: given out in that order.
    TIDE_ASSERT_OK(group.vacate(1));
    TIDE_ASSERT_OK(group.vacate(0));
    for (int g : {2, 3}) TIDE_ASSERT_OK(start_gather(group, g, rank, 2, &held[g]));
    EXPECT_EQ(held[2].started.slot, order[1]);
    EXPECT_EQ(held[3].started.slot, order[0]);
    for (int g : {2, 3}) {
      TIDE_ASSERT_OK(held[g].started.operation->wait());
      EXPECT_EQ(wrong_bytes(GroupLayout({tensor("w", 1000, 2)}, 2), 0, held[g].started.places[0]),
                0);
    }
  });
}

TEST(EngineSlots, ALaterRootOfLargerGroupsReplacesTheSlots) {
  run_ranks(2, {}, [](int rank, Group& group) {
    TIDE_ASSERT_OK(group.plan(layers(2, 2, 1000), 1).status());
    const int64_t before = group.counters().arena_bytes;
    Gathered old_root, new_root;
    TIDE_ASSERT_OK(start_gather(group, 0, rank, 2, &old_root));
    TIDE_ASSERT_OK(group.plan(layers(2, 2, 50'000), 1).status());
    EXPECT_GT(group.counters().arena_bytes, before);
    TIDE_ASSERT_OK(start_gather(group, 2, rank, 2, &new_root, 50'000));
    TIDE_ASSERT_OK(old_root.started.operation->wait());
    TIDE_ASSERT_OK(new_root.started.operation->wait());
    EXPECT_EQ(wrong_bytes(GroupLayout({tensor("w", 1000, 2)}, 2), 0, old_root.started.places[0]),
              0);
    EXPECT_EQ(wrong_bytes(GroupLayout({tensor("w", 50'000, 2)}, 2), 0, new_root.started.places[0]),
              0);
    TIDE_ASSERT_OK(group.vacate(0));
    TIDE_ASSERT_OK(start_gather(group, 1, rank, 2, &old_root));  // the small group in a large slot
    TIDE_ASSERT_OK(old_root.started.operation->wait());
    EXPECT_EQ(wrong_bytes(GroupLayout({tensor("w", 1000, 2)}, 2), 0, old_root.started.places[0]),
              0);
  });
}

TEST(EngineFailure, TimeoutNamesGroupOperationCounterAndRank) {
  WorldOptions options;
  options.group.timeout = 300ms;
  std::atomic<int> ended{0};
  run_ranks(2, options, [&](int rank, Group& group) {
    TIDE_ASSERT_OK(group.plan(layers(1, 2), 1).status());
    if (rank == 1) {
      while (ended == 0) std::this_thread::sleep_for(5ms);
      return;
    }
    Gathered gathered;
    TIDE_ASSERT_OK(start_gather(group, 0, rank, 2, &gathered));
    const Status early = gathered.started.operation->wait(20ms);
    EXPECT_EQ(early.kind(), ErrorKind::kTimeout);
    EXPECT_TRUE(group.error().is_ok());  // only this wait gave up
    EXPECT_THAT(
        group.flight_record(),
        AllOf(HasSubstr("\"state\": \"running\""), HasSubstr("\"subject\": \"'layers.0'\""),
              HasSubstr(kOverCuda ? "waiting for gather_"
                                  : "waiting for gather_credit from rank 1, wanted 1, got 0")));
    const Status status = gathered.started.operation->wait();
    EXPECT_EQ(status.kind(), ErrorKind::kTimeout);
    EXPECT_THAT(status.message(),
                HasSubstr(kOverCuda ? "rank 0 of group 'test': waited 300 ms for gather 1 of "
                                      "'layers.0': gather_"  // credit or arrival
                                    : "group 'test', rank 0: gather 1 of 'layers.0': waited 300 ms "
                                      "for gather_credit from rank 1, wanted 1, got 0"));
    EXPECT_EQ(group.gather({0, pointers(gathered.shards)}).status().message(), status.message());
    EXPECT_THAT(group.flight_record(), HasSubstr("\"state\": \"failed\""));
    ++ended;
  });
}

TEST(EngineFailure, ALostPeerEndsEveryOperationInFlight) {
  if (kOverCuda) GTEST_SKIP() << "a rank of the host fabric cannot die alone in one process";
  for (int repetition = 0; repetition < 20; ++repetition) {
    std::vector<Fabric*> fabrics;
    run_ranks(
        4, {},
        [&](int rank, Group& group) {
          TIDE_ASSERT_OK(group.plan(layers(4, 4), 3).status());
          if (rank == 2) {
            std::this_thread::sleep_for(std::chrono::milliseconds(repetition % 4));
            break_memory_fabric(*fabrics[2]);
            return;
          }
          Gathered gathered[4];
          for (int g = 0; g < 4; ++g) {
            const Status started = start_gather(group, g, rank, 4, &gathered[g]);
            if (!started.is_ok()) continue;
            const Status status = gathered[g].started.operation->wait();
            ASSERT_FALSE(status.is_ok());
            EXPECT_THAT(status.message(), AllOf(HasSubstr("rank 2"), HasSubstr("group 'test'")));
          }
          EXPECT_EQ(group.error().kind(), ErrorKind::kPeerLost);
        },
        &fabrics);
  }
}

TEST(EngineFailure, AbortEndsOperationsHereAndThere) {
  run_ranks(3, {}, [](int rank, Group& group) {
    TIDE_ASSERT_OK(group.plan(layers(1, 3), 1).status());
    if (rank == 1) {
      std::this_thread::sleep_for(20ms);
      group.abort(Status(ErrorKind::kPeerLost, "the user gave up"));
      EXPECT_EQ(group.error().message(), "group 'test', rank 1: the user gave up");
      return;
    }
    Gathered gathered;
    const Status started = start_gather(group, 0, rank, 3, &gathered);
    const Status status = started.is_ok() ? gathered.started.operation->wait() : started;
    EXPECT_THAT(status.message(), HasSubstr("the user gave up"));
    bool called = !started.is_ok();
    if (started.is_ok())
      gathered.started.operation->on_done([&](const Status& done) { called = !done.is_ok(); });
    EXPECT_TRUE(called);
  });
}

// Completed operations keep their result, and nothing that fails later says OK.
TEST(EngineFailure, OperationsDoneBeforeTheErrorStayDone) {
  std::atomic<int> done{0};
  run_ranks(2, {}, [&done](int rank, Group& group) {
    TIDE_ASSERT_OK(group.plan(layers(2, 2), 1).status());
    Gathered first;
    TIDE_ASSERT_OK(start_gather(group, 0, rank, 2, &first));
    TIDE_ASSERT_OK(first.started.operation->wait());
    for (++done; done < 2;) std::this_thread::yield();  // done there as well
    group.abort(Status(ErrorKind::kPeerLost, "rank " + std::to_string(rank) + " gave up"));
    EXPECT_TRUE(first.started.operation->status().is_ok());
    EXPECT_EQ(wrong_bytes(GroupLayout({tensor("w", 1000, 2)}, 2), 0, first.started.places[0]), 0);
    Gathered second;
    EXPECT_FALSE(start_gather(group, 1, rank, 2, &second).is_ok());
  });
}

TEST(EngineClose, MemoryInUseOutlivesTheGroup) {
  std::vector<Gathered> kept(2);
  std::vector<std::shared_ptr<void>> allocations(2);
  WorldOptions options;
  options.keeps_memory = true;
  run_ranks(2, options, [&](int rank, Group& group) {
    TIDE_ASSERT_OK(group.plan(layers(1, 2), 1).status());
    TIDE_ASSERT_OK(start_gather(group, 0, rank, 2, &kept[rank]));
    TIDE_ASSERT_OK(kept[rank].started.operation->wait());
    auto allocation = group.allocate(10'000);
    TIDE_ASSERT_OK(allocation.status());
    allocations[rank] = allocation.value();
    group.close();
    group.close();
    EXPECT_THAT(group.allocate(10).status().message(), HasSubstr("the group is closed"));
  });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(wrong_bytes(GroupLayout({tensor("w", 1000, 2)}, 2), 0, kept[rank].started.places[0]),
              0);
    static_cast<char*>(allocations[rank].get())[9'999] = 1;
  }
}

TEST(EngineClose, WithOperationsInFlightEndsThem) {
  const auto begin = Clock::now();
  run_ranks(2, {}, [&](int rank, Group& group) {
    TIDE_ASSERT_OK(group.plan(layers(1, 2), 1).status());
    Gathered gathered;
    if (rank == 1) {
      std::this_thread::sleep_for(1500ms);
      return;
    }
    TIDE_ASSERT_OK(start_gather(group, 0, rank, 2, &gathered));
    group.close();
    EXPECT_TRUE(gathered.started.operation->is_done());
    EXPECT_THAT(gathered.started.operation->status().message(),
                HasSubstr("closed while operations were in flight"));
  });
  EXPECT_LT(Clock::now() - begin, 20s);
}

TEST(EngineArena, MeetingsAreInTheFlightRecord) {
  run_ranks(2, {}, [](int, Group& group) {
    TIDE_ASSERT_OK(group.allocate(4096).status());
    EXPECT_THAT(group.flight_record(),
                AllOf(HasSubstr("\"kind\": \"allocate\", \"subject\": \"4096 bytes\""),
                      HasSubstr("\"state\": \"done\"")));
  });
}

TEST(EngineArena, AllocationsAreFreedWhenEveryRankDroppedThem) {
  run_ranks(3, {}, [](int, Group& group) {
    const int64_t before = group.counters().arena_bytes;
    for (int round = 0; round < 50; ++round) {
      auto allocation = group.allocate(1 << 20);
      TIDE_ASSERT_OK(allocation.status());
      static_cast<char*>(allocation.value().get())[(1 << 20) - 1] = 1;
    }
    EXPECT_LE(group.counters().arena_bytes, before + (4 << 20));
  });
}

TEST(EngineArguments, AreCheckedBeforeAnythingIsSent) {
  run_ranks(2, {}, [](int rank, Group& group) {
    TIDE_ASSERT_OK(group.plan(layers(2, 2), 1).status());
    EXPECT_THAT(group.gather({7, {}}).status().message(),
                HasSubstr("plan 7, which is not one of the group's 2 plans"));
    EXPECT_THAT(group.gather({0, {}}).status().message(), HasSubstr("wants 1 shards, got 0"));
    EXPECT_THAT(group.vacate(-1).message(), HasSubstr("plan -1"));
    ReduceCall call;
    call.plan = 0;
    call.parameters = {1};
    EXPECT_THAT(group.reduce(call).status().message(), HasSubstr("1 parameters want as many"));
    call.gradient_dtypes = {DType::kBFloat16};
    call.gradients = {nullptr};
    call.outputs = {nullptr};
    EXPECT_THAT(group.reduce(call).status().message(), HasSubstr("ascend below 1, got 1"));
    call.parameters = {0};
    call.gradient_dtypes = {DType::kBool};
    EXPECT_FALSE(group.reduce(call).is_ok());
    auto layout = std::make_shared<GroupLayout>(std::vector<Parameter>{tensor("t", 4, 3)}, 3);
    EXPECT_THAT(group.gather_list(layout, {nullptr}, {nullptr}).status().message(),
                HasSubstr("3 ranks in a group of 2"));
    EXPECT_THAT(group.allocate(0).status().message(), HasSubstr("at least one byte"));
    EXPECT_TRUE(group.error().is_ok());
    Gathered gathered;  // all ranks are still in step
    TIDE_ASSERT_OK(start_gather(group, 0, rank, 2, &gathered));
    TIDE_ASSERT_OK(gathered.started.operation->wait());
  });
}

}  // namespace
}  // namespace tide::testing
