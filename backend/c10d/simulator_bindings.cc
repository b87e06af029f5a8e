#include "backend/c10d/simulator_bindings.h"

#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "backend/plan/node_gather_plan.h"
#include "backend/plan/node_reduce_plan.h"
#include "backend/plan/reduce_plan.h"
#include "backend/plan/simulator.h"

namespace py = pybind11;

namespace tide {
namespace {

constexpr int kMostRanks = 16384;

// One collective as Python describes it: equal on all ranks.
struct SimulatedCall {
  bool is_gather = true;
  std::vector<int64_t> numels;  // of the unsharded parameters
  int64_t element_bytes = 2;    // gathered, or of the gradients
  bool cast = false;            // gather: shards are fp32
  double issue_s = 0;
  NodeGatherOptions gather;
  // Reduce.
  int64_t segment_bytes = NodeReduceOptions().segment_bytes;
  bool read_add = false;
  bool leased = true;  // inside one node; else two areas
  int64_t staging_slice_bytes = 2 << 20;
  int sums = 2;
};

using Numbers = std::map<std::string, double>;

ClusterModel cluster_of(Numbers numbers) {
  ClusterModel cluster;
  FabricModel& fabric = cluster.fabric;
  const auto take = [&](const char* name, auto* field) {
    const auto found = numbers.find(name);
    if (found == numbers.end()) return;
    *field = static_cast<std::remove_pointer_t<decltype(field)>>(found->second);
    numbers.erase(found);
  };
  take("push_rate", &fabric.push_rate);
  take("push_start_s", &fabric.push_start_s);
  take("batch_start_s", &fabric.batch_start_s);
  take("signal_s", &fabric.signal_s);
  take("credit_s", &fabric.credit_s);
  take("kernel_start_s", &fabric.kernel_start_s);
  take("sum_rate_per_cta", &fabric.sum_rate_per_cta);
  take("sum_rate_limit", &fabric.sum_rate_limit);
  take("copy_rate_per_cta", &fabric.copy_rate_per_cta);
  take("pull_rate_per_cta", &fabric.pull_rate_per_cta);
  take("kernel_ctas", &fabric.kernel_ctas);
  take("combine_ctas", &fabric.combine_ctas);
  take("sms", &fabric.sms);
  take("multicast", &fabric.multicast);
  take("product_s", &fabric.product_s);
  take("free_sms", &fabric.free_sms);
  take("rail_rate", &cluster.rail.rate);
  take("rail_latency_s", &cluster.rail.latency_s);
  take("rail_message_s", &cluster.rail.message_s);
  if (!numbers.empty()) {
    throw py::value_error("no such number of a cluster: " + numbers.begin()->first);
  }
  return cluster;
}

DType float_of(int64_t bytes) {
  if (bytes == 2) return DType::kBFloat16;
  if (bytes == 4) return DType::kFloat32;
  throw py::value_error("elements are of 2 or 4 bytes, got " + std::to_string(bytes));
}

std::shared_ptr<const GroupLayout> layout_of(const SimulatedCall& call, int ranks) {
  std::vector<Parameter> parameters;
  for (int64_t numel : call.numels) {
    Parameter& parameter = parameters.emplace_back();
    parameter.dtype = float_of(call.element_bytes);
    parameter.shard_dtype = call.cast ? DType::kFloat32 : parameter.dtype;
    parameter.unsharded_numel = numel;
    parameter.shard_numel = (numel + ranks - 1) / ranks;
  }
  const std::string refusal = GroupLayout::check(parameters, ranks);
  if (!refusal.empty()) throw py::value_error(refusal);
  return std::make_shared<const GroupLayout>(std::move(parameters), ranks);
}

SimulatedOperation operation_of(const SimulatedCall& call, const Topology& topology) {
  SimulatedOperation operation;
  const auto layout = layout_of(call, topology.ranks());
  operation.layout = layout;
  operation.issue_s = call.issue_s;
  if (call.is_gather) {
    operation.program = [layout, &topology, options = call.gather](int rank) {
      return plan_node_gather(*layout, topology, rank, options);
    };
    return operation;
  }
  std::vector<int> subset(call.numels.size());
  std::iota(subset.begin(), subset.end(), 0);
  const std::vector<DType> dtypes(subset.size(), float_of(call.element_bytes));
  operation.gradient_bytes.assign(subset.size(), call.element_bytes);
  if (topology.nodes() == 1) {
    const ReduceOptions options = {subset, dtypes, call.leased ? 1 : 2, call.staging_slice_bytes,
                                   call.sums};
    operation.program = [layout, options](int rank) { return plan_reduce(*layout, rank, options); };
    return operation;
  }
  NodeReduceOptions options;
  options.subset = subset;
  options.dtypes = dtypes;
  options.segment_bytes = call.segment_bytes;
  options.read_add = call.read_add;
  operation.program = [layout, &topology, options](int rank) {
    return plan_node_reduce(*layout, topology, rank, options);
  };
  return operation;
}

Topology uniform(int nodes, int locals) {
  if (nodes < 1 || locals < 1 || static_cast<int64_t>(nodes) * locals > kMostRanks) {
    throw py::value_error("from 1 to " + std::to_string(kMostRanks) + " ranks can be simulated");
  }
  std::vector<RankLocation> locations;
  for (int rank = 0; rank < nodes * locals; ++rank) {
    locations.push_back({std::to_string(rank / locals), rank % locals});
  }
  return Topology(locations);
}

SimulationReport run(const std::vector<SimulatedCall>& calls, int nodes, int locals,
                     const Numbers& cluster, bool one_node, int watched_rank) {
  SimulationOptions options;
  options.cluster = cluster_of(cluster);
  options.one_node = one_node;
  options.watched_rank = watched_rank;
  const Topology topology = uniform(nodes, locals);
  std::vector<SimulatedOperation> operations;
  for (const SimulatedCall& call : calls) operations.push_back(operation_of(call, topology));
  py::gil_scoped_release release;
  return simulate(operations, topology, options);
}

py::tuple span_of(const SimulatedSpan& span) {
  return py::make_tuple(span.operation, queue_name(span.queue), span.what, span.begin_s, span.end_s,
                        span.bytes);
}

void bind_calls(py::module_& module) {
  py::enum_<GatherSchedule>(module, "GatherSchedule")
      .value("doubling", GatherSchedule::kDoubling)
      .value("ring", GatherSchedule::kRing)
      .value("direct", GatherSchedule::kDirect);
  py::enum_<Pacing>(module, "Pacing")
      .value("off", Pacing::kOff)
      .value("confirm_whole", Pacing::kConfirmWhole)
      .value("confirm_head", Pacing::kConfirmHead)
      .value("grant", Pacing::kGrant);
  py::class_<SimulatedCall>(module, "SimulatedCall")
      .def(py::init<>())
      .def_readwrite("is_gather", &SimulatedCall::is_gather)
      .def_readwrite("numels", &SimulatedCall::numels)
      .def_readwrite("element_bytes", &SimulatedCall::element_bytes)
      .def_readwrite("cast", &SimulatedCall::cast)
      .def_readwrite("issue_s", &SimulatedCall::issue_s)
      .def_readwrite("segment_bytes", &SimulatedCall::segment_bytes)
      .def_readwrite("read_add", &SimulatedCall::read_add)
      .def_readwrite("leased", &SimulatedCall::leased)
      .def_readwrite("staging_slice_bytes", &SimulatedCall::staging_slice_bytes)
      .def_readwrite("sums", &SimulatedCall::sums)
      .def_property(
          "schedule", [](const SimulatedCall& call) { return call.gather.schedule; },
          [](SimulatedCall& call, GatherSchedule value) { call.gather.schedule = value; })
      .def_property(
          "pacing", [](const SimulatedCall& call) { return call.gather.pacing; },
          [](SimulatedCall& call, Pacing value) { call.gather.pacing = value; })
      .def_property(
          "head_bytes", [](const SimulatedCall& call) { return call.gather.head_bytes; },
          [](SimulatedCall& call, int64_t value) { call.gather.head_bytes = value; });
}

void bind_reports(py::module_& module) {
  py::class_<SimulatedRank>(module, "SimulatedRank")
      .def_readonly("end_s", &SimulatedRank::end_s)
      .def_readonly("sm_s", &SimulatedRank::sm_s)
      .def_readonly("resident_s", &SimulatedRank::resident_s)
      .def_readonly("pushed_bytes", &SimulatedRank::pushed_bytes)
      .def_readonly("arrived_bytes", &SimulatedRank::arrived_bytes)
      .def_readonly("rail_bytes", &SimulatedRank::rail_bytes)
      .def_readonly("kernel_bytes", &SimulatedRank::kernel_bytes);
  py::class_<SimulationReport>(module, "SimulationReport")
      .def_readonly("error", &SimulationReport::error)
      .def_readonly("end_s", &SimulationReport::end_s)
      .def_readonly("area_bytes", &SimulationReport::area_bytes)
      .def_readonly("ranks", &SimulationReport::ranks)
      .def_readonly("events", &SimulationReport::events)
      .def_property_readonly("spans", [](const SimulationReport& report) {
        py::list spans;
        for (const SimulatedSpan& span : report.spans) spans.append(span_of(span));
        return spans;
      });
}

}  // namespace

void bind_simulator(py::module_& module) {
  bind_calls(module);
  bind_reports(module);
  module.def("simulate", &run, py::arg("calls"), py::arg("nodes"), py::arg("local_ranks"),
             py::arg("cluster"), py::arg("one_node"), py::arg("watched_rank"));
  module.def("cost_constants", [] {
    py::list constants;
    for (const Constant& constant : cost_constants()) {
      constants.append(
          py::make_tuple(constant.name, constant.value, constant.unit, constant.source));
    }
    return constants;
  });
  module.def(
      "choose_schedule",
      [](const Numbers& cluster, int nodes, int64_t shard_bytes, Pacing pacing,
         int64_t head_bytes) {
        return choose_schedule(cluster_of(cluster).rail, nodes, shard_bytes, pacing, head_bytes);
      },
      py::arg("cluster"), py::arg("nodes"), py::arg("shard_bytes"), py::arg("pacing"),
      py::arg("head_bytes"));
}

}  // namespace tide
