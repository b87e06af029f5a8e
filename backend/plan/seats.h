// Who adds what in a reduce between nodes, and where the partial sums sit at the target: a Latin
// square.
//
// For each target node the group's gradients of that node's shards are cut into G segments (G local
// ranks). Inside the source node, local j adds one of them, and sends it over its rail to local j
// of the target. With c = (target - source) mod M, local j owns segment (j + c) mod G. Seen from
// the target, segment s of the source with number c therefore sits on local (s - c) mod G: the same
// segment of different sources on different ranks, at the same address, so that one read-add over
// the ranks adds the sources.
//
// Worked example (the paper's), G = 4, target D, sources A, B, C with c = 1, 2, 3, and D itself
// with c = 0:
//              local 0   local 1   local 2   local 3
//   segment 0     D         C         B         A
//   segment 1     A         D         C         B
//   segment 2     B         A         D         C
//   segment 3     C         B         A         D
//
// A segment s holds part s of the shard of each of the target's ranks, one block each, so that at
// the end every rank adds only its own block of every segment.
#pragma once

#include <cstdint>

namespace tide {

// c of a source as a target sees it, and the source that has number c there.
int source_number(int nodes, int source_node, int target_node);
int source_with_number(int nodes, int target_node, int number);
// The target of which `source_node` is number c.
int target_with_number(int nodes, int source_node, int number);

// The segment that `local` of a source with number c owns and sends.
int segment_of_local(int local_ranks, int local, int number);

// The local rank of the target on which segment s of the source with number c sits.
int seat_of_segment(int local_ranks, int segment, int number);

// Elements [begin, begin + numel) of a shard that belong to segment s: nearly equal parts that
// begin at multiples of `alignment` elements (the last ones may be empty).
struct SegmentRange {
  int64_t begin = 0;
  int64_t numel = 0;
};
SegmentRange segment_range(int64_t shard_numel, int local_ranks, int segment, int64_t alignment);

}  // namespace tide
