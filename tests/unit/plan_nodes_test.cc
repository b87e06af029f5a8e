// Plans between nodes: topology, doubling, seats and batches; each worked example, then by property
// for 1..17 nodes and 1..8 ranks a node.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "backend/plan/batches.h"
#include "backend/plan/doubling.h"
#include "backend/plan/seats.h"
#include "backend/plan/topology.h"

namespace tide {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kMostNodes = 17;
constexpr int kMostLocals = 8;

// ---- Topology ----

TEST(TopologyTest, WorkedExample) {
  const std::vector<RankLocation> locations = {{"b", 1}, {"a", 0}, {"b", 0}, {"a", 1}};
  ASSERT_EQ(Topology::check(locations), "");
  const Topology topology(locations);
  EXPECT_EQ(topology.nodes(), 2);
  EXPECT_EQ(topology.local_ranks(), 2);
  EXPECT_THAT(topology.members(0), ElementsAre(2, 0));
  EXPECT_THAT(topology.members(1), ElementsAre(1, 3));
  EXPECT_EQ(topology.node(3), 1);
  EXPECT_EQ(topology.local(3), 1);
  EXPECT_EQ(topology.rail(1), 1);
}

TEST(TopologyTest, TablesAreInverseInAnyOrderOfRanks) {
  std::mt19937 random(4);
  for (int nodes = 1; nodes <= kMostNodes; ++nodes) {
    for (int locals = 1; locals <= kMostLocals; ++locals) {
      std::vector<RankLocation> locations;
      for (int node = 0; node < nodes; ++node) {
        for (int local = 0; local < locals; ++local)
          locations.push_back({"host" + std::to_string(node), 2 * local + 1});
      }
      std::shuffle(locations.begin(), locations.end(), random);
      ASSERT_EQ(Topology::check(locations), "");
      const Topology topology(locations);
      ASSERT_EQ(topology.nodes(), nodes);
      ASSERT_EQ(topology.local_ranks(), locals);
      int lowest_before = -1;
      for (int node = 0; node < nodes; ++node) {
        for (int local = 0; local < locals; ++local) {
          const int rank = topology.rank(node, local);
          EXPECT_EQ(topology.node(rank), node);
          EXPECT_EQ(topology.local(rank), local);
          EXPECT_EQ(locations[rank].rail, topology.rail(local));
          EXPECT_EQ(locations[rank].node, locations[topology.rank(node, 0)].node);
        }
        const int lowest =
            *std::min_element(topology.members(node).begin(), topology.members(node).end());
        EXPECT_GT(lowest, lowest_before);
        lowest_before = lowest;
      }
    }
  }
}

TEST(TopologyTest, RanksThatShareARailKeepTheirOrder) {
  const std::vector<RankLocation> locations = {{"a", 0}, {"a", 0}, {"b", 0}, {"b", 0}};
  ASSERT_EQ(Topology::check(locations), "");
  EXPECT_THAT(Topology(locations).members(1), ElementsAre(2, 3));
}

TEST(TopologyTest, RefusalsNameNodesRanksAndRails) {
  EXPECT_NE(Topology::check({}), "");
  EXPECT_THAT(Topology::check({{"a", 0}, {"a", 1}, {"b", 0}}),
              AllOf(HasSubstr("'b' brings 1"), HasSubstr("'a' 2")));
  EXPECT_THAT(Topology::check({{"a", 0}, {"a", 1}, {"b", 0}, {"b", 2}}),
              AllOf(HasSubstr("rank 3"), HasSubstr("rail 2"), HasSubstr("rail 1")));
}

// ---- Doubling ----

TEST(DoublingTest, WorkedExample) {
  const std::vector<DoublingRound> rounds = doubling_rounds(5, 0);
  ASSERT_EQ(rounds.size(), 3u);
  EXPECT_EQ(rounds[0].send_to_node, 4);
  EXPECT_EQ(rounds[0].receive_from_node, 1);
  EXPECT_EQ(rounds[1].send_to_node, 3);
  EXPECT_EQ(rounds[1].shards, 2);
  EXPECT_EQ(rounds[2].send_to_node, 1);
  EXPECT_EQ(rounds[2].shards, 1);
  EXPECT_EQ(node_at_offset(5, 0, rounds[2].first_received), 4);
}

TEST(DoublingTest, EightNodesTakeThreeRounds) { EXPECT_EQ(doubling_rounds(8, 3).size(), 3u); }

// Plays all rounds on sets of shards.
TEST(DoublingTest, EveryShardArrivesOnceAndOnlyWhatIsThereIsSent) {
  for (int nodes = 1; nodes <= kMostNodes; ++nodes) {
    std::vector<std::vector<int>> held(static_cast<size_t>(nodes));  // in the order of arrival
    std::vector<std::vector<DoublingRound>> rounds;
    for (int node = 0; node < nodes; ++node) {
      held[node].push_back(node);
      rounds.push_back(doubling_rounds(nodes, node));
    }
    size_t wanted_rounds = 0;
    while ((1 << wanted_rounds) < nodes) ++wanted_rounds;
    ASSERT_EQ(rounds[0].size(), wanted_rounds);
    for (size_t d = 0; d < wanted_rounds; ++d) {
      const std::vector<std::vector<int>> before = held;
      for (int node = 0; node < nodes; ++node) {
        const DoublingRound& round = rounds[node][d];
        const DoublingRound& sender = rounds[round.receive_from_node][d];
        ASSERT_EQ(sender.send_to_node, node);
        ASSERT_EQ(sender.shards, round.shards);
        ASSERT_EQ(static_cast<int>(before[node].size()), round.first_received);
        for (int i = 0; i < round.shards; ++i) {
          ASSERT_LT(i, static_cast<int>(before[round.receive_from_node].size()));
          const int shard = before[round.receive_from_node][i];
          EXPECT_EQ(shard, node_at_offset(nodes, node, round.first_received + i));
          EXPECT_EQ(round_of_offset(round.first_received + i), static_cast<int>(d));
          EXPECT_LT(round_of_offset(i), static_cast<int>(d));
          held[node].push_back(shard);
        }
      }
    }
    for (const std::vector<int>& shards : held) {
      EXPECT_EQ(shards.size(), static_cast<size_t>(nodes));
      EXPECT_EQ(std::set<int>(shards.begin(), shards.end()).size(), static_cast<size_t>(nodes));
    }
  }
}

// ---- Seats ----

TEST(SeatsTest, PaperExample) {
  // Sources by their number c: D itself is 0, A, B, C are 1, 2, 3. Rows are segments, columns
  // locals of the target.
  const std::vector<std::string> square = {"DCBA", "ADCB", "BADC", "CBAD"};
  const std::string names = "DABC";
  for (int segment = 0; segment < 4; ++segment) {
    for (int number = 0; number < 4; ++number) {
      EXPECT_EQ(square[segment][seat_of_segment(4, segment, number)], names[number]);
    }
  }
}

TEST(SeatsTest, OwnerAndSeatAreTheSameLocal) {
  for (int locals = 1; locals <= kMostLocals; ++locals) {
    for (int number = 0; number < kMostNodes; ++number) {
      std::set<int> segments;
      for (int local = 0; local < locals; ++local) {
        const int segment = segment_of_local(locals, local, number);
        EXPECT_EQ(seat_of_segment(locals, segment, number), local);
        segments.insert(segment);
      }
      EXPECT_EQ(segments.size(), static_cast<size_t>(locals));
    }
  }
}

TEST(SeatsTest, NumbersNameSourcesAndTargets) {
  for (int nodes = 1; nodes <= kMostNodes; ++nodes) {
    for (int source = 0; source < nodes; ++source) {
      for (int target = 0; target < nodes; ++target) {
        const int number = source_number(nodes, source, target);
        ASSERT_GE(number, 0);
        ASSERT_LT(number, nodes);
        EXPECT_EQ(source_with_number(nodes, target, number), source);
        EXPECT_EQ(target_with_number(nodes, source, number), target);
      }
    }
  }
}

TEST(SeatsTest, SegmentsCoverTheShardInEqualRoom) {
  for (int64_t numel :
       {int64_t{0}, int64_t{1}, int64_t{15}, int64_t{16}, int64_t{1000}, (int64_t{1} << 40) + 3}) {
    for (int locals = 1; locals <= kMostLocals; ++locals) {
      int64_t next = 0;
      const int64_t room = segment_range(numel, locals, 0, 16).numel;
      for (int segment = 0; segment < locals; ++segment) {
        const SegmentRange range = segment_range(numel, locals, segment, 16);
        EXPECT_EQ(range.begin, next);
        EXPECT_TRUE(range.begin % 16 == 0 || range.numel == 0);
        EXPECT_LE(range.numel, room);
        next += range.numel;
      }
      EXPECT_EQ(next, numel);
    }
  }
}

// ---- Batches ----

TEST(BatchesTest, WorkedExample) {
  const std::vector<ReduceBatch> batches = reduce_batches(10, 4);
  ASSERT_EQ(batches.size(), 3u);
  EXPECT_EQ(batches[2].first_number, 8);
  EXPECT_EQ(batches[2].sources, 2);
  EXPECT_EQ(batches[1].area, 1);
  EXPECT_EQ(batches[2].area, 0);
  EXPECT_EQ(source_with_number(10, 2, 8), 4);
  EXPECT_EQ(source_with_number(10, 2, 9), 3);
  EXPECT_EQ(target_with_number(10, 4, 8), 2);
  EXPECT_EQ(target_with_number(10, 4, 9), 3);
  for (int local = 0; local < 4; ++local) {
    int filled = 0;
    for (int segment = 0; segment < 4; ++segment)
      filled += is_seat_filled(batches[2], 4, segment, local);
    EXPECT_EQ(filled, 2);
  }
}

TEST(BatchesTest, LatinSquareAndEverySourceOnce) {
  for (int nodes = 1; nodes <= kMostNodes; ++nodes) {
    for (int locals = 1; locals <= kMostLocals; ++locals) {
      std::set<std::pair<int, int>> added;  // (source number, segment)
      int next_number = 0;
      int index = 0;
      for (const ReduceBatch& batch : reduce_batches(nodes, locals)) {
        EXPECT_EQ(batch.first_number, next_number);
        EXPECT_GE(batch.sources, 1);
        EXPECT_LE(batch.sources, std::min(kLargestBatch, locals));
        EXPECT_EQ(batch.area, index % 2);
        std::set<std::pair<int, int>> taken;  // (local, segment): nobody sits twice
        for (int number = next_number; number < next_number + batch.sources; ++number) {
          EXPECT_EQ(batch_of_number(locals, number), index);
          std::set<int> rows, columns;
          for (int segment = 0; segment < locals; ++segment) {
            const int local = seat_of_segment(locals, segment, number);
            EXPECT_TRUE(taken.insert({local, segment}).second) << "two sources on one seat";
            EXPECT_TRUE(is_seat_filled(batch, locals, segment, local));
            EXPECT_TRUE(added.insert({number, segment}).second);
            rows.insert(segment);
            columns.insert(local);
          }
          EXPECT_EQ(rows.size(), static_cast<size_t>(locals));
          EXPECT_EQ(columns.size(), static_cast<size_t>(locals));
        }
        for (int segment = 0; segment < locals; ++segment) {
          for (int local = 0; local < locals; ++local) {
            EXPECT_EQ(is_seat_filled(batch, locals, segment, local),
                      taken.count({local, segment}) == 1);
          }
        }
        next_number += batch.sources;
        ++index;
      }
      EXPECT_EQ(added.size(), static_cast<size_t>(nodes * locals));
    }
  }
}

// The whole reduce on numbers: partial sums of every node, through seats and batches, give the sum
// over all ranks.
TEST(BatchesTest, TwoLevelsGiveTheSumOfAllRanks) {
  constexpr int64_t kNumel = 37;
  const auto gradient = [](int node, int local, int target, int owner, int64_t element) {
    return ((node * 31 + local) * 37 + target) * 41 + owner * 43 + element * element;
  };
  for (int nodes : {1, 2, 5, 9}) {
    for (int locals : {1, 3, 4}) {
      for (int target = 0; target < nodes; ++target) {
        // By owner and element of the target's shards.
        std::vector<std::vector<int64_t>> sums(static_cast<size_t>(locals),
                                               std::vector<int64_t>(kNumel, 0));
        for (const ReduceBatch& batch : reduce_batches(nodes, locals)) {
          for (int number = batch.first_number; number < batch.first_number + batch.sources;
               ++number) {
            const int source = source_with_number(nodes, target, number);
            for (int local = 0; local < locals; ++local) {
              const SegmentRange range =
                  segment_range(kNumel, locals, segment_of_local(locals, local, number), 4);
              for (int owner = 0; owner < locals; ++owner) {
                for (int64_t i = range.begin; i < range.begin + range.numel; ++i) {
                  for (int l = 0; l < locals; ++l)
                    sums[owner][i] += gradient(source, l, target, owner, i);
                }
              }
            }
          }
        }
        for (int owner = 0; owner < locals; ++owner) {
          for (int64_t i = 0; i < kNumel; ++i) {
            int64_t wanted = 0;
            for (int node = 0; node < nodes; ++node) {
              for (int l = 0; l < locals; ++l) wanted += gradient(node, l, target, owner, i);
            }
            ASSERT_EQ(sums[owner][i], wanted);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tide
