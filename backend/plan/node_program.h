// What every program between nodes begins with. Internal to backend/plan.
#pragma once

#include <initializer_list>

#include "backend/plan/program.h"
#include "backend/plan/topology.h"

namespace tide {

// Ranks, node and rail of `rank`; no steps yet. The hash is that of layout, direction, topology and
// the numbers of `options`.
Program start_node_program(Direction direction, const GroupLayout& layout, const Topology& topology,
                           int rank, std::initializer_list<int64_t> options);

}  // namespace tide
