// Gather between nodes, to slots: every rank pushes its shard inside its node, sends it over its
// rail to the ranks with the same local index, and pushes what comes over the rail to its node.
//
// Worked example (the paper's rule), M = 5 nodes of G = 2 ranks, rank = 2 * node + local, rank 0,
// doubling, confirm of the head. Peers on the rail are nodes; `offset` counts shards from the own.
//   rail         grant 0.0 to node 1, 1.0 to node 2, 2.0 to node 4      "my slot is free"
//   gather_push  signal gather_credit to 1
//   own          copy own shard -> own place
//   rail         arrive grant 0.0 from node 4; put 0.0: offset 0 to node 4
//   gather_push  wait gather_credit from 1; copy the own shard to 1; signal gather_arrival to 1 = 1
//   rail         arrive head 0.0 from node 1; confirm 0.0 to node 1
//   rail         arrive arrival 0.0 from node 1; signal rail_arrival = 1
//   rail         arrive confirm 0.0, grant 1.0; put 1.0, 1.1: offsets 0, 1 to node 3
//   gather_push  wait rail_arrival 1; copy offset 1: slot -> slot of 1; signal gather_arrival = 2
//   rail         arrive heads of round 1 from node 2; confirm 1.0 to node 2
//   rail         arrive arrival 1.0; signal rail_arrival = 2; 1.1 -> 3; confirm, grant; put 2.0:
//                offset 0 to node 1
//   ...          and push on offsets 2, 3, then 4
//   rail         drain
//   arrive       wait gather_arrival from 1 >= 5, rail_arrival >= 4
//
// Steps of the rail, for round d: what the round forwards has arrived whole; the pacing allows it;
// put. In every pacing a grant of round d (ring: of its first round) is the receiver's word that
// its slot is free; Pacing::kGrant sends it only when the receiver has the head of its own round
// d - 1. The last round has neither head nor confirm.
//
// A part's shards are pushed on together; small shards are put and pushed in parts of part_bytes.
//
// To all (slots that are open to all): a push, of the own shard and of what is pushed on, is one
// store to every rank of the node behind all their credits, as in gather_plan.h.
//
// Through landing (landing_slice_bytes > 0): where pieces are too many to be put at their places,
// or slots cannot be registered. The shards are cut into chunks; each rank packs a chunk of its own
// shard into its node's slice of landing area `chunk % 2`, the rounds above move packed slices from
// landing to landing, and what arrives is placed in the own slot before it is pushed on. Round d of
// chunk c has the number c * rounds + d. One chunk, as text, between the steps above:
//   own          copy the chunk: shard -> landing[0][own node]; signal packed
//   rail         wait packed; put 0.0: landing[0][own node] -> landing of node 4; ...
//   rail         arrive arrival 0.0 from node 1; confirm 0.1 to node 1     "it is here whole"
//   unpack       wait rail_arrival 1; copy the chunk of offset 1: landing -> slot; signal placed
//   gather_push  wait placed 1; copy offset 1: slot -> slot of 1; ...
//   rail         wait placed 4; arrive confirms 0.1, 1.1, 2.1; signal left = 1
//   rail         grant the first rounds of chunk 2
// Confirm of the whole says the same with its own confirms.
#pragma once

#include <cstdint>

#include "backend/plan/program.h"
#include "backend/plan/rail_rounds.h"
#include "backend/plan/topology.h"

namespace tide {

struct NodeGatherOptions {
  GatherSchedule schedule = GatherSchedule::kDoubling;
  Pacing pacing = Pacing::kConfirmHead;
  int64_t head_bytes = 8 << 20;  // of one round; kConfirmHead and kGrant
  int64_t part_bytes = 1 << 20;  // least bytes of a part; 0: every shard is one
  // Most bytes of a shard's chunk in landing; 0: straight to the places. Chunks times rounds stay
  // below 65,536.
  int64_t landing_slice_bytes = 0;
  bool to_all = false;
  bool operator==(const NodeGatherOptions&) const = default;
};

// topology.ranks() == layout.ranks(). With one node the program is plan_gather's, to slots, as text
// and as hash.
Program plan_node_gather(const GroupLayout& layout, const Topology& topology, int rank,
                         const NodeGatherOptions& options);

}  // namespace tide
