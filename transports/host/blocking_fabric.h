// What the fabrics of processor memory share: copies and sums by the kernels on the calling thread,
// signals and waits by doorbells, and the record of peers that left or were lost. A subclass brings
// windows and the news about peers.
//
// Threads: as fabric.h says. A subclass has one service thread; it alone calls the failure
// listener. Teardown: the subclass's close() ends the service thread first; the doorbell window
// goes with the fabric.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transports/fabric.h"
#include "transports/host/doorbell.h"
#include "transports/host/rank_names.h"
#include "transports/host/window_map.h"

namespace tide {

class BlockingFabric : public Fabric {
 public:
  const Capabilities& capabilities() const override { return capabilities_; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Status copy(int queue, const CopyBlock* blocks, int count) override;
  Status cast(int queue, const CastBlock* blocks, int count) override;
  Status accumulate(int queue, const AccumulateBlock* blocks, int count,
                    const AccumulateOptions& options) override;
  Status signal(int queue, uint32_t* word, uint32_t value) override;
  Status wait(int queue, const uint32_t* word, uint32_t value, const WaitGuard& guard) override;

  Status peer_status(int rank) const override;
  void on_peer_failure(std::function<void(int rank, const Status& reason)> listener) override;
  void wake_all() override;

 protected:
  // `label` begins this rank's messages: "rank 1 of group 'default'".
  BlockingFabric(int rank, int size, Capabilities capabilities, std::string label,
                 RankNames names = RankNames());

  // OK when calls may go on: not closed, not in a forked child.
  virtual Status usable() const = 0;
  // Makes the service thread call deliver_losses() soon. Any thread.
  virtual void poke_service() = 0;

  // One page per rank; before any signal or wait. The window holds them mapped.
  void set_doorbells(std::shared_ptr<Window> window);
  const std::string& label() const { return label_; }
  std::string name_of(int rank) const { return names_.of(rank); }
  const std::shared_ptr<WindowMap>& window_map() const { return window_map_; }

  // News about a peer, any thread; the first news about a peer counts. Both end the slices of this
  // rank's waits.
  void mark_left(int rank);
  void mark_lost(int rank, const Status& reason);
  // Calls the listener for losses it has not heard of. Service thread only.
  void deliver_losses();
  // The first peer that left or was lost, as an error; OK when all are there.
  Status first_missing_peer() const;

 private:
  struct Peer {
    Status status;           // what peer_status says
    bool to_report = false;  // lost, and the listener has not heard of it
  };

  DoorbellPage& doorbells_of(int rank) const;

  const int rank_;
  const int size_;
  const Capabilities capabilities_;
  const std::string label_;
  const RankNames names_;
  const std::shared_ptr<WindowMap> window_map_;
  std::shared_ptr<Window> doorbells_;
  std::atomic<DoorbellPage*> own_doorbells_{nullptr};  // news may come before the window

  mutable std::mutex mutex_;  // peers_, listener_
  std::vector<Peer> peers_;
  std::function<void(int, const Status&)> listener_;
};

}  // namespace tide
