// One queue of the CUDA fabric: a non-blocking stream, and how copies, signals and waits are put on
// it.
//
//   copies     rows that lie together go in batches of at most kBatchPieces; after kBulkBytes a
//   wait that is already
//              satisfied lets other streams' copies in (without it they stand behind all of this
//              stream's)
//   signals    behind copies to that peer: the value is written to a word of this queue, and a
//   4-byte copy of it follows
//              the data on the same engine. Without copies before it: a one-word memset, which no
//              bulk holds up. To an own word: a stream write.
//   waits      stream write of "reached", wait on own memory, stream write of "passed", in one call
//
// Nothing here synchronises host and device. One thread at a time.
#pragma once

#include <string>
#include <vector>

#include "transports/cuda/device_context.h"
#include "transports/fabric.h"

namespace tide::cuda {

inline constexpr size_t kBatchPieces = 128;
inline constexpr int64_t kBulkBytes = int64_t{64} << 20;

// Words that a queue owns.
struct QueueWords {
  DevicePointer progress = 0;  // host memory, as the device sees it: where the queue stands
  DevicePointer value = 0;     // device memory: what the next signal's copy reads
  DevicePointer zero = 0;      // device memory that always holds 0
};

class DeviceQueue {
 public:
  DeviceQueue(std::shared_ptr<DeviceContext> device, int ranks)
      : device_(std::move(device)), dirty_(static_cast<size_t>(ranks)) {}
  ~DeviceQueue();
  DeviceQueue(const DeviceQueue&) = delete;
  DeviceQueue& operator=(const DeviceQueue&) = delete;

  Status open(int priority, const QueueWords& words);
  Stream stream() const { return stream_; }

  // One block into the memory of `peer` (or any rank's: driver copies all the same).
  Status copy(const CopyBlock& block, int peer);
  // Work of the caller's on stream() has written there: as after copy().
  void wrote_to(int peer) { dirty_[static_cast<size_t>(peer)] = 1; }
  // Sends what copy() has gathered. Every other call does so first.
  Status flush();
  Status signal_peer(int peer, DevicePointer word, uint32_t value);
  Status signal_own(DevicePointer word, uint32_t value);
  // `step` as WaitWatch numbers it. word 0: no wait, "passed" alone.
  Status wait(uint32_t step, DevicePointer word, uint32_t value);

  uint64_t driver_calls() const { return driver_calls_; }

 private:
  Status piece(DevicePointer to, DevicePointer from, int64_t bytes);
  Status rectangle(const CopyBlock& block);
  Status make_room(int64_t bytes);
  Status done(Code code, const char* call, const char* what);

  const std::shared_ptr<DeviceContext> device_;
  Stream stream_ = nullptr;
  QueueWords words_;
  std::vector<char> dirty_;        // by rank: copies went to it since its last signal
  std::vector<DevicePointer> to_;  // gathered pieces
  std::vector<DevicePointer> from_;
  std::vector<size_t> sizes_;
  int64_t bulk_bytes_ = 0;  // since the last satisfied wait, gathered ones included
  uint32_t value_ = 0;      // what words_.value holds when the stream gets there
  uint64_t driver_calls_ = 0;
};

}  // namespace tide::cuda
