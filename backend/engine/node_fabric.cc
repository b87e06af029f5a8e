#include "backend/engine/node_fabric.h"

#include <utility>
#include <vector>

namespace tide {
namespace {

class NodeWindow final : public Window {
 public:
  NodeWindow(std::shared_ptr<Window> window, std::vector<void*> peers)
      : window_(std::move(window)), peers_(std::move(peers)) {}

  int64_t bytes() const override { return window_->bytes(); }
  void* own() const override { return window_->own(); }
  void* peer(int rank) const override { return peers_[static_cast<size_t>(rank)]; }
  void* all() const override { return window_->all(); }
  Window& of_node() const { return *window_; }

 private:
  const std::shared_ptr<Window> window_;
  const std::vector<void*> peers_;  // by group rank
};

}  // namespace

Result<std::shared_ptr<Window>> NodeFabric::create_window(int64_t bytes, Deadline deadline) {
  Result<std::shared_ptr<Window>> window = fabric_->create_window(bytes, deadline);
  if (!window.is_ok()) {
    return Status(window.status().kind(), "node " + std::to_string(topology_.node(rank_)) + ", " +
                                              window.status().message());
  }
  std::vector<void*> peers(static_cast<size_t>(topology_.ranks()), nullptr);
  for (const int rank : topology_.members(topology_.node(rank_)))
    peers[static_cast<size_t>(rank)] = window.value()->peer(topology_.local(rank));
  return std::shared_ptr<Window>(std::make_shared<NodeWindow>(window.value(), std::move(peers)));
}

Status NodeFabric::open_to_all(Window& window, Deadline deadline) {
  return fabric_->open_to_all(static_cast<NodeWindow&>(window).of_node(), deadline);
}

Status NodeFabric::peer_status(int rank) const {
  return is_here(rank) ? fabric_->peer_status(topology_.local(rank)) : Status::ok();
}

void NodeFabric::on_peer_failure(std::function<void(int rank, const Status& reason)> listener) {
  if (!listener) return fabric_->on_peer_failure(nullptr);
  fabric_->on_peer_failure([this, listener = std::move(listener)](int local, const Status& reason) {
    listener(topology_.rank(topology_.node(rank_), local), reason);
  });
}

}  // namespace tide
