// Runs the programs of a cluster's ranks in virtual time: the same programs that the engine runs
// and the checker proves, priced by cost_model.h.
//
// What stands in for hardware:
//   queue    runs its steps in order; a wait holds it until the signal or the event has come
//   engine   one a rank: copies to peers and the signals behind them, one at a time, in the order
//            in which queues bring them; several copies of one queue to one peer in a row are one
//            batch call
//   port     one out and one in a rank, inside the node and per rail: a flow runs at the smallest
//            of its ports' equal shares (N senders into one port: each gets an Nth)
//   kernel   sums and local copies hold CTAs; launches wait for SMs (FabricModel::product_s)
//   rail     puts of one direction go one after another, both directions share the port; events
//            tell of bytes that have landed after RailModel::arrival_s(), grants and confirms take
//            one trip
//   multicast  where the fabric has it, a rank's pushes of the same pieces to all peers are one
//
// One node for all: on a uniform cluster every node does the same at the same time, so the arrivals
// of a node from `node - k` are its own sends to `node + k`. With one_node only the ranks of node 0
// are run, and every put, confirm and grant comes back to the rank that sent it, with the number of
// the node that it would have come from. Valid for equal shards.
//
// Not modelled: host time, loss and pauses of a congested network, HBM traffic (tide simulate adds
// what products lose by it), dependencies between operations.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/layout/group_layout.h"
#include "backend/plan/cost_model.h"
#include "backend/plan/program.h"
#include "backend/plan/topology.h"

namespace tide {

struct SimulatedOperation {
  std::shared_ptr<const GroupLayout> layout;
  std::function<Program(int rank)> program;
  // Reduce: bytes of one element of the gradients, by parameter of the layout. Gather: empty.
  std::vector<int64_t> gradient_bytes;
  double issue_s = 0;  // on every rank
};

struct SimulationOptions {
  ClusterModel cluster;
  bool one_node = false;
  int watched_rank = -1;  // whose spans are kept; -1: nobody's
};

// What a queue of the watched rank did from begin to end: "push", "put", "kernel", "signal",
// "wait", "arrive".
struct SimulatedSpan {
  int operation = 0;
  Queue queue = Queue::kOwn;
  const char* what = "";
  double begin_s = 0;
  double end_s = 0;
  int64_t bytes = 0;
};

struct SimulatedRank {
  std::vector<double> end_s;  // by operation: results are there; the rail may still drain
  double sm_s = 0;            // CTAs times the time that they were resident
  double resident_s = 0;      // some kernel was
  int64_t pushed_bytes = 0;   // out of the node port, multicast once
  int64_t arrived_bytes = 0;  // into the node port
  int64_t rail_bytes = 0;     // out of the rail
  int64_t kernel_bytes = 0;   // read and written by kernels
};

struct SimulationReport {
  std::string error;                 // empty: ran to the end
  std::vector<double> end_s;         // by operation, of the slowest rank
  std::vector<int64_t> area_bytes;   // by operation: arena of one rank, slots aside
  std::vector<SimulatedRank> ranks;  // the simulated ones: all, or those of node 0 by local
  std::vector<SimulatedSpan> spans;
  int64_t events = 0;
};

SimulationReport simulate(const std::vector<SimulatedOperation>& operations,
                          const Topology& topology, const SimulationOptions& options);

}  // namespace tide
