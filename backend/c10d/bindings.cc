// The extension module tide._C.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <memory>
#include <utility>

#include "backend/c10d/process_group_tide.h"

namespace py = pybind11;

namespace tide {
namespace {

// A Python object that C++ may drop on any thread: takes the GIL, and leaks once the interpreter is going.
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
  edge.make_inner = [callable = keep(std::move(make_inner))](const std::string& device_type) -> BackendPointer {
    py::gil_scoped_acquire gil;
    py::object made = (*callable)(device_type);
    return made.is_none() ? nullptr : made.cast<BackendPointer>();
  };
  edge.make_child = [callable = keep(std::move(make_child))](
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
  py::class_<OptionsTide, c10d::Backend::Options, c10::intrusive_ptr<OptionsTide>>(module, "Options")
      .def(py::init([](std::chrono::milliseconds timeout) { return c10::make_intrusive<OptionsTide>(timeout); }),
           py::arg("timeout") = kBackendDefaultTimeout)
      .def_readwrite("inner_cpu", &OptionsTide::inner_cpu)
      .def_readwrite("inner_cuda", &OptionsTide::inner_cuda)
      .def_readwrite("node_size", &OptionsTide::node_size)
      .def_readwrite("memory_mode", &OptionsTide::memory_mode)
      .def_readwrite("fsdp", &OptionsTide::fsdp)
      .def_readwrite("own_collectives", &OptionsTide::own_collectives)
      .def_readwrite("arena_limit_bytes", &OptionsTide::arena_limit_bytes)
      .def_readwrite("staging_slice_bytes", &OptionsTide::staging_slice_bytes)
      .def_readwrite("landing_slice_bytes", &OptionsTide::landing_slice_bytes)
      .def_readwrite("flight_record_size", &OptionsTide::flight_record_size);
}

void bind_backend(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<ProcessGroupTide, c10d::Backend, c10::intrusive_ptr<ProcessGroupTide>>(module, "Backend")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       const c10::intrusive_ptr<OptionsTide>& options, py::object make_inner, py::object make_child) {
             return c10::make_intrusive<ProcessGroupTide>(
                 store, rank, size, options, python_edge(std::move(make_inner), std::move(make_child)));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"), py::arg("make_inner"),
           py::arg("make_child"))
      .def("inner", &ProcessGroupTide::inner, py::arg("device_type"), NoGil())
      .def("inner_if_made", &ProcessGroupTide::inner_if_made, py::arg("device_type"), NoGil())
      // Children of a tide group are made by the store and never split a communicator, so ranks outside have no part.
      .def("perform_nocolor_split", [](ProcessGroupTide&, const py::object&) {}, py::arg("device"));
}

}  // namespace
}  // namespace tide

PYBIND11_MODULE(_C, module) {
  module.attr("TORCH_VERSION") = TIDE_TORCH_VERSION;
  tide::bind_options(module);
  tide::bind_backend(module);
}
