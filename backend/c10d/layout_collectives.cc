// The coalesced all-gather and reduce-scatter.
#include "backend/c10d/premultiply.h"
#include "backend/c10d/process_group_tide.h"

namespace tide {

WorkPointer ProcessGroupTide::TIDE_RENAMED(all_gather_single_coalesced, allgather_into_tensor_coalesced)(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) {
  return tracked(route(inputs).TIDE_RENAMED(all_gather_single_coalesced, allgather_into_tensor_coalesced)(
      outputs, inputs, options));
}

WorkPointer ProcessGroupTide::TIDE_RENAMED(reduce_scatter_single_coalesced, reduce_scatter_tensor_coalesced)(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::ReduceScatterOptions& options) {
  c10d::Backend& backend = route(inputs);
  if (!needs_premultiply(options.reduceOp, inputs)) {
    return tracked(backend.TIDE_RENAMED(reduce_scatter_single_coalesced, reduce_scatter_tensor_coalesced)(
        outputs, inputs, options));
  }
  std::vector<at::Tensor> scaled = premultiplied(options.reduceOp, inputs);
  c10d::ReduceScatterOptions summed = options;
  summed.reduceOp = c10d::ReduceOp::SUM;
  return tracked(backend.TIDE_RENAMED(reduce_scatter_single_coalesced, reduce_scatter_tensor_coalesced)(
      outputs, scaled, summed));
}

}  // namespace tide
