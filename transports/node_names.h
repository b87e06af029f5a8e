// How messages name the nodes that a network joins: with the rank of the group that stands there.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tide {

class NodeNames {
 public:
  // ranks[n] is the group's rank on node n that this network reaches; empty: not known.
  explicit NodeNames(std::vector<int> ranks = {}) : ranks_(std::move(ranks)) {}

  // "node 3 (rank 6)"
  std::string of(int node) const {
    const std::string name = "node " + std::to_string(node);
    if (node < 0 || node >= static_cast<int>(ranks_.size())) return name;
    return name + " (rank " + std::to_string(ranks_[static_cast<size_t>(node)]) + ")";
  }

 private:
  std::vector<int> ranks_;
};

}  // namespace tide
