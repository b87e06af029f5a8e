// Which sources a target adds at a time in a reduce between nodes.
//
// The sources of a target, by their number c = (target - source) mod M, go in batches of
// consecutive numbers, at most min(8, G) a batch (G local ranks): with more, two sources of one
// batch would take the same seat (seats.h). The target's own partial sums, c = 0, are in the first
// batch. Two receive areas are used in turn, so the memory does not grow with the number of nodes;
// a source may send batch b once the target has added batch b - 2.
//
// Worked example, M = 10 nodes, G = 4: batches c = 0..3, 4..7, 8..9 in areas 0, 1, 0. The last
// batch is short: on each local rank two of the four segments come from nobody. Target 2 adds in
// batch 2 the sources 2 - 8 = 4 and 2 - 9 = 3 (modulo 10); source 4 sends in that batch to the
// targets 4 + 8 = 2 and 4 + 9 = 3.
#pragma once

#include <vector>

namespace tide {

inline constexpr int kLargestBatch = 8;  // sources

struct ReduceBatch {
  int first_number = 0;  // sources with numbers [first, first + sources)
  int sources = 0;
  int area = 0;
};

// By increasing number; each number 0..nodes-1 in exactly one batch.
std::vector<ReduceBatch> reduce_batches(int nodes, int local_ranks);

// The batch in which a source with this number is added.
int batch_of_number(int local_ranks, int number);

// Whether any source of the batch fills segment s on `local` of the target. Seats that nobody fills
// must read as zero, or must not be read.
bool is_seat_filled(const ReduceBatch& batch, int local_ranks, int segment, int local);

}  // namespace tide
