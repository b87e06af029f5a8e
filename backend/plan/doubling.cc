#include "backend/plan/doubling.h"

#include <algorithm>
#include <cstdint>

namespace tide {

std::vector<DoublingRound> doubling_rounds(int nodes, int node) {
  std::vector<DoublingRound> rounds;
  for (int64_t distance = 1; distance < nodes; distance *= 2) {
    DoublingRound round;
    const int step = static_cast<int>(distance);
    round.send_to_node = node_at_offset(nodes, node, nodes - step);
    round.receive_from_node = node_at_offset(nodes, node, step);
    round.shards = std::min(step, nodes - step);
    round.first_received = step;
    rounds.push_back(round);
  }
  return rounds;
}

int node_at_offset(int nodes, int node, int offset) {
  return static_cast<int>((int64_t{node} + offset) % nodes);
}

int round_of_offset(int offset) {
  int round = -1;
  for (; offset > 0; offset /= 2) ++round;
  return round;
}

}  // namespace tide
