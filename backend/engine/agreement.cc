#include "backend/engine/agreement.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tide {
namespace {

constexpr std::chrono::seconds kRefusalPatience{2};
// How long a difference waits for the tensor's name: the peer's lane is about to publish it.
constexpr std::chrono::seconds kTablePatience{1};

std::string options_text(const CallRecord& record) {
  static const char* const kNames[] = {"sum", "min", "max"};
  const uint64_t op = record.options & 255;
  double scale = 0;
  std::memcpy(&scale, &record.scale_bits, sizeof(scale));
  std::string text = op < 3 ? kNames[op] : "operation " + std::to_string(op);
  text += " scaled by " + std::to_string(scale) + " into " +
          dtype_name(static_cast<DType>(record.options >> 8 & 255));
  if (record.options >> 16 & 1) text += ", added";
  if (record.options >> 17 & 1) text += ", slot_reuse";
  return text;
}

std::string tensor_text(const TensorDescriptor& tensor) {
  std::string text = std::to_string(tensor.shard_numel) + " x " + dtype_name(tensor.dtype) +
                     " a shard, " + std::to_string(tensor.unsharded_numel) + " in all";
  if (tensor.rows != 1) text += ", " + std::to_string(tensor.rows) + " rows";
  return text;
}

}  // namespace

uint64_t pack_options(int reduce_op, DType output_dtype, bool add_to_output, bool slot_reuse) {
  return static_cast<uint64_t>(reduce_op) | static_cast<uint64_t>(output_dtype) << 8 |
         static_cast<uint64_t>(add_to_output) << 16 | static_cast<uint64_t>(slot_reuse) << 17;
}

void Agreement::add_plan(int plan, std::string name) {
  std::lock_guard<std::mutex> lock(mutex_);
  plans_[plan] = std::move(name);
}

void Agreement::remove_plan(int plan) {
  std::lock_guard<std::mutex> lock(mutex_);
  plans_.erase(plan);
}

std::string Agreement::describe(const CallRecord& record) const {
  std::string text = call_kind_name(record.kind);
  if (record.kind == CallKind::kAreas) {
    CallRecord cause = record;
    cause.kind = record.cause == CallKind::kAreas ? CallKind::kGather : record.cause;
    return describe(cause) + ", which makes an area";
  }
  if (record.kind == CallKind::kGather || record.kind == CallKind::kReduce || record.plan >= 0) {
    if (record.kind == CallKind::kPlan) text = "gather (no slot is free)";
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = plans_.find(record.plan);
    return text + " of '" +
           (found == plans_.end() ? "plan " + std::to_string(record.plan) : found->second) + "'";
  }
  if (is_list(record.kind)) {
    return text + " of " + std::to_string(record.tensors) + " tensors (" +
           std::to_string(record.bytes) + " bytes a rank)";
  }
  if (record.kind == CallKind::kAllocate)
    return text + " of " + std::to_string(record.bytes) + " bytes";
  return text;
}

Agreement::Answer Agreement::compare(const CallRecord& own, int rank, bool arrived,
                                     const GroupLayout* layout) const {
  const auto head_of = [&](uint64_t sequence) {
    return "group '" + group_ + "', rank " + std::to_string(control_->rank()) +
           ": ranks disagree about call " + std::to_string(sequence) + ": ";
  };
  CallRecord other;
  const ControlPage::Found found = control_->read(rank, own.sequence, &other);
  if (found != ControlPage::Found::kYes) {
    if (!arrived) return {};
    // The signal belongs to another call: the last one that both have made may already differ.
    const uint64_t calls = control_->calls(rank);
    CallRecord own_last, other_last;
    if (calls > 0 && calls <= own.sequence &&
        control_->read(control_->rank(), calls - 1, &own_last) == ControlPage::Found::kYes &&
        control_->read(rank, calls - 1, &other_last) == ControlPage::Found::kYes) {
      bool needs_table = false;
      const std::string text = difference(own_last, other_last, rank, nullptr, &needs_table);
      if (!text.empty()) {
        return {Status(ErrorKind::kInvalidUse, head_of(calls - 1) + text), false};
      }
    }
    return {Status(ErrorKind::kInvalidUse,
                   head_of(own.sequence) + "this rank is in " + describe(own) + ", but rank " +
                       std::to_string(rank) + ", whose signal came, has made " +
                       std::to_string(control_->calls(rank)) + " calls"),
            false};
  }
  Answer answer;
  const std::string text = difference(own, other, rank, layout, &answer.needs_table);
  if (!text.empty()) answer.status = Status(ErrorKind::kInvalidUse, head_of(own.sequence) + text);
  return answer;
}

Status Agreement::refused_instead(const CallRecord& own, int rank, Clock::time_point since) const {
  const ControlPage::RefusedCall refused = control_->last_refusal(rank);
  if (refused.count == 0 || refused.sequence != own.sequence) return Status::ok();
  if (control_->calls(rank) > own.sequence) return Status::ok();
  CallRecord published;
  if (control_->read(control_->rank(), own.sequence, &published) != ControlPage::Found::kYes ||
      refused.count <= published.refused_before)
    return Status::ok();
  if (Clock::now() - std::max(since, refused.when) < kRefusalPatience) return Status::ok();
  return Status(ErrorKind::kInvalidUse,
                "group '" + group_ + "', rank " + std::to_string(control_->rank()) + ": rank " +
                    std::to_string(rank) + " has not made call " + std::to_string(own.sequence) +
                    ", " + describe(own) + " here: it refused a call instead: " + refused.reason);
}

Status PeerWatch::check(const Agreement& agreement, const CallRecord& own,
                        const GroupLayout* layout) {
  for (int rank = 0; rank < agreement.ranks(); ++rank) {
    if (rank == agreement.rank()) continue;
    const Agreement::Answer answer = agreement.compare(own, rank, false, layout);
    if (answer.status.is_ok()) {
      TIDE_RETURN_IF_ERROR(agreement.refused_instead(own, rank, since_));
      continue;
    }
    if (!answer.needs_table) return answer.status;
    if (needs_table_since_ == Clock::time_point{}) needs_table_since_ = Clock::now();
    if (Clock::now() - needs_table_since_ > kTablePatience) return answer.status;
  }
  return Status::ok();
}

std::string Agreement::difference(const CallRecord& own, const CallRecord& other, int rank,
                                  const GroupLayout* layout, bool* needs_table) const {
  const std::string who = "rank " + std::to_string(rank);
  if (other.kind != own.kind || other.plan != own.plan || other.cause != own.cause) {
    return who + " is in " + describe(other) + ", this rank in " + describe(own) +
           "; every rank must make the same calls in the same order";
  }
  if (other.tensors != own.tensors || other.layout_hash != own.layout_hash) {
    const std::string tensor = tensor_difference(own, rank, layout, needs_table);
    if (!tensor.empty()) return tensor;
    return "tensors differ in " + describe(own) + ": " + who + " has " +
           std::to_string(other.tensors) + " tensors of " + std::to_string(other.bytes) +
           " bytes, this rank " + std::to_string(own.tensors) + " of " + std::to_string(own.bytes);
  }
  if (other.options != own.options || other.scale_bits != own.scale_bits) {
    return who + " wants " + options_text(other) + " in " + describe(other) + ", this rank " +
           options_text(own);
  }
  if (other.bytes != own.bytes)
    return who + " is in " + describe(other) + ", this rank in " + describe(own);
  if (other.slot != own.slot) {
    return who + " uses slot " + std::to_string(other.slot) + " in " + describe(other) +
           ", this rank slot " + std::to_string(own.slot) +
           "; gathers and vacates must come in the same order";
  }
  if (other.program_hash != own.program_hash) {
    return who + " runs another program in " + describe(other) +
           "; the group's options must be equal on all ranks";
  }
  return "";
}

std::string Agreement::tensor_difference(const CallRecord& own, int rank, const GroupLayout* layout,
                                         bool* needs_table) const {
  const CallKind kind = own.kind == CallKind::kAreas ? own.cause : own.kind;
  if (!is_list(kind) && !is_reduce(kind)) return "";
  const Direction direction = is_reduce(kind) ? Direction::kReduce : Direction::kGather;
  if (!control_->has_table(control_->rank(), direction, own.sequence)) return "";
  if (!control_->has_table(rank, direction, own.sequence)) {
    *needs_table = true;
    return "";
  }
  const int own_size = control_->table_size(control_->rank(), direction);
  const int other_size = control_->table_size(rank, direction);
  for (int i = 0; i < own_size && i < other_size; ++i) {
    const TensorDescriptor ours = control_->descriptor(control_->rank(), direction, i);
    const TensorDescriptor theirs = control_->descriptor(rank, direction, i);
    if (ours == theirs) continue;
    const auto name = [&](const TensorDescriptor& tensor) {
      const bool known = layout != nullptr && tensor.parameter < layout->size();
      return known ? "'" + layout->parameter(tensor.parameter).name + "'"
                   : std::to_string(tensor.parameter);
    };
    return "parameter " + std::to_string(i) + " is the first that differs in " + describe(own) +
           ": rank " + std::to_string(rank) + " has " + name(theirs) + " (" + tensor_text(theirs) +
           "), this rank " + name(ours) + " (" + tensor_text(ours) + ")";
  }
  return "";
}

}  // namespace tide
