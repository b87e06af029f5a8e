// The c10d backend "tide": serves the layout collectives itself, hands every other operation to an
// inner backend chosen by the tensors' device. c10d's ProcessGroup owns it and calls it without the
// GIL.
//
// Inner backends come from Python (PythonEdge::make_inner), the one for a device at its first use,
// which all ranks of the group make together. They go when this object goes, with the GIL released:
// their destructors join threads that may need it. Methods may be called from several threads; c10d
// asks for the same order of collectives on all ranks. After abort() operations of the group raise;
// after shutdown() nothing of it runs any more.
#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/c10d/engines.h"
#include "backend/c10d/options.h"
#include "backend/c10d/store_adapter.h"
#include "backend/c10d/tensor_view.h"
#include "backend/c10d/work_tide.h"
#include "backend/layout/group_layout.h"

// torch 2.14 gave five operations new names and forwards the old ones to them; earlier ones know
// the old names only.
#if TIDE_TORCH_MINOR >= 14
#define TIDE_RENAMED(new_name, old_name) new_name
#else
#define TIDE_RENAMED(new_name, old_name) old_name
#endif

namespace tide {

using BackendPointer = c10::intrusive_ptr<c10d::Backend>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

// What the backend needs from Python; bindings.cc fills it. The calls take the GIL themselves.
struct PythonEdge {
  std::function<BackendPointer(const std::string& device_type)> make_inner;
  std::function<BackendPointer(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                               const c10::intrusive_ptr<c10d::Backend::Options>& options)>
      make_child;
  std::function<void(const std::function<void()>&)>
      without_gil;                      // runs its argument with the GIL released
  std::function<void()> check_signals;  // throws when a signal handler raised
};

// One coalesced call: tensors to keep, and what the engine reads of them.
struct TensorLists {
  std::vector<at::Tensor> output_tensors;
  std::vector<at::Tensor> input_tensors;
  std::vector<TensorView> outputs;
  std::vector<TensorView> inputs;
  std::vector<int64_t> rows;  // empty: all 1
};

// Plans of the two engines under one number.
inline int plan_handle(int plan, const at::Device& device) {
  return 2 * plan + (device.is_cpu() ? 0 : 1);
}
inline int plan_of(int handle) { return handle / 2; }
inline bool is_on_gpu(int handle) { return handle % 2 == 1; }

class ProcessGroupTide : public c10d::Backend {
 public:
  ProcessGroupTide(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                   c10::intrusive_ptr<OptionsTide> options, PythonEdge edge);
  ~ProcessGroupTide() override;

  // The inner backend for "cpu" or "cuda", made now if need be (collective then).
  BackendPointer inner(const std::string& device_type);
  BackendPointer inner_if_made(const std::string& device_type) const;
  const c10::intrusive_ptr<OptionsTide>& options() const { return options_; }

  const std::string getBackendName() const override { return "tide"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPointer endCoalescing() override;
  BackendPointer split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                       const c10::intrusive_ptr<Options>& options) override;

  WorkPointer broadcast(std::vector<at::Tensor>& tensors,
                        const c10d::BroadcastOptions& options) override;
  WorkPointer allreduce(std::vector<at::Tensor>& tensors,
                        const c10d::AllreduceOptions& options) override;
  WorkPointer allreduce_sparse(std::vector<at::Tensor>& tensors,
                               const c10d::AllreduceOptions& options) override;
  WorkPointer allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                  const c10d::AllreduceCoalescedOptions& options) override;
  WorkPointer reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) override;
  WorkPointer allgather(std::vector<std::vector<at::Tensor>>& outputs,
                        std::vector<at::Tensor>& inputs,
                        const c10d::AllgatherOptions& options) override;
  WorkPointer allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                  std::vector<at::Tensor>& inputs,
                                  const c10d::AllgatherOptions& options) override;
  WorkPointer gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                     const c10d::GatherOptions& options) override;
  WorkPointer scatter(std::vector<at::Tensor>& outputs,
                      std::vector<std::vector<at::Tensor>>& inputs,
                      const c10d::ScatterOptions& options) override;
  WorkPointer reduce_scatter(std::vector<at::Tensor>& outputs,
                             std::vector<std::vector<at::Tensor>>& inputs,
                             const c10d::ReduceScatterOptions& options) override;
  WorkPointer alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                       const c10d::AllToAllOptions& options) override;
  WorkPointer send(std::vector<at::Tensor>& tensors, int destination_rank, int tag) override;
  WorkPointer recv(std::vector<at::Tensor>& tensors, int source_rank, int tag) override;
  WorkPointer recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  WorkPointer barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  WorkPointer TIDE_RENAMED(all_gather_single,
                           _allgather_base)(at::Tensor& output, at::Tensor& input,
                                            const c10d::AllgatherOptions& options) override;
  WorkPointer TIDE_RENAMED(reduce_scatter_single, _reduce_scatter_base)(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPointer TIDE_RENAMED(all_to_all_single,
                           alltoall_base)(at::Tensor& output, at::Tensor& input,
                                          std::vector<int64_t>& output_splits,
                                          std::vector<int64_t>& input_splits,
                                          const c10d::AllToAllOptions& options) override;
  WorkPointer TIDE_RENAMED(all_gather_single_coalesced, allgather_into_tensor_coalesced)(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  WorkPointer TIDE_RENAMED(reduce_scatter_single_coalesced, reduce_scatter_tensor_coalesced)(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options) override;
#if TIDE_TORCH_MINOR >= 15
  void startTimeEstimate() override;
  float endTimeEstimate() override;
#endif
#if TIDE_TORCH_MINOR >= 14
  WorkPointer gather_single(at::Tensor& output, at::Tensor& input,
                            const c10d::GatherOptions& options) override;
  bool supportsTimeEstimation() const override;
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
  void setBoundDeviceId(std::optional<at::Device> device) override;
  void suspend() override;
  void resume() override;
  std::unordered_map<std::string, uint64_t> getMemoryStats() override;
#endif

  void setSequenceNumberForGroup() override;
  uint64_t getSequenceNumberForGroup() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  void enableCollectivesTiming() override;
  void setGroupUid(const std::string& uid) override;
  void eagerConnectSingleDevice(at::Device device) override;
  c10d::ErrorType getError() override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex device_index) override;
  void abort() override;
  void shutdown() override;

  // FSDP2 groups; see python/tide/_C.pyi. In planned_groups.cc.
  std::vector<PlanAnswer> plan(const std::vector<PlanRequest>& requests, int prefetch_depth,
                               const at::Device& device);
  c10::intrusive_ptr<GatherWork> gather_planned(int plan, const std::vector<at::Tensor>& shards,
                                                const std::vector<at::Tensor>& outputs);
  void vacate(int plan);
  // The plan's group is gone. From a finalizer: any thread, takes no lock that a call holds.
  void forget(int plan);
  struct PlannedReduce {
    int plan = -1;
    std::vector<int> parameters;
    std::vector<at::Tensor> gradients;
    at::Tensor output;
    std::string op = "sum";
    double scale = 1.0;
    bool slot_reuse = false;
  };
  c10::intrusive_ptr<ReduceWork> reduce_planned(const PlannedReduce& call);

  // tide.empty, tide.register and described lists. In layout_collectives.cc.
  at::Tensor allocate(const std::vector<int64_t>& sizes, at::ScalarType dtype,
                      const at::Device& device);
  void register_tensors(const std::vector<at::Tensor>& tensors);
  WorkPointer gather_layout(const std::vector<at::Tensor>& outputs,
                            const std::vector<at::Tensor>& inputs,
                            const std::vector<int64_t>& rows);
  WorkPointer reduce_layout(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                            const std::vector<int64_t>& rows, const std::string& op, double scale);

  // Runs one of tide's own calls; what it refuses over its arguments (not what the engine fails
  // over) is told to the peers, which may wait for this rank in that call.
  template <typename Call>
  auto telling_peers(const Call& call) {
    try {
      return call();
    } catch (const c10::DistBackendError&) {
      throw;
    } catch (const c10::Error& error) {
      tell_refusal(error.what_without_backtrace());
      throw;
    }
  }

  std::map<std::string, int64_t> counters() const;
  // Of the GPU's group: "" where its slots are open to all by NVLink multicast, else why not; no
  // value before its first use. The same on all ranks.
  std::optional<std::string> no_multicast() const;
  std::string flight_record() const;
  std::string wait_times() const;
  std::string nodes() const;
  // Operation name -> reason of its last delegation, for operations that tide has a path of its own
  // for.
  std::map<std::string, std::string> why_delegated() const;

 private:
  // The engine's group of a device, made now if need be (collective then). Null when `operation`
  // must be delegated: the reason is noted, and the same on all ranks. Throws DistBackendError when
  // the group is broken.
  std::shared_ptr<Group> own_group(const std::string& operation, const at::Device& device);
  // Throws what interrupted a wait of this thread (KeyboardInterrupt), else DistBackendError.
  [[noreturn]] void raise(const Status& status) const;
  void raise_if_error(const Status& status) const;
  struct Planned {
    std::vector<Parameter> parameters;
    at::Device device;
  };
  Planned planned_group(int plan, const std::string& place);
  void tell_refusal(const std::string& reason);
  // TORCH_CHECK of arguments outside of telling_peers().
  void check_arguments(const Status& right);
  void note_delegated(const std::string& operation, const std::string& reason);
  std::string where(const std::string& operation) const;
  std::shared_ptr<const GroupLayout> layout_of(std::vector<Parameter> parameters);
  WorkTide::Call work_call(const std::shared_ptr<Group>& group,
                           std::shared_ptr<Operation> operation, c10d::OpType type,
                           const at::Device& device);
  // The group for one of `operation`'s direct calls, which cannot be delegated.
  std::shared_ptr<Group> required_group(const std::string& operation, const at::Device& device);
  // The two collectives on lists that were checked. Null when the engine refuses, on all ranks
  // alike.
  WorkPointer gather_lists(const std::shared_ptr<Group>& group, const TensorLists& lists);
  WorkPointer reduce_lists(const std::shared_ptr<Group>& group, const TensorLists& lists,
                           DType output_dtype, const AccumulateOptions& options);
  // Throws in a process that was forked from the one that made the group.
  void check_own_process() const;
  c10d::Backend& route(const at::Tensor& tensor);
  c10d::Backend& route(const std::vector<at::Tensor>& tensors);
  c10d::Backend& route(const std::vector<std::vector<at::Tensor>>& lists);
  std::vector<BackendPointer> inners_made() const;
  void drop_inners();
  // Inside a coalescing region the work also joins the region's.
  WorkPointer tracked(WorkPointer work);

  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<OptionsTide> options_;
  const PythonEdge edge_;
  const pid_t process_;

  mutable std::mutex inner_mutex_;                // guards inners_; held while one is made
  std::map<std::string, BackendPointer> inners_;  // by device type; "cpu" where one serves both

  const std::shared_ptr<StoreAdapter> adapter_;
  Engines engines_;
  std::mutex call_mutex_;  // the engine wants one call at a time
  uint64_t calls_ = 0;
  const std::shared_ptr<KeptTensors> kept_ = std::make_shared<KeptTensors>();
  std::map<int, Planned> plans_;  // accepted ones, by plan_handle()
  std::mutex forgotten_mutex_;
  std::vector<int> forgotten_;                               // and still in plans_
  std::vector<std::shared_ptr<const GroupLayout>> layouts_;  // of recent lists, newest last
  mutable std::mutex delegated_mutex_;
  std::map<std::string, std::string> delegated_;

  std::mutex coalescing_mutex_;
  bool coalescing_ = false;
  std::vector<WorkPointer> coalesced_works_;
  BackendPointer coalescing_inner_;  // the CUDA one, once an operation of the region reached it
};

}  // namespace tide
