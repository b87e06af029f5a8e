// tide._C's window on the simulator and the cost model, for `tide simulate`. No torch.
#pragma once

#include <pybind11/pybind11.h>

namespace tide {

void bind_simulator(pybind11::module_& module);

}  // namespace tide
