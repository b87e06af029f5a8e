#include "backend/plan/checker.h"

#include <algorithm>

#include "backend/plan/checker_runner.h"

namespace tide {
namespace {

// Do the programs of all ranks know the same nodes?
std::string check_nodes(const std::vector<std::shared_ptr<const Program>>& programs) {
  for (int rank = 0; rank < static_cast<int>(programs.size()); ++rank) {
    const Program& program = *programs[rank];
    if (program.rail_ranks.empty() && program.node_ranks.empty()) continue;
    const std::string who = "the program of rank " + std::to_string(rank);
    if (program.node < 0 || program.node >= program.nodes() ||
        program.rail_ranks[program.node] != rank || !program.is_local(rank)) {
      return who + " does not stand on its own node and rail";
    }
    for (int node = 0; node < program.nodes(); ++node) {
      const Program& other = *programs[program.rail_ranks[node]];
      if (other.node != node || other.rail_ranks != program.rail_ranks)
        return who + " and that of rank " + std::to_string(other.rank) + " know other rails";
    }
    for (int local : program.node_ranks) {
      const Program& other = *programs[local];
      if (other.node != program.node || other.node_ranks != program.node_ranks)
        return who + " and that of rank " + std::to_string(other.rank) + " know other nodes";
    }
  }
  return "";
}

bool has_nodes(const CheckedSequence& sequence) {
  return std::any_of(
      sequence.operations.begin(), sequence.operations.end(),
      [](const CheckedOperation& checked) { return checked.programs.front()->nodes() > 1; });
}

std::string check_shape(const CheckedSequence& sequence) {
  for (size_t o = 0; o < sequence.operations.size(); ++o) {
    const CheckedOperation& checked = sequence.operations[o];
    const size_t ranks = sequence.groups[checked.group].size();
    if (checked.programs.size() != ranks || checked.layout->ranks() != static_cast<int>(ranks)) {
      return "operation " + std::to_string(o) + ": one program per rank is wanted";
    }
    for (const auto& program : checked.programs) {
      if (program->hash != checked.programs.front()->hash)
        return "programs of different collectives";
    }
    if (std::string error = check_nodes(checked.programs); !error.empty()) return error;
  }
  return "";
}

}  // namespace

CheckReport check(const CheckedSequence& sequence, const Schedule& schedule) {
  if (std::string error = check_shape(sequence); !error.empty()) return {error, 0, {}, {}};
  return checking::CheckerRunner(sequence, schedule).run();
}

std::vector<Schedule> schedules_for(const CheckedSequence& sequence, int random_orders) {
  std::vector<Schedule> schedules;
  const int last_queue = has_nodes(sequence) ? checking::kDeliveryQueue : checking::kScriptQueue;
  for (bool fifo : {false, true}) {
    schedules.push_back({Schedule::Kind::kForward, 0, fifo});
    schedules.push_back({Schedule::Kind::kBackward, 0, fifo});
    for (int process = 0; process < sequence.processes; ++process) {
      schedules.push_back({Schedule::Kind::kStarveProcess, process, fifo});
    }
    for (int queue = 0; queue <= last_queue && !fifo; ++queue) {
      schedules.push_back({Schedule::Kind::kStarveQueue, queue, fifo});
    }
    for (int seed = 1; seed <= random_orders; ++seed)
      schedules.push_back({Schedule::Kind::kRandom, seed, fifo});
  }
  return schedules;
}

CheckReport check_all(const CheckedSequence& sequence, int random_orders) {
  CheckReport first;
  bool any = false;
  for (const Schedule& schedule : schedules_for(sequence, random_orders)) {
    CheckReport report = check(sequence, schedule);
    if (!report.is_ok()) return report;
    if (!any) first = report;
    any = true;
    if (report.canonical != first.canonical || report.pushed_bytes != first.pushed_bytes ||
        report.rail_bytes != first.rail_bytes) {
      report.error = "two orders of the same programs touch memory differently";
      return report;
    }
  }
  return first;
}

}  // namespace tide
