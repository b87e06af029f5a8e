#include "backend/c10d/tensor_view.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace tide {
namespace {

struct Range {
  uintptr_t begin;
  uintptr_t end;
  bool written;
  bool output;  // which list it is from, for its name
  size_t index;
};

std::string tensor_name(bool output, size_t index) {
  return (output ? "output " : "input ") + std::to_string(index);
}

Status invalid(const std::string& where, const std::string& sentence) {
  return Status(ErrorKind::kInvalidUse, where + ": " + sentence);
}

Status check_one(const std::string& where, const TensorView& tensor, const std::string& name,
                 const std::string& device) {
  if (tensor.device != device) {
    return invalid(where,
                   name + " wanted on " + device + " like the others, got on " + tensor.device);
  }
  if (!tensor.contiguous) {
    return invalid(where,
                   name + " wanted contiguous, got a strided view; pass tensor.contiguous()");
  }
  return Status::ok();
}

// What is written may not share memory with anything else.
Status check_overlaps(const std::string& where, std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  // Only the range that reaches furthest so far, of each kind, can touch the next one.
  const Range* furthest_written = nullptr;
  const Range* furthest_any = nullptr;
  for (const Range& range : ranges) {
    const Range* other = range.written ? furthest_any : furthest_written;
    if (other != nullptr && other->end > range.begin) {
      return invalid(where, tensor_name(range.output, range.index) + " wanted apart from " +
                                tensor_name(other->output, other->index) +
                                ", got memory that overlaps");
    }
    if (furthest_any == nullptr || range.end > furthest_any->end) furthest_any = &range;
    if (range.written && (furthest_written == nullptr || range.end > furthest_written->end))
      furthest_written = &range;
  }
  return Status::ok();
}

// shards[i] is one of `ranks` equal parts of wholes[i]. `shards_are_outputs` says which list is
// which, for messages.
Status check_pairs(const std::string& where, const std::vector<TensorView>& wholes,
                   const std::vector<TensorView>& shards, bool shards_are_outputs, bool same_dtype,
                   const std::vector<int64_t>& rows, int rank, int ranks) {
  if (wholes.size() != shards.size()) {
    const size_t outputs = shards_are_outputs ? shards.size() : wholes.size();
    const size_t inputs = shards_are_outputs ? wholes.size() : shards.size();
    return invalid(where, "wanted one output per input, got " + std::to_string(outputs) +
                              " outputs and " + std::to_string(inputs) + " inputs");
  }
  if (!rows.empty() && rows.size() != shards.size()) {
    return invalid(where, "wanted one number of rows per tensor, got " +
                              std::to_string(rows.size()) + " for " +
                              std::to_string(shards.size()) + " tensors");
  }
  // The inputs chose the path; a list without any is empty.
  const std::vector<TensorView>& inputs = shards_are_outputs ? wholes : shards;
  const std::string device = inputs.empty() ? "cpu" : inputs.front().device;
  std::vector<Range> ranges;
  ranges.reserve(2 * shards.size());
  auto add = [&ranges](const TensorView& tensor, bool written, bool output, size_t index) {
    auto begin = reinterpret_cast<uintptr_t>(tensor.data);
    ranges.push_back(
        {begin, begin + static_cast<uintptr_t>(tensor.bytes()), written, output, index});
  };
  for (size_t i = 0; i < shards.size(); ++i) {
    const TensorView& whole = wholes[i];
    const TensorView& shard = shards[i];
    const std::string whole_name = tensor_name(!shards_are_outputs, i);
    const std::string shard_name = tensor_name(shards_are_outputs, i);
    TIDE_RETURN_IF_ERROR(check_one(where, whole, whole_name, device));
    TIDE_RETURN_IF_ERROR(check_one(where, shard, shard_name, device));
    if (same_dtype && whole.type_name != shard.type_name) {
      return invalid(where, "output " + std::to_string(i) + " wanted of its input's dtype " +
                                (shards_are_outputs ? whole : shard).type_name + ", got " +
                                (shards_are_outputs ? shard : whole).type_name);
    }
    if (whole.numel != shard.numel * ranks) {
      return invalid(where, whole_name + " wanted with " + std::to_string(shard.numel * ranks) +
                                " elements (" + std::to_string(ranks) + " ranks x " +
                                std::to_string(shard.numel) + " of " + shard_name + "), got " +
                                std::to_string(whole.numel));
    }
    const int64_t row_count = rows.empty() ? 1 : rows[i];
    if (row_count < 1 || shard.numel % row_count != 0) {
      return invalid(where, shard_name + " wanted with a number of rows that divides its " +
                                std::to_string(shard.numel) + " elements, got " +
                                std::to_string(row_count));
    }
    if (shard.numel == 0) continue;
    // In place, the two tensors are one range of memory: the whole one stands for both.
    const bool in_place = row_count == 1 && whole.dtype == shard.dtype &&
                          static_cast<const char*>(shard.data) ==
                              static_cast<const char*>(whole.data) + rank * shard.bytes();
    add(whole, !shards_are_outputs || in_place, !shards_are_outputs, i);
    if (!in_place) add(shard, shards_are_outputs, shards_are_outputs, i);
  }
  return check_overlaps(where, std::move(ranges));
}

}  // namespace

Status check_gather_lists(const std::string& where, const std::vector<TensorView>& outputs,
                          const std::vector<TensorView>& inputs, const std::vector<int64_t>& rows,
                          int rank, int ranks) {
  return check_pairs(where, outputs, inputs, false, true, rows, rank, ranks);
}

Status check_reduce_lists(const std::string& where, const std::vector<TensorView>& outputs,
                          const std::vector<TensorView>& inputs, const std::vector<int64_t>& rows,
                          int rank, int ranks, bool any_output_dtype) {
  return check_pairs(where, inputs, outputs, true, !any_output_dtype, rows, rank, ranks);
}

std::vector<Parameter> parameters_of(const std::vector<TensorView>& wholes,
                                     const std::vector<int64_t>& rows, int ranks) {
  std::vector<Parameter> parameters;
  parameters.reserve(wholes.size());
  for (size_t i = 0; i < wholes.size(); ++i) {
    Parameter parameter;
    parameter.name = "tensor " + std::to_string(i);
    parameter.dtype = parameter.shard_dtype = wholes[i].dtype;
    parameter.shard_numel = wholes[i].numel / ranks;
    parameter.unsharded_numel = wholes[i].numel;
    parameter.rows = rows.empty() ? 1 : rows[i];
    parameters.push_back(std::move(parameter));
  }
  return parameters;
}

Status check_tensor(const std::string& where, const std::string& name, const TensorView& tensor,
                    DType dtype, int64_t numel, const std::string& device) {
  TIDE_RETURN_IF_ERROR(check_one(where, tensor, name, device));
  if (tensor.dtype != dtype || !tensor.known_dtype) {
    return invalid(where,
                   name + " wanted of dtype " + dtype_name(dtype) + ", got " + tensor.type_name);
  }
  if (tensor.numel != numel) {
    return invalid(where, name + " wanted with " + std::to_string(numel) + " elements, got " +
                              std::to_string(tensor.numel));
  }
  return Status::ok();
}

}  // namespace tide
