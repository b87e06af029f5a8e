// What takes time in the simulator: engines, rails, kernels, and how their ends reach others.
#include <algorithm>

#include "backend/plan/simulator_world.h"

namespace tide::simulating {

void World::signal(int index, int operation, const Activity& activity, double time) {
  const RankState& rank = ranks_[index];
  Event event;
  event.kind = Event::Kind::kSignal;
  event.operation = operation;
  event.key = word(activity.counter, topology_.local(rank.rank));
  event.value = activity.value;
  if (activity.peer != kAllPeers) {
    event.index = activity.peer == kSelf ? index : index_of(activity.peer);
    return schedule(time, event);
  }
  for (int member : topology_.members(rank.node)) {
    if (member == rank.rank) continue;
    event.index = index_of(member);
    schedule(time, event);
  }
}

// The peer on the rail, and this rank's node as it sees it.
void World::tell(int index, int operation, const Activity& activity, RailEvent kind, double time) {
  const RankState& rank = ranks_[index];
  Event event;
  event.kind = Event::Kind::kArrive;
  event.operation = operation;
  if (options_.one_node) {
    const int nodes = topology_.nodes();
    event.index = index;
    event.key = event_key(kind, (2 * rank.node - activity.node + nodes) % nodes, activity.round,
                          activity.part);
  } else {
    event.index = topology_.rank(activity.node, topology_.local(rank.rank));
    event.key = event_key(kind, rank.node, activity.round, activity.part);
  }
  schedule(time, event);
}

void World::arrive_in(int index, int64_t bytes, std::vector<int>* ports) {
  ranks_[index].report.arrived_bytes += bytes;
  ports->push_back(ranks_[index].port_in);
}

// The next job of the engine: its start costs time, then its bytes flow.
void World::start_engine(int index) {
  RankState& rank = ranks_[index];
  if (rank.engine_busy) {  // the job in front has started
    const Job& job = rank.engine.front();
    if (job.activity.kind == Activity::Kind::kSignal) {
      note(index, job.queue, job.operation, "signal", rank.engine_since, 0);
      const int queue = job.queue;
      rank.engine.pop_front();
      rank.engine_busy = false;
      over(index, queue);
    } else {
      std::vector<int> ports = {rank.port_out};
      if (job.activity.peer == kAllPeers) {
        for (int member : topology_.members(rank.node)) {
          if (member != rank.rank) arrive_in(index_of(member), job.activity.bytes, &ports);
        }
      } else {
        arrive_in(index_of(job.activity.peer), job.activity.bytes, &ports);
      }
      rank.report.pushed_bytes += job.activity.bytes;
      return begin_flow({index, -1}, static_cast<double>(job.activity.bytes), ports);
    }
  }
  if (rank.engine.empty() || rank.engine_busy) return;
  const Job& job = rank.engine.front();
  const FabricModel& fabric = options_.cluster.fabric;
  rank.engine_busy = true;
  rank.engine_since = now_;
  Event event;
  event.kind = Event::Kind::kEngine;
  event.index = index;
  if (job.activity.kind == Activity::Kind::kSignal) {
    signal(index, job.operation, job.activity, now_ + fabric.signal_s);
    return schedule(now_ + fabric.push_start_s, event);
  }
  schedule(now_ + push_start_s(fabric, job.activity.pieces), event);
}

// The next put of a lane: its head, then the rest.
void World::start_lane(int index, int lane_index) {
  RankState& rank = ranks_[index];
  Lane& lane = rank.lanes[lane_index];
  if (lane.jobs.empty()) return;
  const Activity& put = lane.jobs.front().activity;
  if (!lane.busy) {
    lane.in_head = put.head_bytes > 0;
    lane.since = now_;
  }
  lane.busy = true;
  const int peer = options_.one_node ? index : topology_.rank(put.node, topology_.local(rank.rank));
  const int64_t bytes = lane.in_head ? put.head_bytes : put.bytes - put.head_bytes;
  rank.report.rail_bytes += bytes;
  begin_flow({index, lane_index}, static_cast<double>(bytes),
             {rank.rail_out, ranks_[peer].rail_in});
}

void World::end_put(int index, int lane_index) {
  RankState& rank = ranks_[index];
  Lane& lane = rank.lanes[lane_index];
  const Job job = lane.jobs.front();
  const RailModel& rail = options_.cluster.rail;
  const double told = now_ + rail.arrival_s();
  if (lane.in_head) {
    tell(index, job.operation, job.activity, RailEvent::kHead, told);
    lane.in_head = false;
    return start_lane(index, lane_index);
  }
  tell(index, job.operation, job.activity, RailEvent::kArrival, told);
  note(index, job.queue, job.operation, "put", lane.since, job.activity.bytes);
  Event event;
  event.kind = Event::Kind::kPutOver;
  event.index = index;
  event.operation = job.operation;
  schedule(now_ + 2 * rail.latency_s, event);
  lane.jobs.pop_front();
  lane.busy = false;
  start_lane(index, lane_index);
}

void World::begin_flow(const FlowOwner& owner, double bytes, const std::vector<int>& ports) {
  const int flow = flows_.begin(now_, bytes, ports, &ends_);
  if (static_cast<size_t>(flow) >= owners_.size()) owners_.resize(static_cast<size_t>(flow) + 1);
  owners_[flow] = owner;
  take_ends();
}

void World::take_ends() {
  for (const Flows::End& end : ends_) {
    Event event;
    event.kind = Event::Kind::kFlowEnd;
    event.index = end.flow;
    event.key = end.version;
    schedule(end.time, event);
  }
  ends_.clear();
}

void World::end_flow(int flow) {
  const FlowOwner owner = owners_[flow];
  flows_.end(now_, flow, &ends_);
  take_ends();
  if (owner.lane >= 0) return end_put(owner.index, owner.lane);
  RankState& rank = ranks_[owner.index];
  const Job job = rank.engine.front();
  note(owner.index, job.queue, job.operation, "push", rank.engine_since, job.activity.bytes);
  rank.engine.pop_front();
  rank.engine_busy = false;
  over(owner.index, job.queue);
  if (!rank.engine_busy) start_engine(owner.index);
}

// Kernels get SMs in the order in which they ask.
void World::launch(int index) {
  RankState& rank = ranks_[index];
  const FabricModel& fabric = options_.cluster.fabric;
  while (!rank.launches.empty() &&
         std::min(rank.launches.front().activity.ctas, fabric.sms) <= rank.free_sms) {
    const Job job = rank.launches.front();
    rank.launches.pop_front();
    const int ctas = std::min(job.activity.ctas, fabric.sms);
    rank.free_sms -= ctas;
    const double runs = now_ + kernel_wait_s(fabric, ctas);
    const double ends = runs + job.activity.work_s;
    rank.report.sm_s += ctas * job.activity.work_s;
    rank.report.kernel_bytes += job.activity.bytes;
    // Kernels of one rank that overlap count once; they begin in the order of their launch.
    rank.report.resident_s += std::max(0.0, ends - std::max(runs, rank.resident_until));
    rank.resident_until = std::max(rank.resident_until, ends);
    Event event;
    event.kind = Event::Kind::kKernel;
    event.index = index;
    event.queue = job.queue;
    schedule(ends, event);
  }
}

void World::end_kernel(int index, int queue) {
  RankState& rank = ranks_[index];
  const QueueState& state = rank.queues[queue];
  const Activity& activity = state.tracks[state.operation][state.next];
  rank.free_sms += std::min(activity.ctas, options_.cluster.fabric.sms);
  note(index, queue, state.operation, "kernel", now_ - activity.work_s, activity.bytes);
  launch(index);
  over(index, queue);
}

}  // namespace tide::simulating
