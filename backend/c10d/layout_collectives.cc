// The coalesced all-gather and reduce-scatter: tide's own on CPU and CUDA tensors, through the
// engine.
//
// The path is a function of arguments that are equal on all ranks. Everything a rank can see to be
// wrong is an error here, before anything is sent; what only a comparison of ranks shows, the
// engine finds.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <set>
#include <utility>

#include "backend/c10d/errors.h"
#include "backend/c10d/premultiply.h"
#include "backend/c10d/process_group_tide.h"
#include "backend/c10d/storage_binding.h"
#include "backend/c10d/streams.h"
#include "backend/c10d/tensors.h"
#include "backend/c10d/work_all.h"

namespace tide {
namespace {

constexpr const char* kAllGather = "all_gather_into_tensor_coalesced";
constexpr const char* kReduceScatter = "reduce_scatter_tensor_coalesced";
constexpr size_t kLayoutsKept = 16;
constexpr int64_t kMostBytes = int64_t{1} << 56;  // more than any address space

// Why tensors of this type, or this operation on them, are not tide's; empty: they are.
std::string dtype_reason(const std::vector<TensorView>& tensors, bool summed) {
  for (const TensorView& tensor : tensors) {
    if (!tensor.known_dtype) return "tide does not know dtype " + tensor.type_name;
    if (summed && !is_summable(tensor.dtype)) return "tide does not sum dtype " + tensor.type_name;
  }
  return "";
}

bool is_floating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

// Fills `options` for a c10d reduce operation; the reason why it is not tide's otherwise.
std::string reduce_options(const c10d::ReduceOp& op, const std::vector<TensorView>& inputs,
                           int ranks, AccumulateOptions* options) {
  const bool floats = std::all_of(inputs.begin(), inputs.end(),
                                  [](const TensorView& input) { return is_floating(input.dtype); });
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return "";
    case c10d::ReduceOp::AVG:
      if (!floats) return "tide does not average integers";
      options->scale = 1.0 / ranks;
      return "";
    case c10d::ReduceOp::PREMUL_SUM:
      if (!floats) return "tide does not multiply integers";
      options->scale = premultiply_factor(op);
      return "";
    case c10d::ReduceOp::MIN:
      options->op = ReduceOp::kMin;
      return "";
    case c10d::ReduceOp::MAX:
      options->op = ReduceOp::kMax;
      return "";
    default:
      return "tide reduces by SUM, AVG, PREMUL_SUM, MIN and MAX only";
  }
}

TensorLists lists_of(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                     const std::vector<int64_t>& rows) {
  return {outputs, inputs, views_of(outputs, true), views_of(inputs, false), rows};
}

bool same_parameters(const std::vector<Parameter>& a, const std::vector<Parameter>& b) {
  return std::equal(
      a.begin(), a.end(), b.begin(), b.end(), [](const Parameter& x, const Parameter& y) {
        return x.dtype == y.dtype && x.shard_numel == y.shard_numel && x.rows == y.rows;
      });
}

bool is_served(const at::Device& device) { return device.is_cpu() || device.is_cuda(); }

at::Device device_of(const TensorLists& lists) {
  return lists.input_tensors.empty() ? at::Device(at::kCPU) : lists.input_tensors.front().device();
}

TensorLists subset(const TensorLists& lists, DType input_dtype) {
  TensorLists chosen;
  for (size_t i = 0; i < lists.inputs.size(); ++i) {
    if (lists.inputs[i].dtype != input_dtype) continue;
    chosen.outputs.push_back(lists.outputs[i]);
    chosen.inputs.push_back(lists.inputs[i]);
    if (!lists.rows.empty()) chosen.rows.push_back(lists.rows[i]);
  }
  chosen.output_tensors = lists.output_tensors;
  chosen.input_tensors = lists.input_tensors;
  return chosen;
}

}  // namespace

std::shared_ptr<const GroupLayout> ProcessGroupTide::layout_of(std::vector<Parameter> parameters) {
  for (const auto& layout : layouts_) {
    if (same_parameters(layout->parameters(), parameters)) return layout;
  }
  const std::string wrong = GroupLayout::check(parameters, getSize());
  TORCH_CHECK(wrong.empty(), "tide: ", where("layout"), ": ", wrong);
  auto layout = std::make_shared<const GroupLayout>(std::move(parameters), getSize());
  if (layouts_.size() == kLayoutsKept) layouts_.erase(layouts_.begin());
  layouts_.push_back(layout);
  return layout;
}

WorkPointer ProcessGroupTide::gather_lists(const std::shared_ptr<Group>& group,
                                           const TensorLists& lists) {
  std::lock_guard<std::mutex> lock(call_mutex_);
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (const TensorView& input : lists.inputs) inputs.push_back(input.data);
  for (const TensorView& output : lists.outputs) outputs.push_back(output.data);
  auto started = group->gather_list(layout_of(parameters_of(lists.outputs, lists.rows, getSize())),
                                    inputs, outputs, current_stream(device_of(lists)));
  if (started.status().kind() == ErrorKind::kUnsupported) {
    note_delegated(kAllGather, started.status().message());
    return nullptr;
  }
  raise_if_error(started.status());
  WorkTide::Call call =
      work_call(group, started.value(), c10d::OpType::_ALLGATHER_BASE, device_of(lists));
  call.outputs = lists.output_tensors;
  call.inputs = lists.input_tensors;
  return c10::make_intrusive<WorkTide>(std::move(call));
}

WorkPointer ProcessGroupTide::reduce_lists(const std::shared_ptr<Group>& group,
                                           const TensorLists& lists, DType output_dtype,
                                           const AccumulateOptions& options) {
  std::lock_guard<std::mutex> lock(call_mutex_);
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (const TensorView& input : lists.inputs) inputs.push_back(input.data);
  for (const TensorView& output : lists.outputs) outputs.push_back(output.data);
  auto started =
      group->reduce_list(layout_of(parameters_of(lists.inputs, lists.rows, getSize())), inputs,
                         outputs, output_dtype, options, current_stream(device_of(lists)));
  if (started.status().kind() == ErrorKind::kUnsupported) {
    note_delegated(kReduceScatter, started.status().message());
    return nullptr;
  }
  raise_if_error(started.status());
  WorkTide::Call call =
      work_call(group, started.value(), c10d::OpType::_REDUCE_SCATTER_BASE, device_of(lists));
  call.outputs = lists.output_tensors;
  call.inputs = lists.input_tensors;
  return c10::make_intrusive<WorkTide>(std::move(call));
}

WorkPointer ProcessGroupTide::TIDE_RENAMED(all_gather_single_coalesced,
                                           allgather_into_tensor_coalesced)(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  if (!inputs.empty() && is_served(inputs.front().device())) {
    check_own_process();
    const TensorLists lists = lists_of(outputs, inputs, {});
    const std::string reason =
        options_->own_collectives == 0 ? "TIDE_COLLECTIVES=0" : dtype_reason(lists.inputs, false);
    if (!reason.empty()) {
      note_delegated(kAllGather, reason);
    } else {
      const Status right = check_gather_lists(where("all-gather"), lists.outputs, lists.inputs, {},
                                              getRank(), getSize());
      check_arguments(right);
      if (auto group = own_group(kAllGather, inputs.front().device())) {
        if (WorkPointer work = gather_lists(group, lists)) return tracked(std::move(work));
      }
    }
  }
  c10d::Backend& backend = route(inputs);
  if (!is_gloo_on_gpu(backend, inputs) || outputs.size() != inputs.size()) {
    return tracked(backend.TIDE_RENAMED(all_gather_single_coalesced,
                                        allgather_into_tensor_coalesced)(outputs, inputs, options));
  }
  // Gloo's own ends the process on CUDA tensors.
  std::vector<WorkPointer> works;
  for (size_t i = 0; i < inputs.size(); ++i) {
    works.push_back(
        backend.TIDE_RENAMED(all_gather_single, _allgather_base)(outputs[i], inputs[i], options));
  }
  return tracked(c10::make_intrusive<WorkAll>(getRank(), std::move(works)));
}

WorkPointer ProcessGroupTide::TIDE_RENAMED(reduce_scatter_single_coalesced,
                                           reduce_scatter_tensor_coalesced)(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::ReduceScatterOptions& options) {
  if (!inputs.empty() && is_served(inputs.front().device())) {
    check_own_process();
    const TensorLists lists = lists_of(outputs, inputs, {});
    AccumulateOptions accumulate;
    std::string reason =
        options_->own_collectives == 0 ? "TIDE_COLLECTIVES=0" : dtype_reason(lists.inputs, true);
    if (reason.empty())
      reason = reduce_options(options.reduceOp, lists.inputs, getSize(), &accumulate);
    if (!reason.empty()) {
      note_delegated(kReduceScatter, reason);
    } else {
      const Status right = check_reduce_lists(where("reduce-scatter"), lists.outputs, lists.inputs,
                                              {}, getRank(), getSize(), false);
      check_arguments(right);
      if (auto group = own_group(kReduceScatter, inputs.front().device())) {
        // One operation per dtype, in the order in which the list first names them.
        std::vector<DType> dtypes;
        for (const TensorView& input : lists.inputs) {
          if (std::find(dtypes.begin(), dtypes.end(), input.dtype) == dtypes.end())
            dtypes.push_back(input.dtype);
        }
        std::vector<WorkPointer> works;
        for (DType dtype : dtypes) {
          WorkPointer work = reduce_lists(group, dtypes.size() == 1 ? lists : subset(lists, dtype),
                                          dtype, accumulate);
          if (!work) break;
          works.push_back(std::move(work));
        }
        if (works.size() == 1 && dtypes.size() == 1) return tracked(works.front());
        auto all = c10::make_intrusive<WorkAll>(getRank(), works);
        if (works.size() == dtypes.size()) return tracked(std::move(all));
        if (!works.empty()) all->wait(kNoTimeout);
      }
    }
  }
  c10d::Backend& backend = route(inputs);
  if (!needs_premultiply(backend, options.reduceOp, inputs)) {
    return tracked(backend.TIDE_RENAMED(reduce_scatter_single_coalesced,
                                        reduce_scatter_tensor_coalesced)(outputs, inputs, options));
  }
  std::vector<at::Tensor> scaled = premultiplied(options.reduceOp, inputs);
  c10d::ReduceScatterOptions summed = options;
  summed.reduceOp = c10d::ReduceOp::SUM;
  return tracked(backend.TIDE_RENAMED(reduce_scatter_single_coalesced,
                                      reduce_scatter_tensor_coalesced)(outputs, scaled, summed));
}

WorkPointer ProcessGroupTide::gather_layout(const std::vector<at::Tensor>& outputs,
                                            const std::vector<at::Tensor>& inputs,
                                            const std::vector<int64_t>& rows) {
  const TensorLists lists = lists_of(outputs, inputs, rows);
  const std::string reason = dtype_reason(lists.inputs, false);
  TORCH_CHECK(reason.empty(), "tide: ", where("layout all-gather"), ": ", reason);
  const Status right = check_gather_lists(where("layout all-gather"), lists.outputs, lists.inputs,
                                          rows, getRank(), getSize());
  TORCH_CHECK(right.is_ok(), "tide: ", right.message());
  WorkPointer work = gather_lists(required_group("layout all-gather", device_of(lists)), lists);
  TORCH_CHECK(work, "tide: ", where("layout all-gather"), ": ", why_delegated()[kAllGather]);
  return work;
}

WorkPointer ProcessGroupTide::reduce_layout(const at::Tensor& output,
                                            const std::vector<at::Tensor>& inputs,
                                            const std::vector<int64_t>& rows, const std::string& op,
                                            double scale) {
  const std::string place = where("layout reduce-scatter");
  TensorLists lists = lists_of({output}, inputs, rows);
  const TensorView flat = lists.outputs.front();
  int64_t wanted = 0;
  lists.outputs.clear();
  for (const TensorView& input : lists.inputs) {
    TensorView part = flat;
    part.numel = input.numel / getSize();
    part.data = flat.data == nullptr
                    ? nullptr
                    : static_cast<char*>(flat.data) + wanted * dtype_bytes(flat.dtype);
    wanted += part.numel;
    lists.outputs.push_back(part);
  }
  std::string reason = dtype_reason(lists.inputs, true);
  if (reason.empty()) reason = dtype_reason({flat}, true);
  TORCH_CHECK(reason.empty(), "tide: ", place, ": ", reason);
  const Status flat_right =
      check_tensor(place, "the flat output", flat, flat.dtype, wanted, device_of(lists).str());
  TORCH_CHECK(flat_right.is_ok(), "tide: ", flat_right.message());
  const Status right =
      check_reduce_lists(place, lists.outputs, lists.inputs, rows, getRank(), getSize(), true);
  TORCH_CHECK(right.is_ok(), "tide: ", right.message());
  const bool one_dtype = std::all_of(
      lists.inputs.begin(), lists.inputs.end(),
      [&lists](const TensorView& input) { return input.dtype == lists.inputs.front().dtype; });
  TORCH_CHECK(one_dtype, "tide: ", place, ": the inputs must have one dtype");
  AccumulateOptions options;
  options.scale = scale;
  TORCH_CHECK(op == "sum" || op == "min" || op == "max", "tide: ", place,
              ": op must be sum, min or max, got ", op);
  if (op != "sum") options.op = op == "min" ? ReduceOp::kMin : ReduceOp::kMax;
  WorkPointer work = reduce_lists(required_group("layout reduce-scatter", device_of(lists)), lists,
                                  flat.dtype, options);
  TORCH_CHECK(work, "tide: ", place, ": ", why_delegated()[kReduceScatter]);
  return work;
}

at::Tensor ProcessGroupTide::allocate(const std::vector<int64_t>& sizes, at::ScalarType dtype,
                                      const at::Device& device) {
  bool is_empty = false;
  for (int64_t size : sizes) {
    TORCH_CHECK(size >= 0, "tide: ", where("empty"), ": sizes must not be negative, got ", size);
    is_empty = is_empty || size == 0;
  }
  int64_t bytes = is_empty ? 0 : static_cast<int64_t>(c10::elementSize(dtype));
  for (int64_t size : sizes) {
    TORCH_CHECK(!__builtin_mul_overflow(bytes, size, &bytes) && bytes <= kMostBytes,
                "tide: ", where("empty"), ": a tensor of sizes ", c10::IntArrayRef(sizes),
                " and dtype ", c10::toString(dtype), " has more bytes than a process can address");
  }
  TORCH_CHECK(is_served(device), "tide: ", where("empty"), ": wanted cpu or cuda, got ", device);
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  if (bytes == 0) return at::empty(sizes, options);
  std::shared_ptr<Group> group = required_group("empty", device);
  std::lock_guard<std::mutex> lock(call_mutex_);
  Result<std::shared_ptr<void>> memory = group->allocate(bytes);
  raise_if_error(memory.status());
  std::shared_ptr<void> hold = memory.value();
  const at::Device target =
      device.is_cpu()
          ? device
          : at::Device(device.type(), static_cast<c10::DeviceIndex>(device_ordinal(device)));
  return at::from_blob(
      hold.get(), sizes, [hold](void*) mutable { hold.reset(); }, options, target);
}

void ProcessGroupTide::register_tensors(const std::vector<at::Tensor>& tensors) {
  struct Move {
    c10::StorageImpl* storage;
    int64_t offset;
  };
  std::vector<Move> moves;
  std::set<c10::StorageImpl*> seen;
  int64_t bytes = 0;
  const at::Device device = tensors.empty() ? at::Device(at::kCPU) : tensors.front().device();
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK(
        is_served(device) && tensors[i].device() == device && tensors[i].layout() == at::kStrided,
        "tide: ", where("register"), ": tensor ", i, " wanted dense on ",
        is_served(device) ? device.str() : "cpu or cuda", ", got on ", tensors[i].device());
    c10::StorageImpl* storage = tensors[i].storage().unsafeGetStorageImpl();
    if (storage_is_bound(*storage) || storage->nbytes() == 0 || !seen.insert(storage).second)
      continue;
    const std::string refusal = movable(*storage);
    TORCH_CHECK(refusal.empty(), "tide: ", where("register"), ": tensor ", i, ": ", refusal);
    moves.push_back({storage, bytes});
    bytes += aligned_place_bytes(static_cast<int64_t>(storage->nbytes()));
  }
  std::shared_ptr<Group> group = required_group("register", device);
  std::lock_guard<std::mutex> lock(call_mutex_);
  Result<std::shared_ptr<void>> memory = group->allocate(std::max<int64_t>(bytes, 1));
  raise_if_error(memory.status());
  auto* place = static_cast<char*>(memory.value().get());
  // Copied by torch, on any device; the old memory goes when the copies are there.
  const auto as_bytes = at::TensorOptions().dtype(at::kByte).device(device);
  at::NoGradGuard no_grad;
  for (const Move& move : moves) {
    const auto bytes_at = [&](const void* data) {
      return at::for_blob(const_cast<void*>(data), {static_cast<int64_t>(move.storage->nbytes())})
          .options(as_bytes)
          .target_device(device)
          .make_tensor();
    };
    bytes_at(place + move.offset).copy_(bytes_at(move.storage->data()));
  }
  synchronize_current_stream(device);
  for (const Move& move : moves) move_storage(*move.storage, place + move.offset, memory.value());
}

}  // namespace tide
