// The collectives: each checks its arguments, binds a program to addresses and hands it to a lane.
#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/engine/group_impl.h"
#include "backend/layout/hash.h"

namespace tide {
namespace {

TensorDescriptor describe_tensor(const GroupLayout& layout, int p, DType dtype) {
  const Parameter& parameter = layout.parameter(p);
  return {p, dtype, parameter.shard_numel, parameter.unsharded_numel, parameter.rows};
}

void set_options(const AccumulateOptions& options, DType output_dtype, bool slot_reuse,
                 CallRecord* record) {
  record->options =
      pack_options(static_cast<int>(options.op), output_dtype, options.add_to_output, slot_reuse);
  std::memcpy(&record->scale_bits, &options.scale, sizeof(options.scale));
}

std::string list_subject(const GroupLayout& layout) {
  return std::to_string(layout.size()) + " tensors (" + std::to_string(layout.shard_bytes()) +
         " bytes a rank)";
}

// Of all gradients of a call, each at a multiple of kPlaceAlignment, as they lie once moved.
int64_t placed_gradient_bytes(const GroupLayout& layout, const ReduceCall& call) {
  int64_t bytes = 0;
  for (size_t i = 0; i < call.parameters.size(); ++i) {
    bytes += aligned_place_bytes(layout.parameter(call.parameters[i]).unsharded_numel *
                                 dtype_bytes(call.gradient_dtypes[i]));
  }
  return bytes;
}

// Which parameters have gradients, of which dtypes.
uint64_t hash_of_gradients(const ReduceCall& call) {
  uint64_t hash = hash_combine(kHashSeed, call.parameters.size());
  for (size_t i = 0; i < call.parameters.size(); ++i) {
    hash = hash_combine(hash, static_cast<uint64_t>(call.parameters[i]) * 256 +
                                  static_cast<uint64_t>(call.gradient_dtypes[i]));
  }
  return hash;
}

// Over a fabric that enqueues, peers' outputs are taken to lie where the own ones do; a rank whose
// lie elsewhere is in another call.
uint64_t hash_of_postings(uint64_t hash, const std::vector<Posting>& postings) {
  for (const Posting& posting : postings) {
    hash = hash_combine(hash, static_cast<uint64_t>(posting.allocation + 1));
    hash = hash_combine(hash, static_cast<uint64_t>(posting.offset));
  }
  return hash;
}

// A reduce's memory, by the layout's parameters; `binding` has its layout.
void bind_gradients(const ReduceCall& call, Binding* binding) {
  const auto size = static_cast<size_t>(binding->layout->size());
  binding->gradients.assign(size, nullptr);
  binding->gradient_dtypes.assign(size, DType::kBytes);
  binding->outputs.assign(size, nullptr);
  binding->output_dtype = call.output_dtype;
  binding->options = call.options;
  for (size_t i = 0; i < call.parameters.size(); ++i) {
    const int p = call.parameters[i];
    binding->gradients[p] = call.gradients[i];
    binding->gradient_dtypes[p] = call.gradient_dtypes[i];
    binding->outputs[p] = call.outputs[i];
  }
}

}  // namespace

Result<GroupImpl::Plan*> GroupImpl::find_plan(int plan, const char* call) {
  const auto found = plans_.find(plan);
  if (found != plans_.end()) return &found->second;
  return invalid(std::string(call) + " of plan " + std::to_string(plan) +
                 ", which is not one of the group's " + std::to_string(plans_.size()) + " plans");
}

void GroupImpl::advance(const Program& program, Binding* binding) {
  binding->base = base_;
  for (int c = 0; c < kCounterCount; ++c) base_[c] += program.advance[c];
}

void GroupImpl::plan_sums(ReduceOptions options, ReduceOp op, Binding* binding) {
  if (!context_.spans_nodes()) {
    options.staging_slice_bytes = options_.staging_slice_bytes;
    binding->program = programs_.reduce(*binding->layout, options);
    return;
  }
  NodeReduceOptions between;
  between.subset = std::move(options.subset);
  between.dtypes = std::move(options.dtypes);
  between.segment_bytes = node_area_.segment_bytes;
  // The switch adds fp32, whatever a rank has that is summed as something else goes by pushes.
  const bool is_open = staging_.is_open_to_all() && !options_.deterministic;
  const bool is_fp32 = std::all_of(between.dtypes.begin(), between.dtypes.end(), [](DType dtype) {
    return partial_dtype(dtype) == DType::kFloat32;
  });
  between.read_add = is_open && is_fp32 && op == ReduceOp::kSum;
  between.behind_read_adds = is_open && !between.read_add;
  binding->program = programs_.node_reduce(*binding->layout, between);
  binding->space_offset = node_area_.offset;
}

std::shared_ptr<const Program> GroupImpl::gather_program(const GroupLayout& layout, bool to_all) {
  if (context_.spans_nodes()) {
    NodeGatherOptions options = options_.rail_gather;
    options.to_all = to_all;
    return programs_.node_gather(layout, options);
  }
  GatherOptions options;
  options.to_all = to_all;
  return programs_.gather(layout, options);
}

void GroupImpl::use_slot(Slot& slot, const std::shared_ptr<OperationState>& operation) {
  slot.users.clear();
  slot.users.push_back(operation);
}

Result<GatherStarted> GroupImpl::gather(const GatherCall& call) {
  std::lock_guard<CallMutex> calling(call_mutex_);
  TIDE_RETURN_IF_ERROR(usable(call.stream));
  Result<Plan*> found = find_plan(call.plan, "gather");
  if (!found.is_ok()) return found.status();
  Plan& plan = *found.value();
  const GroupLayout& layout = *plan.layout;
  const std::string subject = "'" + plan.request.name + "'";
  if (!plan.request.serve_gather)
    return invalid("gather of " + subject + ", which was planned for reduce alone");
  if (static_cast<int>(call.shards.size()) != layout.size()) {
    return invalid("gather of " + subject + " wants " + std::to_string(layout.size()) +
                   " shards, got " + std::to_string(call.shards.size()));
  }

  // An exception may have left it unvacated; then its place in the ring counts from here.
  TIDE_RETURN_IF_ERROR(give_back(plan, call.stream));
  const bool needs_slot = layout.slot_bytes() > 0;
  int index = -1;
  if (needs_slot) {
    index = plan.own_slot >= 0 ? plan.own_slot : ring_.take();
    if (index < 0) {
      TIDE_RETURN_IF_ERROR(look_for_slots(call.plan));
      index = ring_.take();
    }
    if (index < 0) {
      return Status(ErrorKind::kUnsupported,
                    context_.where() + ": no slot is free for gather of " + subject + ": all " +
                        std::to_string(arena_.shared_slots) +
                        " hold other groups; raise the prefetch depth at planning");
    }
  }
  Result<uint64_t> sequence = next_sequence();
  if (!sequence.is_ok()) return sequence.status();

  GatherStarted started;
  Binding binding;
  binding.layout = plan.layout;
  binding.program = gather_program(layout, needs_slot && slots_[index].range.is_open_to_all());
  binding.shards = call.shards;
  advance(*binding.program, &binding);
  if (needs_slot) {
    binding.slot = slots_[index].range;
    binding.after = slots_[index].users;
    binding.vacated = slots_[index].vacated;
    for (int p = 0; p < layout.size(); ++p) {
      started.places.push_back(binding.slot.at(context_.rank()) + layout.slot_offset(p));
    }
  } else {
    started.places.assign(call.shards.size(), nullptr);
  }
  started.lease = std::make_shared<SlotLease>(binding.slot.memory);
  started.slot = index;
  plan.lease = started.lease;

  CallRecord record;
  record.sequence = sequence.value();
  record.kind = CallKind::kGather;
  record.plan = call.plan;
  record.slot = index;
  record.program_hash = binding.program->hash;
  record.tensors = static_cast<uint64_t>(layout.size());
  record.bytes = static_cast<uint64_t>(layout.shard_bytes());
  const auto operation = start(record, subject, std::move(binding), Lane::kGather, call.stream);
  if (needs_slot) {
    plan.slot = index;
    slots_[index].tenant = call.plan;
    use_slot(slots_[index], operation);
  }
  started.operation = operation;
  return started;
}

Status GroupImpl::check_sum(const std::vector<DType>& dtypes, DType output_dtype,
                            const AccumulateOptions& options) const {
  DType last = DType::kBytes;
  for (size_t i = 0; i < dtypes.size(); ++i) {
    if (i > 0 && dtypes[i] == last) continue;
    last = dtypes[i];
    if (context_.spans_nodes() && dtype_bytes(partial_dtype(last)) < 4) {
      return Status(ErrorKind::kUnsupported, context_.where() + ": tensor " + std::to_string(i) +
                                                 ": between nodes tide sums no " +
                                                 dtype_name(last));
    }
    AccumulateBlock nothing;
    nothing.slices.assign(static_cast<size_t>(context_.ranks()), nullptr);
    nothing.slice_dtype = dtypes[i];
    nothing.output_dtype = output_dtype;
    const Status status = context_.fabric().accumulate(kCallerQueue, &nothing, 1, options);
    if (!status.is_ok()) {
      return Status(status.kind(),
                    context_.where() + ": tensor " + std::to_string(i) + ": " + status.message());
    }
  }
  return Status::ok();
}

Status GroupImpl::check_reduce(const Plan& plan, const ReduceCall& call) const {
  const std::string head = "reduce of '" + plan.request.name + "': ";
  if (!plan.request.serve_reduce) return invalid(head + "it was planned for gather alone");
  const size_t count = call.parameters.size();
  if (call.gradient_dtypes.size() != count || call.gradients.size() != count ||
      call.outputs.size() != count) {
    return invalid(head + std::to_string(count) +
                   " parameters want as many dtypes, gradients and outputs, got " +
                   std::to_string(call.gradient_dtypes.size()) + ", " +
                   std::to_string(call.gradients.size()) + " and " +
                   std::to_string(call.outputs.size()));
  }
  for (size_t i = 0; i < count; ++i) {
    const int p = call.parameters[i];
    const int least = i == 0 ? 0 : call.parameters[i - 1] + 1;
    if (p < least || p >= plan.layout->size()) {
      return invalid(head + "parameter indices must ascend below " +
                     std::to_string(plan.layout->size()) + ", got " + std::to_string(p) + " at " +
                     std::to_string(i));
    }
  }
  return check_sum(call.gradient_dtypes, call.output_dtype, call.options);
}

GroupImpl::Slot* GroupImpl::vacated_slot(const Plan& plan) {
  const int index = plan.vacated_slot;
  if (plan.slot >= 0 || index < 0) return nullptr;
  const auto found = slots_.find(index);
  if (found == slots_.end() || found->second.is_retired) return nullptr;
  const auto tenant = plans_.find(found->second.tenant);
  if (tenant == plans_.end() || &tenant->second != &plan) return nullptr;
  if (found->second.is_shared && !ring_.contains(index)) return nullptr;
  return &found->second;
}

void GroupImpl::move_gradients(const ReduceCall& call, const Plan& plan, const Slot& slot,
                               Binding* binding) const {
  int64_t offset = 0;
  for (size_t i = 0; i < call.parameters.size(); ++i) {
    const int p = call.parameters[i];
    const int64_t bytes =
        plan.layout->parameter(p).unsharded_numel * dtype_bytes(call.gradient_dtypes[i]);
    char* place = slot.range.at(context_.rank()) + offset;
    if (bytes > 0) binding->moves.push_back({place, call.gradients[i], 1, bytes, bytes, bytes});
    binding->gradients[p] = place;
    offset += aligned_place_bytes(bytes);
  }
}

Result<std::shared_ptr<Operation>> GroupImpl::reduce(const ReduceCall& call) {
  std::lock_guard<CallMutex> calling(call_mutex_);
  TIDE_RETURN_IF_ERROR(usable(call.stream));
  Result<Plan*> found = find_plan(call.plan, "reduce");
  if (!found.is_ok()) return found.status();
  Plan& plan = *found.value();
  const GroupLayout& layout = *plan.layout;
  TIDE_RETURN_IF_ERROR(check_reduce(plan, call));

  // Everything that chooses the path is equal on all ranks: the call, the plan and the order of
  // slots.
  Slot* slot = vacated_slot(plan);
  const int64_t gradient_bytes = placed_gradient_bytes(layout, call);
  const bool moves = call.slot_reuse && slot != nullptr && gradient_bytes <= slot->range.bytes;
  ReduceOptions options;
  options.subset = call.parameters;
  options.dtypes = call.gradient_dtypes;
  const bool leased = !call.slot_reuse && plan.staging == Staging::kLeased && slot != nullptr &&
                      context_.ranks() > 1 &&
                      packed_shard_bytes(layout, options) * context_.ranks() <= slot->range.bytes;
  options.areas = leased ? 1 : 2;

  Binding binding;
  binding.layout = plan.layout;
  plan_sums(std::move(options), call.options.op, &binding);
  for (size_t i = 0; i < call.parameters.size(); ++i) {
    binding.descriptors.push_back(
        describe_tensor(layout, call.parameters[i], call.gradient_dtypes[i]));
  }
  CallRecord record;
  record.kind = CallKind::kReduce;
  record.plan = call.plan;
  record.slot = leased || moves ? plan.vacated_slot : -1;
  record.program_hash = binding.program->hash;
  record.layout_hash = hash_of_gradients(call);
  set_options(call.options, call.output_dtype, call.slot_reuse, &record);
  record.tensors = call.parameters.size();
  record.bytes = static_cast<uint64_t>(gradient_bytes);
  if (binding.program->areas > 0 && !leased) {
    TIDE_RETURN_IF_ERROR(ensure_area(record, binding, &staging_, staging_area_bytes()));
  }
  Result<uint64_t> sequence = next_sequence();
  if (!sequence.is_ok()) return sequence.status();
  record.sequence = sequence.value();
  advance(*binding.program, &binding);
  binding.staging = leased ? slot->range : staging_;
  bind_gradients(call, &binding);
  if (moves) move_gradients(call, plan, *slot, &binding);
  if (leased || moves) {
    binding.after = slot->users;
    binding.vacated = slot->vacated;
  }
  auto operation =
      start(record, "'" + plan.request.name + "'", std::move(binding), Lane::kReduce, call.stream);
  if (leased || moves) {
    use_slot(*slot, operation);
    if (slot->is_shared) ring_.touch(plan.vacated_slot);
  }
  return std::shared_ptr<Operation>(std::move(operation));
}

Status GroupImpl::check_list(const char* call, const GroupLayout& layout, size_t inputs,
                             size_t outputs) const {
  const auto wanted = static_cast<size_t>(layout.size());
  if (layout.ranks() != context_.ranks()) {
    return invalid(std::string(call) + " with a layout for " + std::to_string(layout.ranks()) +
                   " ranks in a group of " + std::to_string(context_.ranks()));
  }
  if (inputs != wanted || outputs != wanted) {
    return invalid(std::string(call) + " wants " + std::to_string(wanted) +
                   " inputs and outputs, got " + std::to_string(inputs) + " and " +
                   std::to_string(outputs));
  }
  return Status::ok();
}

// Where the outputs lie in allocations, when all of them do.
void GroupImpl::post_outputs(Binding* binding) {
  const GroupLayout& layout = *binding->layout;
  if (!enqueuing_ && layout.size() > kTableTensors) return;  // peers read them in the table
  std::vector<Posting> postings(static_cast<size_t>(layout.size()));
  for (int p = 0; p < layout.size(); ++p) {
    const int64_t bytes =
        layout.parameter(p).unsharded_numel * dtype_bytes(layout.parameter(p).dtype);
    if (bytes == 0) continue;
    std::shared_ptr<void> hold;
    if (!context_.allocations->find(binding->outputs[p], bytes, &postings[p], &hold)) return;
    if (binding->holds.empty() || binding->holds.back() != hold)
      binding->holds.push_back(std::move(hold));
  }
  binding->postings = std::move(postings);
}

Result<std::shared_ptr<Operation>> GroupImpl::gather_list(std::shared_ptr<const GroupLayout> layout,
                                                          const std::vector<const void*>& inputs,
                                                          const std::vector<void*>& outputs,
                                                          void* stream) {
  std::lock_guard<CallMutex> calling(call_mutex_);
  TIDE_RETURN_IF_ERROR(usable(stream));
  TIDE_RETURN_IF_ERROR(check_list("gather_list", *layout, inputs.size(), outputs.size()));
  for (const Parameter& parameter : layout->parameters()) {
    if (parameter.dtype == parameter.shard_dtype) continue;
    return invalid("gather_list: '" + parameter.name + "' wants one dtype, got inputs of " +
                   dtype_name(parameter.shard_dtype) + " and outputs of " +
                   dtype_name(parameter.dtype));
  }
  context_.allocations->sweep();
  Binding binding;
  binding.layout = layout;
  binding.shards = inputs;
  binding.outputs = outputs;
  if (context_.spans_nodes()) {
    // A slot that comes with this call is open to all from the next one on.
    const bool has_slot = list_slot_.bytes >= align_slot(layout->slot_bytes());
    binding.program = gather_program(*layout, has_slot && list_slot_.is_open_to_all());
  } else {
    GatherOptions options;
    options.destination = Space::kOutput;
    options.landing_slice_bytes = options_.landing_slice_bytes;
    binding.program = programs_.gather(*layout, options);
    options.bounced = true;
    if (!enqueuing_) binding.bounced = programs_.gather(*layout, options);
  }
  for (int p = 0; p < layout->size(); ++p) {
    binding.descriptors.push_back(describe_tensor(*layout, p, layout->parameter(p).dtype));
  }
  CallRecord record;
  record.kind = CallKind::kGatherList;
  record.program_hash = binding.program->hash;
  record.layout_hash = layout->hash();
  record.tensors = static_cast<uint64_t>(layout->size());
  record.bytes = static_cast<uint64_t>(layout->shard_bytes());
  if (binding.bounced && binding.bounced->areas > 0) {
    TIDE_RETURN_IF_ERROR(ensure_area(record, binding, &landing_, landing_area_bytes()));
  }
  binding.landing = landing_;
  if (context_.spans_nodes()) {
    TIDE_RETURN_IF_ERROR(bind_list_between_nodes(record, &binding));
  } else {
    post_outputs(&binding);
  }
  if (enqueuing_) {
    if (binding.postings.empty() && layout->ranks() > 1) {
      return Status(
          ErrorKind::kUnsupported,
          context_.where() +
              ": outputs wanted in memory that peers can write: from tide.empty, or given "
              "to tide.register with their inputs");
    }
    record.layout_hash = hash_of_postings(record.layout_hash, binding.postings);
  }
  Result<uint64_t> sequence = next_sequence();
  if (!sequence.is_ok()) return sequence.status();
  record.sequence = sequence.value();
  advance(*binding.program, &binding);
  auto operation = start(record, list_subject(*layout), std::move(binding), Lane::kGather, stream);
  if (context_.spans_nodes()) list_user_ = operation;
  return std::shared_ptr<Operation>(std::move(operation));
}

Result<std::shared_ptr<Operation>> GroupImpl::reduce_list(std::shared_ptr<const GroupLayout> layout,
                                                          const std::vector<const void*>& inputs,
                                                          const std::vector<void*>& outputs,
                                                          DType output_dtype,
                                                          const AccumulateOptions& accumulate,
                                                          void* stream) {
  std::lock_guard<CallMutex> calling(call_mutex_);
  TIDE_RETURN_IF_ERROR(usable(stream));
  TIDE_RETURN_IF_ERROR(check_list("reduce_list", *layout, inputs.size(), outputs.size()));
  Binding binding;
  binding.layout = layout;
  ReduceOptions options;
  for (int p = 0; p < layout->size(); ++p) {
    options.subset.push_back(p);
    options.dtypes.push_back(layout->parameter(p).dtype);
    binding.descriptors.push_back(describe_tensor(*layout, p, layout->parameter(p).dtype));
  }
  TIDE_RETURN_IF_ERROR(check_sum(options.dtypes, output_dtype, accumulate));
  binding.gradient_dtypes = options.dtypes;
  plan_sums(std::move(options), accumulate.op, &binding);
  CallRecord record;
  record.kind = CallKind::kReduceList;
  record.program_hash = binding.program->hash;
  record.layout_hash = layout->hash();
  set_options(accumulate, output_dtype, false, &record);
  record.tensors = static_cast<uint64_t>(layout->size());
  record.bytes = static_cast<uint64_t>(layout->shard_bytes());
  if (binding.program->areas > 0) {
    TIDE_RETURN_IF_ERROR(ensure_area(record, binding, &staging_, staging_area_bytes()));
  }
  Result<uint64_t> sequence = next_sequence();
  if (!sequence.is_ok()) return sequence.status();
  record.sequence = sequence.value();
  advance(*binding.program, &binding);
  binding.staging = staging_;
  binding.gradients = inputs;
  binding.outputs = outputs;
  binding.output_dtype = output_dtype;
  binding.options = accumulate;
  return std::shared_ptr<Operation>(
      start(record, list_subject(*layout), std::move(binding), Lane::kReduce, stream));
}

}  // namespace tide
