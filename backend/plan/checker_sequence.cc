#include "backend/plan/checker_sequence.h"

#include <algorithm>

namespace tide {

int SequenceBuilder::add_group(std::vector<int> members) {
  sequence_.groups.push_back(std::move(members));
  return static_cast<int>(sequence_.groups.size()) - 1;
}

int SequenceBuilder::add(int group, std::shared_ptr<const GroupLayout> layout, int shards,
                         const std::function<Program(int rank)>& plan) {
  CheckedOperation& added = sequence_.operations.emplace_back();
  added.group = group;
  added.shards = shards;
  added.outputs = shards;
  for (int rank = 0; rank < layout->ranks(); ++rank) {
    added.programs.push_back(std::make_shared<const Program>(plan(rank)));
  }
  added.layout = std::move(layout);
  return static_cast<int>(sequence_.operations.size()) - 1;
}

int SequenceBuilder::gather(int group, std::shared_ptr<const GroupLayout> layout,
                            const GatherOptions& options, int shards) {
  return add(group, layout, shards, [&](int rank) { return plan_gather(*layout, rank, options); });
}

int SequenceBuilder::gather(int group, std::shared_ptr<const GroupLayout> layout,
                            const Topology& topology, const NodeGatherOptions& options,
                            int shards) {
  return add(group, layout, shards,
             [&](int rank) { return plan_node_gather(*layout, topology, rank, options); });
}

int SequenceBuilder::reduce(int group, std::shared_ptr<const GroupLayout> layout,
                            const ReduceOptions& options) {
  const int index =
      add(group, layout, 0, [&](int rank) { return plan_reduce(*layout, rank, options); });
  operation(index).subset = options.subset;
  operation(index).gradient_dtypes = options.dtypes;
  return index;
}

int SequenceBuilder::reduce(int group, std::shared_ptr<const GroupLayout> layout,
                            const Topology& topology, const NodeReduceOptions& options) {
  const int index = add(group, layout, 0, [&](int rank) {
    return plan_node_reduce(*layout, topology, rank, options);
  });
  operation(index).subset = options.subset;
  operation(index).gradient_dtypes = options.dtypes;
  return index;
}

int slots_for(const TrainingOptions& options) {
  return options.prefetch + 1 + (options.leased ? 1 : 0) + (options.keep_last ? 1 : 0);
}

Training::Training(SequenceBuilder* builder,
                   std::vector<std::shared_ptr<const GroupLayout>> layouts,
                   const TrainingOptions& options)
    : builder_(builder),
      layouts_(std::move(layouts)),
      options_(options),
      ring_(options.ring ? options.ring : std::make_shared<CheckedSlots>(slots_for(options))),
      held_(layouts_.size()),
      last_gather_(layouts_.size(), -1),
      readers_(static_cast<size_t>(options.gradient_memories), -1) {}

void Training::ensure_gathered(int layer) {
  if (layer < 0 || layer >= layers() || held_[layer].gather >= 0) return;
  Held& held = held_[layer];
  held.gather =
      builder_->gather(options_.group, layouts_[layer], {}, options_.first_shards + layer);
  held.slot = ring_->take();
  builder_->operation(held.gather).slot = held.slot.index;
  builder_->operation(held.gather).after = held.slot.after;
  held.slot.after.clear();
  last_gather_[layer] = held.gather;
  builder_->act(Action::kIssue, held.gather);
}

void Training::forward(int layer) {
  for (int ahead = 0; ahead <= options_.prefetch; ++ahead) ensure_gathered(layer + ahead);
  builder_->act(Action::kWait, held_[layer].gather);
  builder_->act(Action::kUseGathered, held_[layer].gather);
  if (options_.keep_last && layer == layers() - 1) return;
  ring_->vacate(held_[layer].slot);
  held_[layer] = {};
}

void Training::backward(int layer) {
  for (int ahead = 0; ahead <= options_.prefetch; ++ahead) ensure_gathered(layer - ahead);
  builder_->act(Action::kWait, held_[layer].gather);
  builder_->act(Action::kUseGathered, held_[layer].gather);
  reduce(layer);
}

void Training::reduce(int layer) {
  ReduceOptions plan;
  plan.areas = options_.leased ? 1 : 2;
  plan.staging_slice_bytes = options_.staging_slice_bytes;
  for (int p = 0; p < layouts_[layer]->size(); ++p) {
    plan.subset.push_back(p);
    plan.dtypes.push_back(layouts_[layer]->parameter(p).dtype);
  }
  const int index = builder_->reduce(options_.group, layouts_[layer], plan);
  CheckedOperation& added = builder_->operation(index);
  const size_t memory = static_cast<size_t>(layer) % readers_.size();
  added.gradients = options_.first_gradients + static_cast<int>(memory);
  added.outputs = 1000 + options_.first_shards + layer;

  CheckedSlots::Slot slot = held_[layer].slot;
  held_[layer] = {};
  if (options_.leased) {
    added.slot = slot.index;
    slot.after = {{index, Dependency::Until::kSummed}};
  } else if (options_.slot_reuse) {
    added.gradient_slot = slot.index;
    slot.after = {{index, Dependency::Until::kRead}};
  }
  ring_->vacate(slot);

  // With Slot-Reuse the gradients' memory is free once they were moved.
  if (readers_[memory] >= 0) builder_->act(Action::kWaitRead, readers_[memory]);
  builder_->act(Action::kWriteGradients, index);
  if (options_.slot_reuse) builder_->act(Action::kMoveGradients, index);
  readers_[memory] = options_.slot_reuse ? -1 : index;
  builder_->act(Action::kIssue, index);
  reduces_.push_back(index);
}

void Training::update() {
  for (int index : reduces_) {
    builder_->act(Action::kWait, index);
    builder_->act(Action::kReadSummed, index);
  }
  reduces_.clear();
  for (int gather : last_gather_) {
    builder_->act(Action::kWaitRead, gather);
    builder_->act(Action::kUpdateShards, gather);
  }
}

}  // namespace tide
