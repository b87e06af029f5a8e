// The event loop of the simulator and everything that it moves. Internal to the simulator.
//
// Ranks are numbered as they are simulated ("index"): group ranks, or locals of node 0. Events of
// equal time run in the order in which they were made, so a run is a function of its arguments.
#pragma once

#include <array>
#include <deque>
#include <queue>
#include <unordered_set>
#include <vector>

#include "backend/plan/simulator.h"
#include "backend/plan/simulator_flows.h"
#include "backend/plan/simulator_track.h"

namespace tide::simulating {

inline constexpr int kLanes = 2;  // of a rail: gather, reduce

inline uint64_t event_key(RailEvent event, int node, uint16_t round, uint16_t part) {
  return static_cast<uint64_t>(event) << 56 | static_cast<uint64_t>(node) << 32 |
         static_cast<uint64_t>(round) << 16 | part;
}

class World {
 public:
  World(const std::vector<SimulatedOperation>& operations, const Topology& topology,
        const SimulationOptions& options);
  SimulationReport run();

 private:
  struct Event {
    enum class Kind : uint8_t { kResume, kSignal, kArrive, kEngine, kFlowEnd, kKernel, kPutOver };
    double time = 0;
    uint64_t order = 0;
    Kind kind = Kind::kResume;
    int index = 0;  // rank; kFlowEnd: flow
    int queue = 0;
    int operation = 0;
    uint64_t key = 0;    // kSignal: word; kArrive: of the event; kFlowEnd: version
    uint32_t value = 0;  // kSignal
    bool operator<(const Event& other) const {  // the earliest on top
      return time != other.time ? time > other.time : order > other.order;
    }
  };

  // A queue of a rank: its operations' tracks, one after another.
  struct QueueState {
    std::vector<Track> tracks;  // by operation
    int operation = 0;
    size_t next = 0;
    bool held = false;  // by the wait, arrival or drain at `next`
    double since = 0;   // when it came to `next`
  };

  // What stands before an engine or a rail's lane.
  struct Job {
    int queue = 0;
    int operation = 0;
    Activity activity;
  };
  struct Lane {
    std::deque<Job> jobs;
    bool busy = false;
    bool in_head = false;
    double since = 0;
  };

  struct RankState {
    int rank = 0;  // in the group
    int node = 0;
    std::array<QueueState, kQueueCount> queues;
    std::deque<Job> engine;
    bool engine_busy = false;
    double engine_since = 0;
    int free_sms = 0;
    std::deque<Job> launches;  // wait for SMs
    double resident_until = 0;
    std::array<Lane, kLanes> lanes;
    std::vector<std::vector<uint32_t>> words;  // by operation: [counter][local it comes from]
    std::vector<std::unordered_set<uint64_t>> arrived;  // by operation
    std::vector<int> puts;                              // by operation, not over
    int port_out = 0;
    int port_in = 0;
    int rail_out = 0;
    int rail_in = 0;
    SimulatedRank report;
  };

  struct FlowOwner {
    int index = 0;
    int lane = -1;  // -1: the engine
  };

  void add_rank(int rank);
  void schedule(double time, Event event);
  void handle(const Event& event);
  // Runs the queue until something holds it or takes time.
  void advance(int index, int queue);
  bool step(int index, int queue, const Activity& activity);
  void over(int index, int queue);  // the activity at `next` is
  bool is_satisfied(const RankState& rank, int operation, const Activity& activity) const;
  void wake(int index);

  void signal(int index, int operation, const Activity& activity, double time);
  void tell(int index, int operation, const Activity& activity, RailEvent event, double time);
  void start_engine(int index);
  void arrive_in(int index, int64_t bytes, std::vector<int>* ports);
  void start_lane(int index, int lane);
  void end_flow(int flow);
  void end_put(int index, int lane);
  void launch(int index);
  void end_kernel(int index, int queue);
  void begin_flow(const FlowOwner& owner, double bytes, const std::vector<int>& ports);
  void take_ends();
  void note(int index, int queue, int operation, const char* what, double begin, int64_t bytes);

  size_t word(Counter counter, int from_local) const {
    return static_cast<size_t>(counter) * static_cast<size_t>(locals_) +
           static_cast<size_t>(from_local);
  }
  int index_of(int rank) const { return options_.one_node ? topology_.local(rank) : rank; }
  std::string describe_deadlock() const;

  const std::vector<SimulatedOperation>& operations_;
  const Topology& topology_;
  const SimulationOptions& options_;
  int locals_;
  std::vector<RankState> ranks_;
  Flows flows_;
  std::vector<FlowOwner> owners_;  // by flow
  std::vector<Flows::End> ends_;
  std::priority_queue<Event> events_;
  uint64_t order_ = 0;
  double now_ = 0;
  SimulationReport report_;
};

}  // namespace tide::simulating
