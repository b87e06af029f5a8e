// Worked example of the cut: shards of 6, 6 and 6 MB, parts of at least 8 MB, a head of 14 MB: part
// 0 is shards 0 and 1, 12 MB, all of them head; part 1 is shard 2, 6 MB, 2 MB of them head.
#include "backend/plan/rail_rounds.h"

#include <algorithm>

#include "backend/plan/doubling.h"

namespace tide {
namespace {

RailRound single_shard_round(GatherSchedule schedule, int nodes, int node, int index) {
  const bool ring = schedule == GatherSchedule::kRing;
  const int distance = ring ? 1 : index + 1;
  RailRound round;
  round.send_to_node = node_at_offset(nodes, node, nodes - distance);
  round.receive_from_node = node_at_offset(nodes, node, distance);
  round.first_sent = ring ? index : 0;
  round.first_received = index + 1;
  round.shards = 1;
  return round;
}

}  // namespace

const char* gather_schedule_name(GatherSchedule schedule) {
  switch (schedule) {
    case GatherSchedule::kDoubling:
      return "doubling";
    case GatherSchedule::kRing:
      return "ring";
    case GatherSchedule::kDirect:
      return "direct";
  }
  return "unknown";
}

std::vector<RailRound> rail_rounds(GatherSchedule schedule, int nodes, int node) {
  std::vector<RailRound> rounds;
  if (schedule == GatherSchedule::kDoubling) {
    for (const DoublingRound& round : doubling_rounds(nodes, node)) {
      rounds.push_back(
          {round.send_to_node, round.receive_from_node, 0, round.first_received, round.shards});
    }
    return rounds;
  }
  for (int index = 0; index + 1 < nodes; ++index) {
    rounds.push_back(single_shard_round(schedule, nodes, node, index));
  }
  return rounds;
}

std::vector<RailPart> cut_round(const std::vector<int64_t>& shard_bytes, int64_t part_bytes,
                                int64_t head_bytes) {
  std::vector<RailPart> parts;
  bool open = false;
  for (int i = 0; i < static_cast<int>(shard_bytes.size()); ++i) {
    if (!open) parts.push_back({i, 0, 0, 0});
    RailPart& part = parts.back();
    ++part.shards;
    part.bytes += shard_bytes[i];
    open = part.bytes < part_bytes;
  }
  for (RailPart& part : parts) {
    part.head_bytes = std::min(part.bytes, head_bytes);
    head_bytes -= part.head_bytes;
  }
  return parts;
}

}  // namespace tide
