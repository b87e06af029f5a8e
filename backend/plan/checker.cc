#include "backend/plan/checker.h"

#include "backend/plan/checker_runner.h"

namespace tide {
namespace {

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
  }
  return "";
}

}  // namespace

CheckReport check(const CheckedSequence& sequence, const Schedule& schedule) {
  if (std::string error = check_shape(sequence); !error.empty()) return {error, 0, {}};
  return checking::CheckerRunner(sequence, schedule).run();
}

std::vector<Schedule> schedules_for(const CheckedSequence& sequence, int random_orders) {
  std::vector<Schedule> schedules;
  for (bool fifo : {false, true}) {
    schedules.push_back({Schedule::Kind::kForward, 0, fifo});
    schedules.push_back({Schedule::Kind::kBackward, 0, fifo});
    for (int process = 0; process < sequence.processes; ++process) {
      schedules.push_back({Schedule::Kind::kStarveProcess, process, fifo});
    }
    for (int queue = 0; queue <= kQueueCount && !fifo; ++queue) {
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
    if (report.canonical != first.canonical || report.pushed_bytes != first.pushed_bytes) {
      report.error = "two orders of the same programs touch memory differently";
      return report;
    }
  }
  return first;
}

}  // namespace tide
