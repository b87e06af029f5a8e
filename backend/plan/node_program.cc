#include "backend/plan/node_program.h"

#include "backend/layout/hash.h"

namespace tide {

Program start_node_program(Direction direction, const GroupLayout& layout, const Topology& topology,
                           int rank, std::initializer_list<int64_t> options) {
  Program program;
  program.direction = direction;
  program.ranks = layout.ranks();
  program.rank = rank;
  program.node = topology.node(rank);
  program.node_ranks = topology.members(program.node);
  uint64_t hash = hash_combine(layout.hash(), static_cast<uint64_t>(direction));
  hash = hash_combine(hash, static_cast<uint64_t>(topology.nodes()));
  for (int64_t option : options) hash = hash_combine(hash, static_cast<uint64_t>(option));
  for (int node = 0; node < topology.nodes(); ++node) {
    program.rail_ranks.push_back(topology.rank(node, topology.local(rank)));
    for (int member : topology.members(node))
      hash = hash_combine(hash, static_cast<uint64_t>(member));
  }
  program.hash = hash;
  return program;
}

}  // namespace tide
