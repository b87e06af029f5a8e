// The order in which nodes exchange shards over one rail in a gather: recursive doubling, for any
// number of nodes.
//
// In round d node n sends the first min(2^d, M - 2^d) of the shards it has to node n - 2^d and
// receives as many from node n + 2^d (all modulo M). What it has, in order: the shards of nodes
// n, n + 1, n + 2, ...
//
// Worked example, M = 5, node 0 (the paper's rule; ceil(log2 5) = 3 rounds):
//   round 0   sends 0        to node 4   receives 1        from node 1
//   round 1   sends 0 1      to node 3   receives 2 3      from node 2
//   round 2   sends 0        to node 1   receives 4        from node 4     only what is missing
// Each node receives M - 1 shards, none twice.
#pragma once

#include <vector>

namespace tide {

struct DoublingRound {
  int send_to_node = 0;
  int receive_from_node = 0;
  int shards = 0;  // sent, and received
  // Offset, counted from the own node: received are offsets [first, first + shards).
  int first_received = 0;
};

// Rounds of a gather over `nodes` nodes as node `node` sees them; none for one node.
std::vector<DoublingRound> doubling_rounds(int nodes, int node);

// The node whose shard stands at `offset` of what `node` has: offset 0 is its own.
int node_at_offset(int nodes, int node, int offset);

// The round in which the shard at `offset` arrives; -1 for the own one. A round forwards offsets
// [0, shards), so it must wait for the arrivals of the rounds of all of them.
int round_of_offset(int offset);

}  // namespace tide
