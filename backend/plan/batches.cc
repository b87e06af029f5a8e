#include "backend/plan/batches.h"

#include <algorithm>

#include "backend/plan/seats.h"

namespace tide {
namespace {

int batch_size(int local_ranks) { return std::min(kLargestBatch, local_ranks); }

}  // namespace

std::vector<ReduceBatch> reduce_batches(int nodes, int local_ranks) {
  const int size = batch_size(local_ranks);
  std::vector<ReduceBatch> batches;
  for (int first = 0; first < nodes; first += size) {
    batches.push_back({first, std::min(size, nodes - first), static_cast<int>(batches.size() % 2)});
  }
  return batches;
}

int batch_of_number(int local_ranks, int number) { return number / batch_size(local_ranks); }

bool is_seat_filled(const ReduceBatch& batch, int local_ranks, int segment, int local) {
  for (int number = batch.first_number; number < batch.first_number + batch.sources; ++number) {
    if (seat_of_segment(local_ranks, segment, number) == local) return true;
  }
  return false;
}

}  // namespace tide
