// The extension module tide._C.
#include <Python.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

#include "backend/c10d/dry_plan.h"
#include "backend/c10d/process_group_tide.h"
#include "backend/c10d/simulator_bindings.h"
#include "backend/c10d/storage_binding.h"
#include "backend/c10d/tensors.h"

namespace py = pybind11;

namespace tide {
namespace {

// A Python object that C++ may drop on any thread: takes the GIL, and leaks once the interpreter is
// going.
std::shared_ptr<py::object> keep(py::object object) {
  return std::shared_ptr<py::object>(new py::object(std::move(object)), [](py::object* held) {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    delete held;
  });
}

void without_gil(const std::function<void()>& work) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    py::gil_scoped_release release;
    work();
  } else {
    work();
  }
}

void check_signals() {
  if (!Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

PythonEdge python_edge(py::object make_inner, py::object make_child) {
  PythonEdge edge;
  edge.make_inner =
      [callable = keep(std::move(make_inner))](const std::string& device_type) -> BackendPointer {
    py::gil_scoped_acquire gil;
    py::object made = (*callable)(device_type);
    return made.is_none() ? nullptr : made.cast<BackendPointer>();
  };
  edge.make_child =
      [callable = keep(std::move(make_child))](
          const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
          const c10::intrusive_ptr<c10d::Backend::Options>& options) -> BackendPointer {
    py::gil_scoped_acquire gil;
    return (*callable)(store, rank, size, options).cast<BackendPointer>();
  };
  edge.without_gil = without_gil;
  edge.check_signals = check_signals;
  return edge;
}

void bind_options(py::module_& module) {
  py::class_<OptionsTide, c10d::Backend::Options, c10::intrusive_ptr<OptionsTide>>(module,
                                                                                   "Options")
      .def(py::init([](std::chrono::milliseconds timeout) {
             return c10::make_intrusive<OptionsTide>(timeout);
           }),
           py::arg("timeout") = kBackendDefaultTimeout)
      .def_readwrite("inner_cpu", &OptionsTide::inner_cpu)
      .def_readwrite("inner_cuda", &OptionsTide::inner_cuda)
      .def_readwrite("node_size", &OptionsTide::node_size)
      .def_readwrite("memory_mode", &OptionsTide::memory_mode)
      .def_readwrite("fsdp", &OptionsTide::fsdp)
      .def_readwrite("multicast", &OptionsTide::multicast)
      .def_readwrite("own_collectives", &OptionsTide::own_collectives)
      .def_readwrite("arena_limit_bytes", &OptionsTide::arena_limit_bytes)
      .def_readwrite("staging_slice_bytes", &OptionsTide::staging_slice_bytes)
      .def_readwrite("landing_slice_bytes", &OptionsTide::landing_slice_bytes)
      .def_readwrite("flight_record_size", &OptionsTide::flight_record_size)
      .def_readwrite("rails", &OptionsTide::rails)
      .def_readwrite("ucx_library", &OptionsTide::ucx_library)
      .def_readwrite("ucx_candidates", &OptionsTide::ucx_candidates)
      .def_readwrite("schedule", &OptionsTide::schedule)
      .def_readwrite("pacing", &OptionsTide::pacing)
      .def_readwrite("head_bytes", &OptionsTide::head_bytes);
}

const char* staging_name(Staging staging) {
  switch (staging) {
    case Staging::kLeased:
      return "leased";
    case Staging::kArea:
      return "area";
    default:
      return "none";
  }
}

Parameter parameter_spec(std::string name, at::ScalarType dtype, at::ScalarType shard_dtype,
                         int64_t shard_numel, int64_t unsharded_numel, int64_t rows) {
  Parameter parameter;
  parameter.name = std::move(name);
  parameter.dtype = dtype_of(dtype);
  parameter.shard_dtype = dtype_of(shard_dtype);
  parameter.shard_numel = shard_numel;
  parameter.unsharded_numel = unsharded_numel;
  parameter.rows = rows;
  return parameter;
}

PlanRequest plan_request(std::string name, std::vector<Parameter> parameters, std::string refusal,
                         bool serve_gather, bool serve_reduce, bool stays_unsharded, bool may_lease,
                         at::ScalarType gradient_dtype) {
  PlanRequest request;
  request.name = std::move(name);
  request.parameters = std::move(parameters);
  request.refusal = std::move(refusal);
  request.serve_gather = serve_gather;
  request.serve_reduce = serve_reduce;
  request.stays_unsharded = stays_unsharded;
  request.may_lease = may_lease;
  request.gradient_dtype = dtype_of(gradient_dtype);
  return request;
}

void bind_plans(py::module_& module) {
  py::class_<Parameter>(module, "ParameterSpec")
      .def(py::init(&parameter_spec), py::arg("name"), py::arg("dtype"), py::arg("shard_dtype"),
           py::arg("shard_numel"), py::arg("unsharded_numel"), py::arg("rows") = 1);
  py::class_<PlanRequest>(module, "PlanRequest")
      .def(py::init(&plan_request), py::arg("name"), py::arg("parameters"), py::arg("refusal") = "",
           py::arg("serve_gather") = true, py::arg("serve_reduce") = true,
           py::arg("stays_unsharded") = false, py::arg("may_lease") = true,
           py::arg("gradient_dtype") = at::kBFloat16);
  py::class_<PlanAnswer>(module, "PlanAnswer")
      .def_readonly("accepted", &PlanAnswer::accepted)
      .def_readonly("reason", &PlanAnswer::reason)
      .def_readonly("plan", &PlanAnswer::plan)
      .def_readonly("slot_bytes", &PlanAnswer::slot_bytes)
      .def_property_readonly("staging",
                             [](const PlanAnswer& answer) { return staging_name(answer.staging); });
  py::class_<DryPlan>(module, "DryPlan")
      .def_readonly("answers", &DryPlan::answers)
      .def_readonly("shared_slots", &DryPlan::shared_slots)
      .def_readonly("shared_slot_bytes", &DryPlan::shared_slot_bytes)
      .def_readonly("arena_bytes", &DryPlan::arena_bytes);
  module.def(
      "dry_plan",
      [](const std::vector<PlanRequest>& requests, int ranks, int prefetch_depth,
         const OptionsTide& set) {
        TORCH_CHECK_VALUE(ranks >= 1, "tide: a plan needs one rank or more, got ", ranks);
        GroupOptions options;
        options.staging_slice_bytes = set.staging_slice_bytes;
        options.landing_slice_bytes = set.landing_slice_bytes;
        options.arena_limit_bytes = set.arena_limit_bytes;
        Result<DryPlan> plan = dry_plan(requests, ranks, prefetch_depth, options);
        TORCH_CHECK_VALUE(plan.is_ok(), "tide: ", plan.status().message());
        return plan.value();
      },
      py::arg("requests"), py::arg("ranks"), py::arg("prefetch_depth"), py::arg("options"));
}

void bind_works(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<WorkTide, c10d::Work, c10::intrusive_ptr<WorkTide>>(module, "TideWork")
      .def("wait_read", &WorkTide::wait_read, NoGil());
  py::class_<GatherWork, WorkTide, c10::intrusive_ptr<GatherWork>>(module, "GatherWork")
      .def_readonly("slot", &GatherWork::slot);
  py::class_<ReduceWork, WorkTide, c10::intrusive_ptr<ReduceWork>>(module, "ReduceWork");
}

void bind_storage_tools(py::module_& module) {
  module.def(
      "bind_storage",
      [](const at::Tensor& tensor, intptr_t address, size_t bytes, py::object keep_alive) {
        const std::string refusal =
            bind_storage(*tensor.storage().unsafeGetStorageImpl(), reinterpret_cast<void*>(address),
                         bytes, keep(std::move(keep_alive)));
        TORCH_CHECK_VALUE(refusal.empty(), "tide: ", refusal);
      },
      py::arg("tensor"), py::arg("address"), py::arg("nbytes"), py::arg("keep_alive"));
  module.def(
      "storage_is_bound",
      [](const at::Tensor& tensor) {
        return storage_is_bound(*tensor.storage().unsafeGetStorageImpl());
      },
      py::arg("tensor"));
}

template <typename Value, typename... Arguments>
auto telling_peers(Value (ProcessGroupTide::*method)(Arguments...)) {
  return [method](ProcessGroupTide& backend, Arguments... arguments) -> Value {
    return backend.telling_peers([&] { return (backend.*method)(arguments...); });
  };
}

void bind_backend(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<ProcessGroupTide, c10d::Backend, c10::intrusive_ptr<ProcessGroupTide>>(module,
                                                                                    "Backend")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       const c10::intrusive_ptr<OptionsTide>& options, py::object make_inner,
                       py::object make_child) {
             return c10::make_intrusive<ProcessGroupTide>(
                 store, rank, size, options,
                 python_edge(std::move(make_inner), std::move(make_child)));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"),
           py::arg("make_inner"), py::arg("make_child"))
      .def_property_readonly("options", &ProcessGroupTide::options)  // older torch has none
      .def("inner", &ProcessGroupTide::inner, py::arg("device_type"), NoGil())
      .def("inner_if_made", &ProcessGroupTide::inner_if_made, py::arg("device_type"), NoGil())
      .def("plan", &ProcessGroupTide::plan, py::arg("requests"), py::arg("prefetch_depth"),
           py::arg("device") = at::Device(at::kCPU), NoGil())
      .def("gather", telling_peers(&ProcessGroupTide::gather_planned), py::arg("plan"),
           py::arg("shards"), py::arg("outputs"), NoGil())
      .def("vacate", &ProcessGroupTide::vacate, py::arg("plan"), NoGil())
      .def("forget", &ProcessGroupTide::forget, py::arg("plan"))
      .def(
          "reduce",
          [](ProcessGroupTide& backend, int plan, std::vector<int> parameters,
             std::vector<at::Tensor> gradients, at::Tensor output, std::string op, double scale,
             bool slot_reuse) {
            py::gil_scoped_release release;
            ProcessGroupTide::PlannedReduce call{plan,
                                                 std::move(parameters),
                                                 std::move(gradients),
                                                 std::move(output),
                                                 std::move(op),
                                                 scale,
                                                 slot_reuse};
            return backend.telling_peers([&] { return backend.reduce_planned(call); });
          },
          py::arg("plan"), py::arg("parameters"), py::arg("gradients"), py::arg("output"),
          py::arg("op"), py::arg("scale"), py::arg("slot_reuse"))
      .def("allocate", telling_peers(&ProcessGroupTide::allocate), py::arg("sizes"),
           py::arg("dtype"), py::arg("device") = at::Device(at::kCPU), NoGil())
      .def("register", telling_peers(&ProcessGroupTide::register_tensors), py::arg("tensors"),
           NoGil())
      .def("gather_layout", telling_peers(&ProcessGroupTide::gather_layout), py::arg("outputs"),
           py::arg("inputs"), py::arg("rows"), NoGil())
      .def("reduce_layout", telling_peers(&ProcessGroupTide::reduce_layout), py::arg("output"),
           py::arg("inputs"), py::arg("rows"), py::arg("op"), py::arg("scale"), NoGil())
      .def("counters", &ProcessGroupTide::counters, NoGil())
      .def("no_multicast", &ProcessGroupTide::no_multicast, NoGil())
      .def("flight_record", &ProcessGroupTide::flight_record, NoGil())
      .def("wait_times", &ProcessGroupTide::wait_times, NoGil())
      .def("nodes", &ProcessGroupTide::nodes, NoGil())
      .def("why_delegated", &ProcessGroupTide::why_delegated, NoGil())
      // Children of a tide group are made by the store and never split a communicator, so ranks
      // outside have no part.
      .def(
          "perform_nocolor_split", [](ProcessGroupTide&, const py::object&) {}, py::arg("device"));
}

}  // namespace
}  // namespace tide

PYBIND11_MODULE(_C, module) {
  module.attr("TORCH_VERSION") = TIDE_TORCH_VERSION;
  tide::bind_options(module);
  tide::bind_plans(module);
  tide::bind_works(module);
  tide::bind_storage_tools(module);
  tide::bind_simulator(module);
  tide::bind_backend(module);
}
