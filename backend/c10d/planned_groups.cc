// FSDP2's parameter groups as the seam plans and runs them, and what the backend tells about
// itself.
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "backend/c10d/errors.h"
#include "backend/c10d/process_group_tide.h"
#include "backend/c10d/storage_binding.h"
#include "backend/c10d/streams.h"
#include "backend/c10d/tensors.h"

namespace tide {

std::string ProcessGroupTide::where(const std::string& operation) const {
  return operation + " of group '" + options_->group_name + "', rank " + std::to_string(getRank());
}

void ProcessGroupTide::note_delegated(const std::string& operation, const std::string& reason) {
  std::lock_guard<std::mutex> lock(delegated_mutex_);
  delegated_[operation] = reason;
}

std::map<std::string, std::string> ProcessGroupTide::why_delegated() const {
  std::lock_guard<std::mutex> lock(delegated_mutex_);
  return delegated_;
}

void ProcessGroupTide::raise(const Status& status) const {
  if (std::exception_ptr interruption = adapter_->take_interruption()) {
    std::rethrow_exception(interruption);
  }
  std::rethrow_exception(dist_backend_error(status));
}

void ProcessGroupTide::tell_refusal(const std::string& reason) {
  const std::string text = "rank " + std::to_string(getRank()) + ": " + reason;
  for (const std::shared_ptr<Group>& group : engines_.made()) group->refuse(text);
  adapter_->refuse(text);  // to those that wait for a group to be made
}

void ProcessGroupTide::check_arguments(const Status& right) {
  if (right.is_ok()) return;
  tell_refusal(right.message());
  TORCH_CHECK(false, "tide: ", right.message());
}

void ProcessGroupTide::raise_if_error(const Status& status) const {
  if (!status.is_ok()) raise(status);
}

std::shared_ptr<Group> ProcessGroupTide::own_group(const std::string& operation,
                                                   const at::Device& device) {
  Result<EngineLink*> link = engines_.link(device_ordinal(device));
  TORCH_CHECK(link.is_ok(), "tide: ", where(operation), ": ", link.status().message());
  Result<std::shared_ptr<Group>> group = link.value()->group();
  if (group.is_ok()) {
    adapter_->start_round(static_cast<int>(engines_.made().size()));
    if (const Status broken = group.value()->error(); !broken.is_ok()) {
      raise(Status(broken.kind(), where(operation) + ": the group is broken: " + broken.message()));
    }
    return group.value();
  }
  if (group.status().kind() != ErrorKind::kUnsupported) raise(group.status());
  note_delegated(operation, group.status().message());
  return nullptr;
}

std::shared_ptr<Group> ProcessGroupTide::required_group(const std::string& operation,
                                                        const at::Device& device) {
  std::shared_ptr<Group> group = own_group(operation, device);
  TORCH_CHECK(group, "tide: ", where(operation), " cannot be served: ", why_delegated()[operation]);
  return group;
}

WorkTide::Call ProcessGroupTide::work_call(const std::shared_ptr<Group>& group,
                                           std::shared_ptr<Operation> operation, c10d::OpType type,
                                           const at::Device& device) {
  WorkTide::Call call;
  call.operation = std::move(operation);
  call.type = type;
  call.rank = getRank();
  call.sequence = calls_++;
  call.group = options_->group_name;
  call.timeout = engines_.timeout();
  call.check_signals = edge_.check_signals;
  call.kept = kept_;
  call.device = device;
  call.engine = group;
  kept_->sweep();
  return call;
}

ProcessGroupTide::Planned ProcessGroupTide::planned_group(int plan, const std::string& place) {
  std::lock_guard<std::mutex> lock(call_mutex_);
  const auto found = plans_.find(plan);
  TORCH_CHECK(found != plans_.end(), "tide: ", place, ": there is no such plan");
  return found->second;
}

std::vector<PlanAnswer> ProcessGroupTide::plan(const std::vector<PlanRequest>& requests,
                                               int prefetch_depth, const at::Device& device) {
  std::shared_ptr<Group> group = own_group("plan", device);
  if (!group) {
    PlanAnswer refused;
    refused.reason = why_delegated()["plan"];
    return std::vector<PlanAnswer>(requests.size(), refused);
  }
  std::lock_guard<std::mutex> lock(call_mutex_);
  {
    std::lock_guard<std::mutex> forgotten(forgotten_mutex_);
    for (const int plan : std::exchange(forgotten_, {})) plans_.erase(plan);
  }
  Result<std::vector<PlanAnswer>> answers = group->plan(requests, prefetch_depth);
  raise_if_error(answers.status());
  for (size_t i = 0; i < requests.size(); ++i) {
    PlanAnswer& answer = answers.value()[i];
    if (!answer.accepted) continue;
    answer.plan = plan_handle(answer.plan, device);
    plans_.insert_or_assign(answer.plan, Planned{requests[i].parameters, device});
  }
  return answers.value();
}

c10::intrusive_ptr<GatherWork> ProcessGroupTide::gather_planned(
    int plan, const std::vector<at::Tensor>& shards, const std::vector<at::Tensor>& outputs) {
  const std::string place = where("gather of plan " + std::to_string(plan));
  const Planned planned = planned_group(plan, place);
  const std::vector<Parameter>& parameters = planned.parameters;
  const std::string device = planned.device.str();
  std::shared_ptr<Group> group = required_group("gather", planned.device);
  std::lock_guard<std::mutex> lock(call_mutex_);
  TORCH_CHECK(shards.size() == parameters.size() && outputs.size() == parameters.size(),
              "tide: ", place, ": wanted ", parameters.size(), " shards and outputs, got ",
              shards.size(), " and ", outputs.size());
  GatherCall call;
  call.plan = plan_of(plan);
  call.stream = current_stream(planned.device);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    const TensorView view = view_of(shards[i], false);
    const Status right = check_tensor(place, "the shard of '" + parameter.name + "'", view,
                                      parameter.shard_dtype, parameter.shard_numel, device);
    TORCH_CHECK(right.is_ok(), "tide: ", right.message());
    const at::Tensor& output = outputs[i];
    TORCH_CHECK(
        output.device() == planned.device && dtype_of(output.scalar_type()) == parameter.dtype &&
            output.numel() <= parameter.shard_numel * getSize() && output.storage_offset() == 0,
        "tide: ", place, ": the output of '", parameter.name, "' wanted on ", device, ", of dtype ",
        dtype_name(parameter.dtype), ", with at most ", parameter.shard_numel * getSize(),
        " elements from its storage's start; got on ", output.device(), ", of dtype ",
        c10::toString(output.scalar_type()), ", with ", output.numel(), " from element ",
        output.storage_offset());
    const c10::StorageImpl& storage = *output.storage().unsafeGetStorageImpl();
    TORCH_CHECK(storage.nbytes() == 0 && storage.resizable(), "tide: ", place, ": the storage of '",
                parameter.name, "' wanted empty and resizable, got ", storage.nbytes(),
                " bytes; free it by resize_(0) first");
    call.shards.push_back(view.data);
  }
  Result<GatherStarted> started = group->gather(call);
  if (started.status().kind() == ErrorKind::kUnsupported) {
    note_delegated("gather", started.status().message());
    return nullptr;
  }
  raise_if_error(started.status());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto bytes = static_cast<size_t>(parameters[i].shard_numel * getSize() *
                                           dtype_bytes(parameters[i].dtype));
    const std::string refusal =
        bind_storage(*outputs[i].storage().unsafeGetStorageImpl(), started.value().places[i], bytes,
                     started.value().lease);
    TORCH_CHECK(refusal.empty(), "tide: ", place, ": '", parameters[i].name, "': ", refusal);
  }
  WorkTide::Call work =
      work_call(group, started.value().operation, c10d::OpType::_ALLGATHER_BASE, planned.device);
  work.inputs = shards;
  return c10::make_intrusive<GatherWork>(std::move(work), started.value().slot);
}

void ProcessGroupTide::vacate(int plan) {
  std::shared_ptr<Group> group = engines_.made(is_on_gpu(plan));
  if (!group) return;
  std::lock_guard<std::mutex> lock(call_mutex_);
  const auto found = plans_.find(plan);
  const at::Device device = found == plans_.end() ? at::Device(at::kCPU) : found->second.device;
  // A broken or closed group has no slots to take back; its next call says what is wrong.
  const Status vacated = group->vacate(plan_of(plan), current_stream(device));
  if (found == plans_.end()) throw_if_error(vacated);
}

void ProcessGroupTide::forget(int plan) {
  if (getpid() != process_) return;
  {
    std::lock_guard<std::mutex> lock(forgotten_mutex_);
    forgotten_.push_back(plan);
  }
  if (std::shared_ptr<Group> group = engines_.made(is_on_gpu(plan))) group->forget(plan_of(plan));
}

c10::intrusive_ptr<ReduceWork> ProcessGroupTide::reduce_planned(const PlannedReduce& call) {
  const std::string place = where("reduce of plan " + std::to_string(call.plan));
  const Planned planned = planned_group(call.plan, place);
  const std::vector<Parameter>& parameters = planned.parameters;
  const std::string device = planned.device.str();
  std::shared_ptr<Group> group = required_group("reduce", planned.device);
  std::lock_guard<std::mutex> lock(call_mutex_);
  const size_t count = call.parameters.size();
  TORCH_CHECK(call.gradients.size() == count, "tide: ", place,
              ": wanted one gradient per parameter, got ", call.gradients.size(), " for ", count);

  // The flat output follows the caller's order, the engine wants ascending parameters.
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&call](size_t a, size_t b) { return call.parameters[a] < call.parameters[b]; });
  std::vector<int64_t> offsets(count);
  int64_t wanted = 0;
  for (size_t i = 0; i < count; ++i) {
    const int p = call.parameters[i];
    TORCH_CHECK(p >= 0 && p < static_cast<int>(parameters.size()), "tide: ", place, ": parameter ",
                p, " is not one of the plan's ", parameters.size());
    offsets[i] = wanted;
    wanted += parameters[p].shard_numel;
  }
  const TensorView flat = view_of(call.output, true);
  const Status flat_right =
      check_tensor(place, "the flat output", flat, flat.dtype, wanted, device);
  TORCH_CHECK(flat_right.is_ok(), "tide: ", flat_right.message());

  ReduceCall reduce;
  reduce.plan = plan_of(call.plan);
  reduce.stream = current_stream(planned.device);
  reduce.output_dtype = flat.dtype;
  reduce.slot_reuse = call.slot_reuse;
  reduce.options.scale = call.scale;
  TORCH_CHECK(call.op == "sum" || call.op == "min" || call.op == "max", "tide: ", place,
              ": op must be sum, min or max, got ", call.op);
  if (call.op != "sum") reduce.options.op = call.op == "min" ? ReduceOp::kMin : ReduceOp::kMax;
  for (size_t i : order) {
    const Parameter& parameter = parameters[call.parameters[i]];
    const TensorView gradient = view_of(call.gradients[i], false);
    const Status right = check_tensor(place, "the gradient of '" + parameter.name + "'", gradient,
                                      gradient.dtype, parameter.unsharded_numel, device);
    TORCH_CHECK(right.is_ok(), "tide: ", right.message());
    reduce.parameters.push_back(call.parameters[i]);
    reduce.gradient_dtypes.push_back(gradient.dtype);
    reduce.gradients.push_back(gradient.data);
    reduce.outputs.push_back(flat.data == nullptr ? nullptr
                                                  : static_cast<char*>(flat.data) +
                                                        offsets[i] * dtype_bytes(flat.dtype));
  }
  Result<std::shared_ptr<Operation>> started = group->reduce(reduce);
  raise_if_error(started.status());
  WorkTide::Call work =
      work_call(group, started.value(), c10d::OpType::_REDUCE_SCATTER_BASE, planned.device);
  work.inputs = call.gradients;
  work.outputs = {call.output};
  return c10::make_intrusive<ReduceWork>(std::move(work));
}

std::map<std::string, int64_t> ProcessGroupTide::counters() const {
  GroupCounters counters;
  for (const std::shared_ptr<Group>& group : engines_.made()) {
    const GroupCounters one = group->counters();
    counters.operations += one.operations;
    counters.bytes_pushed += one.bytes_pushed;
    counters.bytes_copied += one.bytes_copied;
    counters.bytes_summed += one.bytes_summed;
    counters.bytes_sent += one.bytes_sent;
    counters.arena_bytes += one.arena_bytes;
    counters.plans += one.plans;
    counters.copies_to_all += one.copies_to_all;
    counters.read_adds += one.read_adds;
  }
  return {{"operations", static_cast<int64_t>(counters.operations)},
          {"bytes_pushed", static_cast<int64_t>(counters.bytes_pushed)},
          {"bytes_copied", static_cast<int64_t>(counters.bytes_copied)},
          {"bytes_summed", static_cast<int64_t>(counters.bytes_summed)},
          {"bytes_sent", static_cast<int64_t>(counters.bytes_sent)},
          {"arena_bytes", counters.arena_bytes},
          {"plans", counters.plans},
          {"copies_to_all", static_cast<int64_t>(counters.copies_to_all)},
          {"read_adds", static_cast<int64_t>(counters.read_adds)}};
}

std::optional<std::string> ProcessGroupTide::no_multicast() const {
  const std::shared_ptr<Group> group = engines_.made(true);
  if (!group) return std::nullopt;
  return group->no_multicast();
}

std::string ProcessGroupTide::wait_times() const {
  const std::vector<std::shared_ptr<Group>> groups = engines_.made();
  return groups.empty() ? "[]" : groups.back()->wait_times();
}

std::string ProcessGroupTide::nodes() const {
  const std::shared_ptr<Group> group = engines_.made(false);  // a GPU's group has one node
  return group ? group->nodes() : "{}";
}

std::string ProcessGroupTide::flight_record() const {
  // The GPU's where there is one.
  const std::vector<std::shared_ptr<Group>> groups = engines_.made();
  return groups.empty() ? "[]" : groups.back()->flight_record();
}

}  // namespace tide
