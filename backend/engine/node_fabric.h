// The fabric of one node of a group of several, in the group's rank numbers: what stands above it
// counts ranks of the whole group everywhere. Ranks of other nodes have no part in its windows
// (peer() is null) and no status here; nobody copies or signals to them.
//
// Owns the node's fabric, which must be blocking and whose ranks are the node's local indices.
#pragma once

#include <functional>
#include <memory>

#include "backend/plan/topology.h"
#include "transports/fabric.h"

namespace tide {

class NodeFabric final : public Fabric {
 public:
  // fabric->rank() == topology.local(rank), fabric->size() == topology.local_ranks().
  NodeFabric(std::unique_ptr<Fabric> fabric, const Topology& topology, int rank)
      : fabric_(std::move(fabric)), topology_(topology), rank_(rank) {}

  const Capabilities& capabilities() const override { return fabric_->capabilities(); }
  int rank() const override { return rank_; }
  int size() const override { return topology_.ranks(); }

  // Collective over the node alone.
  Result<std::shared_ptr<Window>> create_window(int64_t bytes, Deadline deadline) override;

  Status open_to_all(Window& window, Deadline deadline) override;
  Status copy(int queue, const CopyBlock* blocks, int count) override {
    return fabric_->copy(queue, blocks, count);
  }
  Status cast(int queue, const CastBlock* blocks, int count) override {
    return fabric_->cast(queue, blocks, count);
  }
  Status accumulate(int queue, const AccumulateBlock* blocks, int count,
                    const AccumulateOptions& options) override {
    return fabric_->accumulate(queue, blocks, count, options);
  }
  Status read_add(int queue, const ReadAddBlock* blocks, int count,
                  const AccumulateOptions& options) override {
    return fabric_->read_add(queue, blocks, count, options);
  }
  Status signal(int queue, uint32_t* word, uint32_t value) override {
    return fabric_->signal(queue, word, value);
  }
  Status wait(int queue, const uint32_t* word, uint32_t value, const WaitGuard& guard) override {
    return fabric_->wait(queue, word, value, guard);
  }

  Status peer_status(int rank) const override;
  void on_peer_failure(std::function<void(int rank, const Status& reason)> listener) override;
  void wake_all() override { fabric_->wake_all(); }
  void fail(const Status& reason) override { fabric_->fail(reason); }
  void close() override { fabric_->close(); }

 private:
  bool is_here(int rank) const { return topology_.node(rank) == topology_.node(rank_); }

  const std::unique_ptr<Fabric> fabric_;
  const Topology topology_;
  const int rank_;
};

}  // namespace tide
