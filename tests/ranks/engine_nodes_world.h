// Ranks as threads, on several nodes: a memory fabric a node, a memory network a rail.
#pragma once

#include "backend/plan/seats.h"
#include "tests/ranks/engine_numbers.h"
#include "transports/memory/memory_network.h"

namespace tide::testing {

struct NodesOptions {
  GroupOptions group{.name = "test", .timeout = 60s};
  MemoryFabricOptions fabric;  // ranks are locals
  std::function<Status(int node, int local)> refuse_multicast;
  std::function<std::function<MemoryFate(const MemoryMessage&)>(int local)> fate;
  std::function<Status(int node, int local)> refuse_region;
  std::function<void(int rank, GroupOptions&)> per_rank;
  bool is_shuffled = false;  // ranks are not numbered node by node
};

// What a test reaches past the groups.
struct NodesWorld {
  Topology topology;
  std::vector<Fabric*> fabrics;    // by rank
  std::vector<Network*> networks;  // by rank
};

inline Topology make_topology(int nodes, int locals, bool is_shuffled) {
  std::vector<RankLocation> locations;
  for (int rank = 0; rank < nodes * locals; ++rank)
    locations.push_back({"node" + std::to_string(rank / locals), 0});
  if (is_shuffled) std::shuffle(locations.begin(), locations.end(), std::mt19937(nodes + locals));
  return Topology(locations);
}

// The nodes in the order in which the shards of `rank` are summed, each by local.
inline std::vector<std::vector<int>> sources_of(const Topology& topology, int rank) {
  std::vector<std::vector<int>> sources;
  for (int number = 0; number < topology.nodes(); ++number) {
    sources.push_back(
        topology.members(source_with_number(topology.nodes(), topology.node(rank), number)));
  }
  return sources;
}

inline void run_nodes(int nodes, int locals, const NodesOptions& options,
                      const std::function<void(int rank, Group&, NodesWorld&)>& body) {
  NodesWorld world{make_topology(nodes, locals, options.is_shuffled), {}, {}};
  const Topology& topology = world.topology;
  std::vector<std::unique_ptr<Fabric>> fabrics(static_cast<size_t>(topology.ranks()));
  std::vector<std::unique_ptr<Network>> networks(fabrics.size());
  for (int node = 0; node < nodes; ++node) {
    MemoryFabricOptions fabric_options = options.fabric;
    if (options.refuse_multicast) {
      fabric_options.refuse_multicast = [node, &options](int local) {
        return options.refuse_multicast(node, local);
      };
    }
    auto made = make_memory_fabrics(locals, fabric_options);
    for (int local = 0; local < locals; ++local)
      fabrics[topology.rank(node, local)] = std::move(made[local]);
  }
  for (int local = 0; local < locals; ++local) {
    MemoryNetworkOptions network_options;
    if (options.fate) network_options.fate = options.fate(local);
    if (options.refuse_region) {
      network_options.refuse_region = [local, &options](int node, const MemoryBlock&) {
        return options.refuse_region(node, local);
      };
    }
    auto made = make_memory_networks(nodes, network_options);
    for (int node = 0; node < nodes; ++node)
      networks[topology.rank(node, local)] = std::move(made[node]);
  }
  for (const auto& fabric : fabrics) world.fabrics.push_back(fabric.get());
  for (const auto& network : networks) world.networks.push_back(network.get());
  auto store = std::make_shared<MapStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < topology.ranks(); ++rank) {
    threads.emplace_back([&, rank] {
      GroupOptions group_options = options.group;
      if (options.per_rank) options.per_rank(rank, group_options);
      auto group = Group::create(group_options, std::move(fabrics[rank]), store,
                                 GroupNodes{rank, topology, std::move(networks[rank])});
      ASSERT_TRUE(group.is_ok()) << group.status().to_string();
      body(rank, *group.value(), world);
      group.value()->close();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace tide::testing
