// The decision of a vote: a pure function of all ballots.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "backend/engine/planning.h"

namespace tide {
namespace {

using ::testing::HasSubstr;

PlanRequest request(const std::string& name, int64_t shard_numel, int ranks) {
  PlanRequest made;
  made.name = name;
  made.parameters = {
      {"w", DType::kBFloat16, shard_numel, ranks * shard_numel, 1, DType::kBFloat16}};
  return made;
}

std::vector<PlanBallot> ballots_of(int ranks, const std::vector<PlanRequest>& requests,
                                   int depth = 1) {
  PlanBallot ballot;
  ballot.requests = requests;
  ballot.prefetch_depth = depth;
  ballot.staging_slice_bytes = 1 << 20;
  ballot.landing_slice_bytes = 1 << 20;
  ballot.available_bytes = std::numeric_limits<int64_t>::max();
  return std::vector<PlanBallot>(static_cast<size_t>(ranks), ballot);
}

TEST(Planning, BallotsComeThroughUnchangedAndRubbishIsRefused) {
  PlanBallot ballot = ballots_of(1, {request("a", 10, 4), request("", 0, 4)}, 3)[0];
  ballot.requests[0].refusal = "no";
  ballot.requests[0].stays_unsharded = true;
  ballot.requests[1].serve_gather = false;
  ballot.requests[1].gradient_dtype = DType::kFloat32;
  ballot.requests[0].parameters[0].shard_dtype = DType::kFloat32;
  ballot.available_bytes = -5;
  ballot.retirable = {0, 3, 70};
  const std::string bytes = encode(ballot);
  auto decoded = decode(bytes);
  ASSERT_TRUE(decoded.is_ok());
  EXPECT_EQ(encode(decoded.value()), bytes);
  EXPECT_EQ(decoded.value().requests[0].refusal, "no");
  EXPECT_TRUE(decoded.value().requests[0].stays_unsharded);
  EXPECT_FALSE(decoded.value().requests[1].serve_gather);
  EXPECT_EQ(decoded.value().retirable, ballot.retirable);
  for (size_t length = 0; length < bytes.size(); ++length)
    EXPECT_FALSE(decode(bytes.substr(0, length)).is_ok());
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    std::string broken = bytes;
    broken[random() % broken.size()] = static_cast<char>(random());
    (void)decode(broken);  // whatever it says, it reads nothing beyond its bytes
  }
}

TEST(Planning, SlotsAreDepthPlusOnePlusOneWhereStagingIsLeased) {
  auto requests = std::vector<PlanRequest>{request("a", 10'000, 2), request("b", 20'000, 2),
                                           request("c", 5'000, 2)};
  const auto leased = decide(ballots_of(2, requests, 2), {});
  EXPECT_EQ(leased.new_shared_slots, 4);
  EXPECT_EQ(leased.shared_slot_bytes, align_slot(2 * 20'000 * 2));  // of the largest
  EXPECT_FALSE(leased.makes_area);
  for (const PlanAnswer& answer : leased.answers) EXPECT_EQ(answer.staging, Staging::kLeased);
  for (PlanRequest& made : requests) made.may_lease = false;
  const auto area = decide(ballots_of(2, requests, 2), {});
  EXPECT_EQ(area.new_shared_slots, 3);
  EXPECT_TRUE(area.makes_area);
  EXPECT_EQ(area.new_bytes, 3 * area.shared_slot_bytes + 2 * 2 * (1 << 20));
  EXPECT_EQ(area.answers[0].staging, Staging::kArea);
}

TEST(Planning, AGroupThatStaysUnshardedHasASlotOfItsOwn) {
  auto requests = std::vector<PlanRequest>{request("root", 50'000, 2), request("a", 1'000, 2)};
  requests[0].stays_unsharded = true;
  const auto decision = decide(ballots_of(2, requests), {});
  EXPECT_EQ(decision.own_slot_bytes, (std::vector<int64_t>{align_slot(200'000), 0}));
  EXPECT_EQ(decision.shared_slot_bytes, align_slot(4'000));
}

TEST(Planning, WideGradientsDoNotFitALeasedSlot) {
  auto made = request("a", 1'000, 4);
  made.gradient_dtype = DType::kFloat32;
  EXPECT_EQ(decide(ballots_of(4, {made}), {}).answers[0].staging, Staging::kArea);
  // Packing may need more than the places; then the slot is a little larger.
  auto small = request("b", 65, 16);
  const auto decision = decide(ballots_of(16, {small}), {});
  EXPECT_EQ(decision.answers[0].staging, Staging::kLeased);
  EXPECT_EQ(decision.answers[0].slot_bytes, 16 * 192);
}

TEST(Planning, ASecondRootReusesOrReplacesTheSlots) {
  ArenaState arena{3, align_slot(40'000), true, 1, false};
  const auto smaller = decide(ballots_of(2, {request("a", 1'000, 2)}), arena);
  EXPECT_EQ(smaller.new_shared_slots, 0);
  EXPECT_EQ(smaller.new_bytes, 0);
  const auto deeper = decide(ballots_of(2, {request("a", 1'000, 2)}, 3), arena);
  EXPECT_EQ(deeper.new_shared_slots, 2);
  EXPECT_FALSE(deeper.replaces_shared);
  const auto larger = decide(ballots_of(2, {request("a", 100'000, 2)}), arena);
  EXPECT_TRUE(larger.replaces_shared);
  EXPECT_EQ(larger.new_shared_slots, 3);
}

TEST(Planning, RefusalsCarryTheFirstRefusingRank) {
  auto ballots = ballots_of(3, {request("a", 10, 3), request("b", 10, 3)});
  ballots[1].requests[0].refusal = "x";
  ballots[2].requests[0].refusal = "y";
  ballots[2].requests[1].parameters[0].dtype = DType::kFloat32;
  const auto decision = decide(ballots, {});
  EXPECT_EQ(decision.answers[0].reason, "rank 1: x");
  EXPECT_THAT(decision.answers[1].reason,
              HasSubstr("parameter 0 ('w'): rank 2 has 10 x bf16 a shard, 30 x fp32"));
  EXPECT_EQ(decision.new_bytes, 0);
}

TEST(Planning, WhatCannotBeServedIsRefusedWithAReason) {
  auto none = request("a", 10, 2);
  none.serve_gather = none.serve_reduce = false;
  auto bits = request("b", 10, 2);
  bits.gradient_dtype = DType::kBool;
  auto cast = request("c", 10, 2);
  cast.parameters[0].shard_dtype = DType::kInt32;
  auto layout = request("d", 10, 2);
  layout.parameters[0].unsharded_numel = 21;
  const auto decision = decide(ballots_of(2, {none, bits, cast, layout}), {});
  EXPECT_THAT(decision.answers[0].reason, HasSubstr("neither direction"));
  EXPECT_THAT(decision.answers[1].reason, HasSubstr("bool"));
  EXPECT_THAT(decision.answers[2].reason, HasSubstr("cannot cast int32 to bf16"));
  EXPECT_THAT(decision.answers[3].reason, HasSubstr("'w'"));
}

TEST(Planning, TheArenaLimitRefusesTheLargestFirst) {
  auto ballots =
      ballots_of(2, {request("a", 1'000, 2), request("b", 100'000, 2), request("c", 2'000, 2)});
  ballots[1].available_bytes = 3 * align_slot(8'000);
  const auto decision = decide(ballots, {});
  EXPECT_TRUE(decision.answers[0].accepted);
  EXPECT_FALSE(decision.answers[1].accepted);
  EXPECT_THAT(decision.answers[1].reason, HasSubstr("rank 1: the arena limit leaves 24576 bytes"));
  EXPECT_TRUE(decision.answers[2].accepted);
  EXPECT_EQ(decision.new_bytes, 3 * align_slot(8'000));
  ballots[0].available_bytes = -1;
  for (const PlanAnswer& answer : decide(ballots, {}).answers) EXPECT_FALSE(answer.accepted);
}

TEST(Planning, APlanIsRetiredWhenEveryRankNamesIt) {
  auto ballots = ballots_of(3, {});
  EXPECT_TRUE(retired_by_all(ballots).empty());
  ballots[0].retirable = {1, 2, 5, 9};
  ballots[1].retirable = {0, 2, 5, 9, 11};
  EXPECT_TRUE(retired_by_all(ballots).empty());
  ballots[2].retirable = {2, 3, 9};
  EXPECT_EQ(retired_by_all(ballots), (std::vector<int>{2, 9}));
}

TEST(Planning, WhatAVoteFreesIsAvailableToIt) {
  auto ballots = ballots_of(2, {request("a", 1'000, 2)});
  const int64_t needed = decide(ballots, {}).new_bytes;
  ballots[1].available_bytes = needed - 100;
  EXPECT_FALSE(decide(ballots, {}).answers[0].accepted);
  ArenaState arena;
  arena.freed_bytes = 100;
  EXPECT_TRUE(decide(ballots, arena).answers[0].accepted);
}

TEST(Planning, RanksThatPlanDifferentThingsGetAnError) {
  auto ballots = ballots_of(2, {request("a", 10, 2)});
  ballots[1].requests.push_back(request("b", 10, 2));
  EXPECT_THAT(decide(ballots, {}).error.message(), HasSubstr("rank 0 has 1 groups"));
  ballots = ballots_of(2, {request("a", 10, 2)});
  ballots[1].staging_slice_bytes = 64;
  EXPECT_EQ(decide(ballots, {}).error.kind(), ErrorKind::kInvalidUse);
}

}  // namespace
}  // namespace tide
