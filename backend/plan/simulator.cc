#include "backend/plan/simulator.h"

#include <algorithm>
#include <string>
#include <utility>

#include "backend/plan/simulator_world.h"

namespace tide {
namespace simulating {
namespace {

// What a rail still does once all bytes are there holds nobody up.
bool is_rail(int queue) {
  return queue == static_cast<int>(Queue::kRail) || queue == static_cast<int>(Queue::kReduceRail);
}

}  // namespace

World::World(const std::vector<SimulatedOperation>& operations, const Topology& topology,
             const SimulationOptions& options)
    : operations_(operations),
      topology_(topology),
      options_(options),
      locals_(topology.local_ranks()) {
  ranks_.resize(static_cast<size_t>(options.one_node ? locals_ : topology.ranks()));
  for (size_t index = 0; index < ranks_.size(); ++index) {
    add_rank(options.one_node ? topology.rank(0, static_cast<int>(index))
                              : static_cast<int>(index));
  }
  for (const SimulatedOperation& operation : operations) {
    PieceCounter pieces(*operation.layout, operation.gradient_bytes);
    int64_t areas = 0;
    for (RankState& state : ranks_) {
      const Program program = operation.program(state.rank);
      areas = std::max(areas, area_bytes(program));
      Tracks tracks = make_tracks(program, options.cluster.fabric, &pieces);
      for (int queue = 0; queue < kQueueCount; ++queue) {
        state.queues[queue].tracks.push_back(std::move(tracks[queue]));
      }
    }
    report_.area_bytes.push_back(areas);
  }
}

void World::add_rank(int rank) {
  RankState& state = ranks_[index_of(rank)];
  state.rank = rank;
  state.node = topology_.node(rank);
  state.free_sms = options_.cluster.fabric.sms;
  state.port_out = flows_.add_port(options_.cluster.fabric.push_rate);
  state.port_in = flows_.add_port(options_.cluster.fabric.push_rate);
  state.rail_out = flows_.add_port(options_.cluster.rail.rate);
  state.rail_in = flows_.add_port(options_.cluster.rail.rate);
  state.words.assign(operations_.size(),
                     std::vector<uint32_t>(static_cast<size_t>(kCounterCount * locals_), 0));
  state.arrived.resize(operations_.size());
  state.puts.assign(operations_.size(), 0);
  state.report.end_s.assign(operations_.size(), 0);
}

SimulationReport World::run() {
  for (size_t index = 0; index < ranks_.size(); ++index) {
    for (int queue = 0; queue < kQueueCount; ++queue) advance(static_cast<int>(index), queue);
  }
  while (!events_.empty()) {
    const Event event = events_.top();
    events_.pop();
    now_ = event.time;
    ++report_.events;
    handle(event);
  }
  report_.error = describe_deadlock();
  report_.end_s.assign(operations_.size(), 0);
  for (RankState& state : ranks_) {
    for (size_t i = 0; i < operations_.size(); ++i) {
      report_.end_s[i] = std::max(report_.end_s[i], state.report.end_s[i]);
    }
    report_.ranks.push_back(std::move(state.report));
  }
  return std::move(report_);
}

void World::schedule(double time, Event event) {
  event.time = time;
  event.order = order_++;
  events_.push(event);
}

void World::handle(const Event& event) {
  switch (event.kind) {
    case Event::Kind::kResume:
      return advance(event.index, event.queue);
    case Event::Kind::kSignal: {
      uint32_t& word = ranks_[event.index].words[event.operation][event.key];
      word = std::max(word, event.value);
      return wake(event.index);
    }
    case Event::Kind::kArrive:
      ranks_[event.index].arrived[event.operation].insert(event.key);
      return wake(event.index);
    case Event::Kind::kEngine:
      return start_engine(event.index);
    case Event::Kind::kFlowEnd:
      if (flows_.is_current(event.index, static_cast<uint32_t>(event.key))) end_flow(event.index);
      return;
    case Event::Kind::kKernel:
      return end_kernel(event.index, event.queue);
    case Event::Kind::kPutOver:
      --ranks_[event.index].puts[event.operation];
      return wake(event.index);
  }
}

void World::wake(int index) {
  for (int queue = 0; queue < kQueueCount; ++queue) {
    if (ranks_[index].queues[queue].held) advance(index, queue);
  }
}

void World::advance(int index, int queue) {
  QueueState& state = ranks_[index].queues[queue];
  while (state.operation < static_cast<int>(state.tracks.size())) {
    const int operation = state.operation;
    const double issue = operations_[operation].issue_s;
    if (now_ < issue) {
      state.since = issue;
      state.held = false;
      Event event;
      event.kind = Event::Kind::kResume;
      event.index = index;
      event.queue = queue;
      return schedule(issue, event);
    }
    const Track& track = state.tracks[operation];
    if (state.next == track.size()) {
      double& end = ranks_[index].report.end_s[operation];
      if (!track.empty() && !is_rail(queue)) end = std::max(end, now_);
      ++state.operation;
      state.next = 0;
      continue;
    }
    if (!step(index, queue, track[state.next])) return;
    ++state.next;
    state.held = false;
    state.since = now_;
  }
}

bool World::is_satisfied(const RankState& rank, int operation, const Activity& activity) const {
  switch (activity.kind) {
    case Activity::Kind::kWait: {
      const int from = activity.peer == kSelf ? rank.rank : activity.peer;
      return rank.words[operation][word(activity.counter, topology_.local(from))] >= activity.value;
    }
    case Activity::Kind::kArrive:
      return rank.arrived[operation].count(
                 event_key(activity.event, activity.node, activity.round, activity.part)) > 0;
    default:
      return rank.puts[operation] == 0;
  }
}

// True once the activity is over; else whatever ends it calls over() or wakes the queue.
bool World::step(int index, int queue, const Activity& activity) {
  RankState& rank = ranks_[index];
  QueueState& state = rank.queues[queue];
  const int operation = state.operation;
  switch (activity.kind) {
    case Activity::Kind::kWait:
    case Activity::Kind::kArrive:
    case Activity::Kind::kDrain:
      state.held = !is_satisfied(rank, operation, activity);
      if (!state.held && now_ > state.since) {
        note(index, queue, operation, activity.kind == Activity::Kind::kWait ? "wait" : "arrive",
             state.since, 0);
      }
      return !state.held;
    case Activity::Kind::kSignal:
      if (!activity.engine) {
        signal(index, operation, activity, now_ + options_.cluster.fabric.credit_s);
        return true;
      }
      [[fallthrough]];
    case Activity::Kind::kPush:
      rank.engine.push_back({queue, operation, activity});
      if (!rank.engine_busy) start_engine(index);
      return false;
    case Activity::Kind::kKernel:
      rank.launches.push_back({queue, operation, activity});
      launch(index);
      return false;
    case Activity::Kind::kPut: {
      const int lane = queue == static_cast<int>(Queue::kRail) ? 0 : 1;
      rank.lanes[lane].jobs.push_back({queue, operation, activity});
      ++rank.puts[operation];
      if (!rank.lanes[lane].busy) start_lane(index, lane);
      return true;
    }
    case Activity::Kind::kTell:
      tell(index, operation, activity, activity.event,
           now_ + options_.cluster.rail.latency_s + options_.cluster.rail.message_s);
      return true;
  }
  return true;
}

void World::over(int index, int queue) {
  QueueState& state = ranks_[index].queues[queue];
  ++state.next;
  state.since = now_;
  advance(index, queue);
}

std::string World::describe_deadlock() const {
  for (const RankState& rank : ranks_) {
    for (int queue = 0; queue < kQueueCount; ++queue) {
      const QueueState& state = rank.queues[queue];
      if (state.operation == static_cast<int>(state.tracks.size())) continue;
      const Activity& activity = state.tracks[state.operation][state.next];
      std::string what = std::string(counter_name(activity.counter)) + " from " +
                         std::to_string(activity.peer) + " >= " + std::to_string(activity.value);
      if (activity.kind != Activity::Kind::kWait) {
        what = std::string(rail_event_name(activity.event)) + " " + std::to_string(activity.round) +
               "." + std::to_string(activity.part) + " from node " + std::to_string(activity.node);
      }
      return "rank " + std::to_string(rank.rank) + ", operation " +
             std::to_string(state.operation) + ", queue " + queue_name(static_cast<Queue>(queue)) +
             " waits for ever for " + what;
    }
  }
  return "";
}

void World::note(int index, int queue, int operation, const char* what, double begin,
                 int64_t bytes) {
  if (ranks_[index].rank != options_.watched_rank) return;
  report_.spans.push_back({operation, static_cast<Queue>(queue), what, begin, now_, bytes});
}

}  // namespace simulating

SimulationReport simulate(const std::vector<SimulatedOperation>& operations,
                          const Topology& topology, const SimulationOptions& options) {
  return simulating::World(operations, topology, options).run();
}

}  // namespace tide
