// The engine's threads' side of a group on a rail: the board answers, the link acts, commands lie
// between them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transports/ucx/hello.h"
#include "transports/ucx/link.h"

namespace tide {

// What the self test of a group that comes up writes from and into.
struct SelfTestMemory {
  std::vector<unsigned char> written;  // by the peers
  std::vector<unsigned char> source;
};

class UcxNetwork : public Network {
 public:
  UcxNetwork(std::shared_ptr<UcxRail> rail, const UcxGroupOptions& options);
  ~UcxNetwork() override;

  // Hello, judgement, connections, and one checked put to and from every peer. Once, before any
  // other call.
  Status come_up(Deadline deadline);

  const NetworkCapabilities& capabilities() const override { return capabilities_; }
  int node() const override { return options_.node; }
  int nodes() const override { return options_.nodes; }
  Status add_region(int id, const MemoryBlock& block, Deadline deadline) override;
  Status remove_region(int id, Deadline deadline) override;
  Status add_source(const MemoryBlock& block) override;
  void remove_source(const void* base) override;
  Status begin(uint64_t operation, uint64_t hash, const std::string& what) override;
  Status put(const Put& put) override;
  Status signal(int node, const Event& event, int64_t amount) override;
  int64_t count(int node, const Event& event) const override { return board_->count(node, event); }
  Status wait(int node, const Event& event, int64_t amount, const WaitGuard& guard) override {
    return board_->wait(node, event, amount, guard);
  }
  Status drain(uint64_t operation, const WaitGuard& guard) override {
    return board_->drain(operation, guard);
  }
  void end(uint64_t operation) override { board_->end(operation); }
  Status quiesce(Deadline deadline) override;
  Status error() const override { return board_->error(); }
  Status peer_status(int node) const override { return board_->peer_status(node); }
  void on_failure(std::function<void(int, const Status&)> listener) override;
  void wake_all() override { board_->wake_all(); }
  void fail(const Status& reason) override { break_off(reason, false); }
  Status close(Deadline deadline) override;
  // Messages dropped because they were not of this group.
  uint64_t foreign_messages() const { return link_->foreign_messages(); }

 private:
  Status make_link();
  Status exchange_hellos(Deadline deadline, std::vector<Hello>* hellos);
  Status self_test(Deadline deadline);
  Status check_lanes();
  Status usable() const;
  void break_off(const Status& reason, bool tell_listener);
  std::string key(const std::string& what, int node) const {
    return what + "/" + std::to_string(node);
  }
  int64_t region_bytes(int id) const;

  const std::shared_ptr<UcxRail> rail_;
  const UcxGroupOptions options_;
  const std::shared_ptr<EventBoard> board_;
  std::shared_ptr<UcxLink> link_;
  NetworkCapabilities capabilities_;
  // The link's from then on: a first put that this node gives up may still be under way.
  std::shared_ptr<SelfTestMemory> test_;
  mutable std::mutex mutex_;
  std::map<int, int64_t> region_bytes_;
  int64_t next_vote_ = 0;
  int64_t barriers_ = 0;
  bool closed_ = false;
  Status closing_;
};

}  // namespace tide
