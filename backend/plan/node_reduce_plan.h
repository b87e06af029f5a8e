// Reduce between nodes on two levels: inside the source node every rank adds the segment that the
// Latin square gives it (seats.h), for each target node; the fp32 partial sums go over the rails to
// their seats; each seat's owner pushes the blocks to the ranks that keep them, and these add the
// sources in the order of their numbers c = 0, 1, ... M - 1.
//
// The shards are cut into segments, G to a chunk. A turn is one batch of sources (batches.h) of one
// chunk; turn t uses area t % 2 of every kind of memory, so memory depends neither on the group's
// size nor on the number of nodes.
//
// Worked example (the paper's square), G = 4 ranks a node, M = 4, target D with number c = 0,
// sources A, B, C with c = 1, 2, 3: one turn a chunk. Local 1 of B owns segment (1 + 2) % 4 = 3 for
// D: its peers push it their slices of segment 3 of the shards of D's four ranks; it adds them and
// puts four blocks to seat 3 of D's local 1. There the seats hold: 0 from C, 1 its own, 2 from A, 3
// from B. It pushes block k of each to D's local k, which adds D, A, B, C.
//
// One turn of rank (n, j), as text:
//   reduce_push  wait reduce_credit from peer; for each target copy my slices of the segment that
//                the peer owns; signal reduce_arrival
//   sum          for each target wait reduce_arrival; accumulate -> the own seat (c = 0) or partial
//                memory; signal partial_ready
//   reduce_rail  wait partial_ready; arrive grant; put the partial sums
//   reduce_rail  arrive arrival of the batch's sources; confirm; signal seat_arrival
//   unpack       wait for seats and block_credit; copy blocks to all; signal block_arrival,
//                seat_free
//   combine      wait block_arrival; combine -> total, or output; signal block_credit
//   reduce_rail  wait seat_free; grant turn t + 2; arrive confirms; signal partial_free
//
// A grant names the turn: "my seats of that turn's area are free". A confirm is the receiver's word
// that a put has left the sender's partial memory. Puts of no bytes have neither.
#pragma once

#include "backend/plan/program.h"
#include "backend/plan/topology.h"

namespace tide {

struct NodeReduceOptions {
  std::vector<int> subset;          // parameters with gradients
  std::vector<DType> dtypes;        // of those gradients, parallel to subset
  int64_t segment_bytes = 1 << 20;  // most packed bytes of one segment of one shard
  bool read_add = false;            // the last step by multicast; else by pushes
  // By pushes, where earlier reduces of the group may have been read-adds: seats are free only when
  // every rank of the node has read them.
  bool behind_read_adds = false;
  bool operator==(const NodeReduceOptions&) const = default;
};

// topology.ranks() == layout.ranks(), at least 2 nodes; one node is plan_reduce's.
Program plan_node_reduce(const GroupLayout& layout, const Topology& topology, int rank,
                         const NodeReduceOptions& options);

}  // namespace tide
