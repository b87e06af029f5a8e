// Which rank of a group stands where: node and position inside the node ("local"), as tables.
//
// Worked example, 4 ranks, as (host, rail): rank 0 (b, 1), rank 1 (a, 0), rank 2 (b, 0), rank 3 (a,
// 1). Nodes are numbered in the order of their lowest rank: host b is node 0, host a node 1. Inside
// a node ranks are ordered by rail, so that local l talks over rail l to local l of every other
// node:
//   node 0 (b)   local 0 = rank 2   local 1 = rank 0
//   node 1 (a)   local 0 = rank 1   local 1 = rank 3
// Nothing may compute a rank as node * local_ranks + local.
//
// Immutable after construction; equal on all ranks, as it follows from the locations alone.
#pragma once

#include <string>
#include <vector>

namespace tide {

// What one rank tells the others. A node is where windows can be opened, not a host name: hosts may
// be cut.
struct RankLocation {
  std::string node;
  int rail = 0;  // of the process, by its nearest adapter
};

class Topology {
 public:
  // Empty string when `locations` (by group rank) describe a topology that plans can serve, else
  // the reason why not, the same on every rank: no ranks, nodes with unequal numbers of ranks,
  // rails that differ between nodes.
  static std::string check(const std::vector<RankLocation>& locations);

  // check() must have returned an empty string.
  explicit Topology(const std::vector<RankLocation>& locations);

  int ranks() const { return static_cast<int>(nodes_.size()); }
  int nodes() const { return static_cast<int>(members_.size()); }
  int local_ranks() const { return ranks() / nodes(); }  // ranks of each node

  int node(int rank) const { return nodes_[rank]; }
  int local(int rank) const { return locals_[rank]; }
  int rank(int node, int local) const { return members_[node][local]; }
  int rail(int local) const { return rails_[local]; }
  const std::vector<int>& members(int node) const { return members_[node]; }  // by local

 private:
  std::vector<int> nodes_;                 // by rank
  std::vector<int> locals_;                // by rank
  std::vector<std::vector<int>> members_;  // ranks by node and local
  std::vector<int> rails_;                 // by local
};

}  // namespace tide
