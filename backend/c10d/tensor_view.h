// Tensors of a layout collective without torch: what the checks and the engine need to know of
// each.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/base/dtype.h"
#include "backend/base/status.h"
#include "backend/layout/group_layout.h"

namespace tide {

struct TensorView {
  void* data = nullptr;  // first element; null for an empty tensor or one on a foreign device
  int64_t numel = 0;
  DType dtype = DType::kBytes;
  bool known_dtype = true;  // false: torch has a type that tide has no name for
  bool contiguous = true;
  std::string device = "cpu";
  std::string type_name;  // torch's name of the dtype, for messages

  int64_t bytes() const { return numel * dtype_bytes(dtype); }
};

// The lists of one all-gather: outputs[i] holds the inputs[i] of all ranks, one after another or,
// with rows[i] > 1, as columns. `rows` may be empty (all 1). Nothing may overlap but an input lying
// exactly at its own place in its output. `where` begins every message ("all-gather of group '0',
// rank 1").
Status check_gather_lists(const std::string& where, const std::vector<TensorView>& outputs,
                          const std::vector<TensorView>& inputs, const std::vector<int64_t>& rows,
                          int rank, int ranks);

// The lists of one reduce-scatter: inputs[i] holds a shard for each rank, outputs[i] gets this
// rank's. With `any_output_dtype` an output's dtype may differ from its input's.
Status check_reduce_lists(const std::string& where, const std::vector<TensorView>& outputs,
                          const std::vector<TensorView>& inputs, const std::vector<int64_t>& rows,
                          int rank, int ranks, bool any_output_dtype);

// The layout that such lists describe ("tensor 3"), by the whole tensors: a gather's outputs, a
// reduce's inputs.
std::vector<Parameter> parameters_of(const std::vector<TensorView>& wholes,
                                     const std::vector<int64_t>& rows, int ranks);

// One tensor of a planned group against what the plan says.
Status check_tensor(const std::string& where, const std::string& name, const TensorView& tensor,
                    DType dtype, int64_t numel, const std::string& device = "cpu");

}  // namespace tide
