// Layouts that plan and checker tests share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "backend/layout/group_layout.h"
#include "backend/plan/node_reduce_plan.h"
#include "backend/plan/reduce_plan.h"
#include "backend/plan/topology.h"

namespace tide::testing {

// Sharded in dimension 0, padded to equal shards.
inline Parameter flat_parameter(int64_t unsharded_numel, int ranks,
                                DType dtype = DType::kBFloat16) {
  Parameter parameter;
  parameter.name = "flat";
  parameter.dtype = parameter.shard_dtype = dtype;
  parameter.unsharded_numel = unsharded_numel;
  parameter.shard_numel = (unsharded_numel + ranks - 1) / ranks;
  return parameter;
}

// Sharded in dimension 1: `rows` runs of row_numel elements a shard.
inline Parameter column_parameter(int64_t rows, int64_t row_numel, int ranks,
                                  DType dtype = DType::kBFloat16) {
  Parameter parameter;
  parameter.name = "column";
  parameter.dtype = parameter.shard_dtype = dtype;
  parameter.rows = rows;
  parameter.shard_numel = rows * row_numel;
  parameter.unsharded_numel = parameter.shard_numel * ranks;
  return parameter;
}

// Up to largest_numel elements a shard; empty, padded, tiny and column parameters among them.
inline std::vector<Parameter> random_parameters(std::mt19937& random, int ranks, int count,
                                                int64_t largest_numel) {
  const DType dtypes[] = {DType::kBFloat16, DType::kFloat32, DType::kFloat64, DType::kFloat16};
  std::vector<Parameter> parameters;
  for (int p = 0; p < count; ++p) {
    const DType dtype = dtypes[random() % 4];
    switch (random() % 6) {
      case 0:
        parameters.push_back(flat_parameter(static_cast<int64_t>(random() % 4), ranks, dtype));
        break;
      case 1:
        parameters.push_back(column_parameter(
            1 + random() % 5, 1 + random() % (largest_numel / 5 + 1), ranks, dtype));
        break;
      default:
        parameters.push_back(
            flat_parameter(static_cast<int64_t>(random() % (largest_numel * ranks)), ranks, dtype));
    }
    parameters.back().name += std::to_string(p);
  }
  return parameters;
}

inline ReduceOptions reduce_all(const GroupLayout& layout, int areas, int64_t staging_slice_bytes) {
  ReduceOptions options;
  options.areas = areas;
  options.staging_slice_bytes = staging_slice_bytes;
  for (int p = 0; p < layout.size(); ++p) {
    options.subset.push_back(p);
    options.dtypes.push_back(layout.parameter(p).dtype);
  }
  return options;
}

inline std::vector<int> all_processes(int ranks) {
  std::vector<int> processes(static_cast<size_t>(ranks));
  std::iota(processes.begin(), processes.end(), 0);
  return processes;
}

// Ranks in node order, or in an order of `random`'s.
inline Topology make_topology(int nodes, int locals, std::mt19937* random = nullptr) {
  std::vector<RankLocation> locations;
  for (int node = 0; node < nodes; ++node) {
    for (int local = 0; local < locals; ++local)
      locations.push_back({"host" + std::to_string(node), local});
  }
  if (random != nullptr) std::shuffle(locations.begin(), locations.end(), *random);
  const std::string refusal = Topology::check(locations);
  if (!refusal.empty()) throw std::invalid_argument(refusal);
  return Topology(locations);
}

// Of all parameters, in their own types.
inline NodeReduceOptions node_reduce_all(const GroupLayout& layout, int64_t segment_bytes,
                                         bool read_add = false) {
  ReduceOptions all = reduce_all(layout, 1, segment_bytes);
  NodeReduceOptions options;
  options.segment_bytes = segment_bytes;
  options.read_add = read_add;
  options.subset = std::move(all.subset);
  options.dtypes = std::move(all.dtypes);
  return options;
}

// Throws when the parameters describe no layout: the test is wrong then.
inline std::shared_ptr<const GroupLayout> make_layout(std::vector<Parameter> parameters,
                                                      int ranks) {
  const std::string refusal = GroupLayout::check(parameters, ranks);
  if (!refusal.empty()) throw std::invalid_argument(refusal);
  return std::make_shared<const GroupLayout>(std::move(parameters), ranks);
}

}  // namespace tide::testing
