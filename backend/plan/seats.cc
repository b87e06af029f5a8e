#include "backend/plan/seats.h"

#include <algorithm>

namespace tide {
namespace {

// Of numbers that may be negative.
int modulo(int64_t value, int modulus) {
  const int rest = static_cast<int>(value % modulus);
  return rest < 0 ? rest + modulus : rest;
}

}  // namespace

int source_number(int nodes, int source_node, int target_node) {
  return modulo(int64_t{target_node} - source_node, nodes);
}

int source_with_number(int nodes, int target_node, int number) {
  return modulo(int64_t{target_node} - number, nodes);
}

int target_with_number(int nodes, int source_node, int number) {
  return modulo(int64_t{source_node} + number, nodes);
}

int segment_of_local(int local_ranks, int local, int number) {
  return modulo(int64_t{local} + number, local_ranks);
}

int seat_of_segment(int local_ranks, int segment, int number) {
  return modulo(int64_t{segment} - number, local_ranks);
}

SegmentRange segment_range(int64_t shard_numel, int local_ranks, int segment, int64_t alignment) {
  const int64_t units = shard_numel / alignment + (shard_numel % alignment != 0);
  // Every segment takes the same number of units, so that all seats have equal room.
  const int64_t segment_numel = (units / local_ranks + (units % local_ranks != 0)) * alignment;
  const int64_t begin = std::min(shard_numel, segment * segment_numel);
  return {begin, std::min(segment_numel, shard_numel - begin)};
}

}  // namespace tide
