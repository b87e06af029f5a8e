// Which bytes go next on a rail: all groups' puts of one process, cut into chunks under one window
// of outstanding bytes. Pure bookkeeping, used by the progress thread alone.
//
// A flow is one group's way to one node. Transfers of a flow go one after the other, flows take
// turns chunk by chunk, and no flow holds more than its share of the window: so neither of two
// operations starves, and a stuck peer cannot take the whole window. The window is what keeps "the
// head is there" from waiting for the tail: what is not posted cannot delay.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "transports/network.h"

namespace tide {

struct Transfer {
  Put put;
  uint64_t hash = 0;
  int64_t total_bytes = 0;
  int64_t posted_bytes = 0;
  bool failed = false;  // a chunk did: nothing may be told of it any more
  size_t segment = 0;   // where posting stands
  int64_t segment_offset = 0;
};

struct Chunk {
  std::shared_ptr<Transfer> transfer;
  const void* from = nullptr;
  int64_t to_offset = 0;
  int64_t bytes = 0;
  bool ends_head = false;  // the head's last byte is in it
  bool ends_all = false;
};

class TransferQueue {
 public:
  TransferQueue(int64_t window_bytes, int64_t chunk_bytes)
      : window_(window_bytes), chunk_(chunk_bytes) {}

  // Of at least one byte.
  void add(int flow, std::shared_ptr<Transfer> transfer);
  // The next chunk to post now; false if the window is full or nothing waits. Counts as outstanding
  // until landed().
  bool next(int* flow, Chunk* chunk);
  void landed(int flow, int64_t bytes);
  // Forgets what waits in a flow; what was posted still has to land.
  void drop(int flow);

  bool waits() const { return !turns_.empty(); }
  int64_t outstanding_bytes() const { return outstanding_; }

 private:
  struct Flow {
    std::deque<std::shared_ptr<Transfer>> transfers;
    int64_t outstanding = 0;
  };
  int64_t share() const;

  const int64_t window_;
  const int64_t chunk_;
  int64_t outstanding_ = 0;
  std::map<int, Flow> flows_;
  std::deque<int> turns_;  // flows with waiting transfers, the next one first
};

}  // namespace tide
