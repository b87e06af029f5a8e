// What tide hands to an inner backend: routing by device, and the reduce operations that Gloo does
// not know.
#include <utility>

#include "backend/c10d/premultiply.h"
#include "backend/c10d/process_group_tide.h"
#include "backend/c10d/work_received.h"

namespace tide {
namespace {

const at::Tensor* first_of(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ? nullptr : &tensors.front();
}

const at::Tensor* first_of(const std::vector<std::vector<at::Tensor>>& lists) {
  for (const auto& list : lists) {
    if (!list.empty()) return &list.front();
  }
  return nullptr;
}

const char* device_type_of(const at::Tensor* tensor) {
  return tensor == nullptr || tensor->device().is_cpu() ? "cpu" : "cuda";
}

std::vector<at::Tensor> on_host(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> host;
  for (const at::Tensor& tensor : tensors) host.push_back(tensor.detach().cpu());
  return host;
}

std::vector<at::Tensor> shaped_on_host(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> host;
  for (const at::Tensor& tensor : tensors)
    host.push_back(at::empty(tensor.sizes(), tensor.options().device(at::kCPU)));
  return host;
}

}  // namespace

c10d::Backend& ProcessGroupTide::route(const at::Tensor& tensor) {
  const char* device_type = device_type_of(&tensor);
  BackendPointer chosen = inner(device_type);
  if (!tensor.device().is_cpu()) {
    // The inner backend's own region begins with its first operation: a region of CPU operations
    // must not touch it.
    std::lock_guard<std::mutex> lock(coalescing_mutex_);
    if (coalescing_ && !coalescing_inner_ && chosen->supportsCoalescing()) {
      chosen->startCoalescing();
      coalescing_inner_ = chosen;
    }
  }
  return *chosen;  // inners_ keeps it
}

c10d::Backend& ProcessGroupTide::route(const std::vector<at::Tensor>& tensors) {
  const at::Tensor* first = first_of(tensors);
  return first == nullptr ? *inner("cpu") : route(*first);
}

c10d::Backend& ProcessGroupTide::route(const std::vector<std::vector<at::Tensor>>& lists) {
  const at::Tensor* first = first_of(lists);
  return first == nullptr ? *inner("cpu") : route(*first);
}

WorkPointer ProcessGroupTide::broadcast(std::vector<at::Tensor>& tensors,
                                        const c10d::BroadcastOptions& options) {
  return tracked(route(tensors).broadcast(tensors, options));
}

WorkPointer ProcessGroupTide::allreduce(std::vector<at::Tensor>& tensors,
                                        const c10d::AllreduceOptions& options) {
  c10d::Backend& backend = route(tensors);
  if (!needs_premultiply(backend, options.reduceOp, tensors))
    return tracked(backend.allreduce(tensors, options));
  premultiply_in_place(options.reduceOp, tensors);
  c10d::AllreduceOptions summed = options;
  summed.reduceOp = c10d::ReduceOp::SUM;
  return tracked(backend.allreduce(tensors, summed));
}

WorkPointer ProcessGroupTide::allreduce_sparse(std::vector<at::Tensor>& tensors,
                                               const c10d::AllreduceOptions& options) {
  return tracked(route(tensors).allreduce_sparse(tensors, options));
}

WorkPointer ProcessGroupTide::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceCoalescedOptions& options) {
  c10d::Backend& backend = route(tensors);
  if (!needs_premultiply(backend, options.reduceOp, tensors))
    return tracked(backend.allreduce_coalesced(tensors, options));
  premultiply_in_place(options.reduceOp, tensors);
  c10d::AllreduceCoalescedOptions summed = options;
  summed.reduceOp = c10d::ReduceOp::SUM;
  return tracked(backend.allreduce_coalesced(tensors, summed));
}

WorkPointer ProcessGroupTide::reduce(std::vector<at::Tensor>& tensors,
                                     const c10d::ReduceOptions& options) {
  c10d::Backend& backend = route(tensors);
  if (!needs_premultiply(backend, options.reduceOp, tensors))
    return tracked(backend.reduce(tensors, options));
  c10d::ReduceOptions summed = options;
  summed.reduceOp = c10d::ReduceOp::SUM;
  if (getRank() == options.rootRank) {
    premultiply_in_place(options.reduceOp, tensors);
    return tracked(backend.reduce(tensors, summed));
  }
  // A rank that is not the root keeps its values.
  std::vector<at::Tensor> scaled = premultiplied(options.reduceOp, tensors);
  return tracked(backend.reduce(scaled, summed));
}

WorkPointer ProcessGroupTide::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::AllgatherOptions& options) {
  return tracked(route(inputs).allgather(outputs, inputs, options));
}

WorkPointer ProcessGroupTide::allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                                  std::vector<at::Tensor>& inputs,
                                                  const c10d::AllgatherOptions& options) {
  return tracked(route(inputs).allgather_coalesced(outputs, inputs, options));
}

WorkPointer ProcessGroupTide::gather(std::vector<std::vector<at::Tensor>>& outputs,
                                     std::vector<at::Tensor>& inputs,
                                     const c10d::GatherOptions& options) {
  return tracked(route(inputs).gather(outputs, inputs, options));
}

WorkPointer ProcessGroupTide::scatter(std::vector<at::Tensor>& outputs,
                                      std::vector<std::vector<at::Tensor>>& inputs,
                                      const c10d::ScatterOptions& options) {
  return tracked(route(outputs).scatter(outputs, inputs, options));
}

WorkPointer ProcessGroupTide::reduce_scatter(std::vector<at::Tensor>& outputs,
                                             std::vector<std::vector<at::Tensor>>& inputs,
                                             const c10d::ReduceScatterOptions& options) {
  c10d::Backend& backend = route(outputs);
  if (!needs_premultiply(backend, options.reduceOp, outputs))
    return tracked(backend.reduce_scatter(outputs, inputs, options));
  std::vector<std::vector<at::Tensor>> scaled;
  for (const auto& list : inputs) scaled.push_back(premultiplied(options.reduceOp, list));
  c10d::ReduceScatterOptions summed = options;
  summed.reduceOp = c10d::ReduceOp::SUM;
  return tracked(backend.reduce_scatter(outputs, scaled, summed));
}

WorkPointer ProcessGroupTide::alltoall(std::vector<at::Tensor>& outputs,
                                       std::vector<at::Tensor>& inputs,
                                       const c10d::AllToAllOptions& options) {
  return tracked(route(inputs.empty() ? outputs : inputs).alltoall(outputs, inputs, options));
}

// Gloo's send and recv take a device pointer for one of the host's, which ends the process.
WorkPointer ProcessGroupTide::send(std::vector<at::Tensor>& tensors, int destination_rank,
                                   int tag) {
  c10d::Backend& backend = route(tensors);
  if (!is_gloo_on_gpu(backend, tensors))
    return tracked(backend.send(tensors, destination_rank, tag));
  std::vector<at::Tensor> host = on_host(tensors);
  return tracked(backend.send(host, destination_rank, tag));
}

WorkPointer ProcessGroupTide::recv(std::vector<at::Tensor>& tensors, int source_rank, int tag) {
  c10d::Backend& backend = route(tensors);
  if (!is_gloo_on_gpu(backend, tensors)) return tracked(backend.recv(tensors, source_rank, tag));
  std::vector<at::Tensor> host = shaped_on_host(tensors);
  WorkPointer work = backend.recv(host, source_rank, tag);
  return tracked(
      c10::make_intrusive<WorkReceived>(getRank(), std::move(work), std::move(host), tensors));
}

WorkPointer ProcessGroupTide::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  c10d::Backend& backend = route(tensors);
  if (!is_gloo_on_gpu(backend, tensors)) return tracked(backend.recvAnysource(tensors, tag));
  std::vector<at::Tensor> host = shaped_on_host(tensors);
  WorkPointer work = backend.recvAnysource(host, tag);
  return tracked(
      c10::make_intrusive<WorkReceived>(getRank(), std::move(work), std::move(host), tensors));
}

WorkPointer ProcessGroupTide::barrier(const c10d::BarrierOptions& options) {
  // c10d does not always hand on which device the caller meant: the device bound to the group, then
  // device ids once CUDA was used in this group (equal on all ranks), say so. Everything else is a
  // barrier of CPU threads.
  std::optional<at::Device> device = options.device ? options.device : getBoundDeviceId();
  bool on_cuda =
      device ? !device->is_cpu() : (!options.device_ids.empty() && inner_if_made("cuda"));
  return tracked(inner(on_cuda ? "cuda" : "cpu")->barrier(options));
}

void ProcessGroupTide::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  inner("cpu")->monitoredBarrier(options, wait_all_ranks);
}

WorkPointer ProcessGroupTide::TIDE_RENAMED(all_gather_single,
                                           _allgather_base)(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions& options) {
  return tracked(
      route(input).TIDE_RENAMED(all_gather_single, _allgather_base)(output, input, options));
}

WorkPointer ProcessGroupTide::TIDE_RENAMED(reduce_scatter_single, _reduce_scatter_base)(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  c10d::Backend& backend = route(input);
  if (!needs_premultiply(backend, options.reduceOp, {input})) {
    return tracked(
        backend.TIDE_RENAMED(reduce_scatter_single, _reduce_scatter_base)(output, input, options));
  }
  at::Tensor scaled = premultiplied(options.reduceOp, {input}).front();
  c10d::ReduceScatterOptions summed = options;
  summed.reduceOp = c10d::ReduceOp::SUM;
  return tracked(
      backend.TIDE_RENAMED(reduce_scatter_single, _reduce_scatter_base)(output, scaled, summed));
}

WorkPointer ProcessGroupTide::TIDE_RENAMED(all_to_all_single,
                                           alltoall_base)(at::Tensor& output, at::Tensor& input,
                                                          std::vector<int64_t>& output_splits,
                                                          std::vector<int64_t>& input_splits,
                                                          const c10d::AllToAllOptions& options) {
  return tracked(route(input).TIDE_RENAMED(all_to_all_single, alltoall_base)(
      output, input, output_splits, input_splits, options));
}

#if TIDE_TORCH_MINOR >= 14
WorkPointer ProcessGroupTide::gather_single(at::Tensor& output, at::Tensor& input,
                                            const c10d::GatherOptions& options) {
  return tracked(route(input).gather_single(output, input, options));
}
#endif

}  // namespace tide
