// GroupOptions::interrupted: which waits of the calling thread it ends, and what becomes of the
// group.
#include <atomic>

#include "tests/ranks/engine_world.h"

namespace tide::testing {
namespace {

struct Switch {
  std::atomic<bool> on{false};
  std::atomic<bool> over{false};
};

// Rank 0's handler raises while the switch is on.
WorldOptions interruptible(Switch* interrupt) {
  WorldOptions options;
  options.per_rank = [interrupt](int rank, GroupOptions& group) {
    if (rank != 0) return;
    group.interrupted = [interrupt] {
      return interrupt->on ? Status(ErrorKind::kInterrupted, "Ctrl-C") : Status::ok();
    };
  };
  return options;
}

void wait_until(const std::atomic<bool>& flag) {
  while (!flag) std::this_thread::sleep_for(1ms);
}

PlanRequest request() {
  PlanRequest made;
  made.name = "group";
  made.parameters = {{"w", DType::kBFloat16, 64, 128, 1, DType::kBFloat16}};
  return made;
}

TEST(Interrupt, EndsAMeetingAndTellsThePeers) {
  Switch interrupt;
  run_ranks(2, interruptible(&interrupt), [&](int rank, Group& group) {
    if (rank == 1) {
      wait_until(interrupt.over);
      const Status late = group.allocate(64).status();
      EXPECT_EQ(late.kind(), ErrorKind::kPeerLost);
      EXPECT_THAT(late.message(), ::testing::HasSubstr("Ctrl-C"));
      return;
    }
    interrupt.on = true;
    EXPECT_EQ(group.allocate(64).status().kind(), ErrorKind::kInterrupted);
    EXPECT_EQ(group.error().kind(), ErrorKind::kInterrupted);
    interrupt.over = true;
  });
}

TEST(Interrupt, EndsAVote) {
  Switch interrupt;
  run_ranks(2, interruptible(&interrupt), [&](int rank, Group& group) {
    if (rank == 1) return wait_until(interrupt.over);
    interrupt.on = true;
    EXPECT_EQ(group.plan({request()}, 1).status().kind(), ErrorKind::kInterrupted);
    EXPECT_FALSE(group.error().is_ok());
    interrupt.over = true;
  });
}

TEST(Interrupt, OfACallThatNoPeerHasSeenLeavesTheGroupWhole) {
  Switch interrupt;
  run_ranks(2, interruptible(&interrupt), [&](int rank, Group& group) {
    auto answers = group.plan({request()}, 1);
    TIDE_ASSERT_OK(answers.status());
    const GroupLayout layout(request().parameters, 2);
    const auto shards = make_shards(layout, rank);
    if (rank == 1) wait_until(interrupt.over);
    auto started = group.gather({0, pointers(shards)});  // rank 0's stays in flight
    TIDE_ASSERT_OK(started.status());
    if (rank == 0) {
      interrupt.on = true;
      EXPECT_EQ(group.allocate(64).status().kind(), ErrorKind::kInterrupted);
      EXPECT_EQ(group.plan({request()}, 1).status().kind(), ErrorKind::kInterrupted);
      TIDE_ASSERT_OK(group.error());
      interrupt.on = false;
      interrupt.over = true;
    }
    TIDE_ASSERT_OK(group.allocate(64).status());
    TIDE_ASSERT_OK(started.value().operation->wait());
    EXPECT_EQ(wrong_bytes(layout, 0, started.value().places[0]), 0);
  });
}

TEST(Interrupt, DoesNotReachOperationsInFlight) {
  Switch interrupt;
  run_ranks(2, interruptible(&interrupt), [&](int rank, Group& group) {
    auto layout = std::make_shared<const GroupLayout>(request().parameters, 2);
    const auto shards = make_shards(*layout, rank);
    std::vector<std::vector<uint8_t>> outputs = {std::vector<uint8_t>(256)};
    auto first = group.gather_list(layout, pointers(shards), mutable_pointers(outputs));
    TIDE_ASSERT_OK(first.status());
    TIDE_ASSERT_OK(first.value()->wait());
    if (rank == 1) wait_until(interrupt.on);
    auto second = group.gather_list(layout, pointers(shards), mutable_pointers(outputs));
    TIDE_ASSERT_OK(second.status());
    if (rank == 0) interrupt.on = true;
    TIDE_ASSERT_OK(second.value()->wait());
    EXPECT_EQ(wrong_bytes(*layout, 0, outputs[0].data()), 0);
  });
}

}  // namespace
}  // namespace tide::testing
