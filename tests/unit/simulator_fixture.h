// Clusters and operations that the simulator's tests share.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/plan/gather_plan.h"
#include "backend/plan/node_gather_plan.h"
#include "backend/plan/node_reduce_plan.h"
#include "backend/plan/reduce_plan.h"
#include "backend/plan/simulator.h"
#include "tests/unit/plan_fixture.h"

namespace tide::testing {

inline Topology uniform_topology(int nodes, int locals) {
  std::vector<RankLocation> locations;
  for (int rank = 0; rank < nodes * locals; ++rank) {
    locations.push_back({"node" + std::to_string(rank / locals), rank % locals});
  }
  return Topology(locations);
}

// Parameters of so many bf16 elements each, unsharded.
inline std::shared_ptr<const GroupLayout> bf16_layout(const std::vector<int64_t>& numels,
                                                      int ranks) {
  std::vector<Parameter> parameters;
  for (int64_t numel : numels) parameters.push_back(flat_parameter(numel, ranks));
  return std::make_shared<GroupLayout>(std::move(parameters), ranks);
}

inline SimulatedOperation gather(std::shared_ptr<const GroupLayout> layout,
                                 const Topology& topology, NodeGatherOptions options = {}) {
  SimulatedOperation operation;
  operation.layout = layout;
  operation.program = [layout, &topology, options](int rank) {
    return plan_node_gather(*layout, topology, rank, options);
  };
  return operation;
}

inline std::vector<int> all_parameters(const GroupLayout& layout) {
  std::vector<int> subset(static_cast<size_t>(layout.size()));
  std::iota(subset.begin(), subset.end(), 0);
  return subset;
}

// Inside a node, in chunks of at most so many bytes a slice; staging holds all of them.
inline SimulatedOperation reduce(std::shared_ptr<const GroupLayout> layout, int64_t chunk_bytes) {
  ReduceOptions options;
  options.subset = all_parameters(*layout);
  options.dtypes.assign(options.subset.size(), DType::kBFloat16);
  options.areas = 1;
  options.sums = static_cast<int>((layout->shard_bytes() + chunk_bytes - 1) / chunk_bytes);
  SimulatedOperation operation;
  operation.layout = layout;
  operation.gradient_bytes.assign(options.subset.size(), 2);
  operation.program = [layout, options](int rank) { return plan_reduce(*layout, rank, options); };
  return operation;
}

inline SimulatedOperation node_reduce(std::shared_ptr<const GroupLayout> layout,
                                      const Topology& topology, bool read_add = false) {
  NodeReduceOptions options;
  options.subset = all_parameters(*layout);
  options.dtypes.assign(options.subset.size(), DType::kBFloat16);
  options.read_add = read_add;
  SimulatedOperation operation;
  operation.layout = layout;
  operation.gradient_bytes.assign(options.subset.size(), 2);
  operation.program = [layout, &topology, options](int rank) {
    return plan_node_reduce(*layout, topology, rank, options);
  };
  return operation;
}

inline SimulationReport run(const SimulatedOperation& operation, const Topology& topology,
                            const SimulationOptions& options = {}) {
  SimulationReport report = simulate({operation}, topology, options);
  EXPECT_EQ(report.error, "");
  return report;
}

}  // namespace tide::testing
