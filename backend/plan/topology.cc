#include "backend/plan/topology.h"

#include <algorithm>
#include <map>

namespace tide {
namespace {

// Ranks of each node, nodes in the order of their lowest rank, ranks in the order of their rails
// (then of their numbers).
std::vector<std::vector<int>> find_members(const std::vector<RankLocation>& locations) {
  std::map<std::string, size_t> numbers;
  std::vector<std::vector<int>> members;
  for (int rank = 0; rank < static_cast<int>(locations.size()); ++rank) {
    const auto [found, is_new] = numbers.emplace(locations[rank].node, members.size());
    if (is_new) members.emplace_back();
    members[found->second].push_back(rank);
  }
  for (std::vector<int>& node : members) {
    std::stable_sort(node.begin(), node.end(),
                     [&](int a, int b) { return locations[a].rail < locations[b].rail; });
  }
  return members;
}

}  // namespace

std::string Topology::check(const std::vector<RankLocation>& locations) {
  if (locations.empty()) return "a group has at least one rank";
  const std::vector<std::vector<int>> members = find_members(locations);
  const std::vector<int>& first = members.front();
  for (const std::vector<int>& node : members) {
    const std::string name = "node '" + locations[node.front()].node + "'";
    if (node.size() != first.size()) {
      return name + " brings " + std::to_string(node.size()) + " ranks of the group, node '" +
             locations[first.front()].node + "' " + std::to_string(first.size()) +
             "; every node must bring as many";
    }
    for (size_t local = 0; local < node.size(); ++local) {
      const int wanted = locations[first[local]].rail;
      const int got = locations[node[local]].rail;
      if (wanted == got) continue;
      return "rank " + std::to_string(node[local]) + " at position " + std::to_string(local) +
             " of " + name + " is on rail " + std::to_string(got) + ", rank " +
             std::to_string(first[local]) + " at the same position on rail " +
             std::to_string(wanted);
    }
  }
  return "";
}

Topology::Topology(const std::vector<RankLocation>& locations)
    : nodes_(locations.size()), locals_(locations.size()), members_(find_members(locations)) {
  for (int node = 0; node < nodes(); ++node) {
    for (int local = 0; local < static_cast<int>(members_[node].size()); ++local) {
      nodes_[members_[node][local]] = node;
      locals_[members_[node][local]] = local;
    }
  }
  for (int rank : members_.front()) rails_.push_back(locations[rank].rail);
}

}  // namespace tide
