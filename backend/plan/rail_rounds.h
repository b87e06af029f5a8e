// Which shards a rail sends and receives in each round of a gather between nodes, for any number of
// nodes, and how a round is cut into parts and head.
//
// A rank's shards are numbered from its own: offset i is the shard of node (n + i) mod M on its
// rail. Received offsets grow from round to round, 1, 2, ... M - 1, in every schedule.
//
// Worked example, M = 5, node 0 (the paper's rule for doubling; doubling.h):
//              doubling                    ring                        direct
//   round 0    0   to 4;  1   from 1       0 to 4;  1 from 1           0 to 4;  1 from 1
//   round 1    0 1 to 3;  2 3 from 2       1 to 4;  2 from 1           0 to 3;  2 from 2
//   round 2    0   to 1;  4   from 4       2 to 4;  3 from 1           0 to 2;  3 from 3
//   round 3                                3 to 4;  4 from 1           0 to 1;  4 from 4
// (the shards as offsets of node 0, then the peer). Direct forwards nothing; ring has one peer.
#pragma once

#include <cstdint>
#include <vector>

namespace tide {

enum class GatherSchedule : uint8_t { kDoubling, kRing, kDirect };
const char* gather_schedule_name(GatherSchedule schedule);

struct RailRound {
  int send_to_node = 0;
  int receive_from_node = 0;
  int first_sent = 0;      // offsets [first_sent, first_sent + shards) as the sender counts
  int first_received = 0;  // offsets [first_received, first_received + shards), as received here
  int shards = 0;          // sent, and received

  // Received offsets must reach this far before the round can be sent: [0, needed).
  int needed() const { return first_sent + shards; }
};

std::vector<RailRound> rail_rounds(GatherSchedule schedule, int nodes, int node);

// Consecutive shards of one round that travel as one put and are pushed on together.
struct RailPart {
  int first = 0;  // in the round's list
  int shards = 0;
  int64_t bytes = 0;
  int64_t head_bytes = 0;
};

// Greedy: a part ends as soon as it has part_bytes (0: every shard is a part); the round's first
// head_bytes, counted in list order, are the heads of the parts that they reach into.
std::vector<RailPart> cut_round(const std::vector<int64_t>& shard_bytes, int64_t part_bytes,
                                int64_t head_bytes);

}  // namespace tide
