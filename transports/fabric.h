// The seam inside a node: memory that local ranks may write, and the five things an engine does
// with it. Four words carry the contract: copies are ordered on their queue; a signal becomes
// visible to its peer after every earlier copy of that queue to that peer; a wait blocks the queue;
// an accumulate is ordered like a copy.
//
// Two kinds of fabric, told apart by Capabilities::blocking:
//
//   blocking (host, memory)
//     a call returns when it is done; the engine runs each queue on a thread of its own
//   enqueuing (cuda)
//     a call returns when it is enqueued on the queue's stream; the calling thread issues all steps
//
// Ranks here are group ranks 0..size-1 of one node's group. All methods but close() may be called
// from several threads, each queue from one thread at a time. After an error of any call the group
// is broken, a refused window aside: the engine calls fail() and close(). Windows outlive the
// fabric: their pages stay mapped while a shared_ptr to them lives.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/base/dtype.h"
#include "backend/base/status.h"

namespace tide {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// The c10d store as tide sees it: how ranks find each other before a fabric exists. Keys are
// private to one group.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  virtual Status set(const std::string& key, const std::string& value) = 0;
  // Waits for the key until the deadline; kTimeout then.
  virtual Result<std::string> get(const std::string& key, Deadline deadline) = 0;
  // Nobody reads the key any more. A store that cannot remove keys keeps it.
  virtual void remove(const std::string& key) { (void)key; }
};

struct Capabilities {
  bool blocking = true;  // see above
  std::string kind;      // "host", "memory", "cuda"
  // Windows may be opened to all; equal on all ranks. The reason where they may not; whether it may
  // be otherwise on another node.
  bool multicast = false;
  std::string no_multicast = "this fabric has no multicast";
  bool differs_by_node = false;
};

// Memory of this rank that its peers can write, and theirs. Every rank's part has the same size.
class Window {
 public:
  virtual ~Window() = default;
  virtual int64_t bytes() const = 0;
  virtual void* own() const = 0;           // zeroed at creation, 4096-byte aligned (cuda: 2 MiB)
  virtual void* peer(int rank) const = 0;  // mapped here; peer(own rank) == own()
  // After Fabric::open_to_all: stands for the same offset of every rank's part at once, the own one
  // too. Only copy() writes there and only read_add() reads. Null before.
  virtual void* all() const { return nullptr; }
};

// Rectangle of bytes; pitches are ignored when rows == 1. Source and destination never overlap.
struct CopyBlock {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t rows = 0;
  int64_t row_bytes = 0;
  int64_t to_pitch = 0;
  int64_t from_pitch = 0;
};

// For i < numel, in this order, in fp32 (fp64 in fp64, integers exactly: kernels/accumulate.h):
//   output[i] = round(scale * (slices[0][i] + slices[1][i] + ...))
//   output[i] = round(output[i] + scale * (slices[0][i] + ...))       with add_to_output
struct AccumulateBlock {
  std::vector<const void*> slices;  // in rank order
  void* output = nullptr;
  int64_t numel = 0;      // elements to sum
  int64_t pad_numel = 0;  // elements after them to zero in the output (write mode)
  DType slice_dtype = DType::kFloat32;
  DType output_dtype = DType::kFloat32;
};
enum class ReduceOp : uint8_t { kSum, kMin, kMax };
struct AccumulateOptions {
  ReduceOp op = ReduceOp::kSum;
  double scale = 1.0;          // applied after the sum, in the accumulation type; sums only
  bool add_to_output = false;  // add to what the output holds instead of writing it
};

struct CastBlock {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t numel = 0;
  DType to_dtype = DType::kBFloat16;
  DType from_dtype = DType::kFloat32;
};

// For i < numel, over from[i] of every rank, fp32 at a multiple of 16 bytes behind Window::all():
//   output[i] = round(scale * (sum over the ranks))
//   output[i] = round(output[i] + scale * (sum over the ranks))       with add_to_output
// The order of the sum is not fixed: not bit-reproducible.
struct ReadAddBlock {
  void* output = nullptr;
  const void* from = nullptr;
  int64_t numel = 0;
  DType output_dtype = DType::kFloat32;
};

// What ends a wait that is not satisfied: a deadline that runs from the moment the wait began, the
// group's failure flag, or `check` (called about every 100 ms and at wake-ups; a status that is not
// OK ends the wait with it).
struct WaitGuard {
  std::chrono::milliseconds timeout{0};
  const std::atomic<bool>* failed = nullptr;
  std::function<Status()> check;
  // "gather 17 of group 'layers.3': arrival from rank 2"; empty where the caller explains a wait's
  // status itself.
  std::string what;
};

class Fabric {
 public:
  virtual ~Fabric() = default;

  virtual const Capabilities& capabilities() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Collective: every rank calls it in the same order with the same bytes. A refusal on any rank
  // (no memory, no descriptors) is an error on all of them with that rank's reason, and leaves
  // nothing behind; the fabric stays usable.
  virtual Result<std::shared_ptr<Window>> create_window(int64_t bytes, Deadline deadline) = 0;

  // Collective, where Capabilities::multicast: gives the window its all(). Any rank's refusal is
  // kUnsupported on all of them with that rank's reason, and leaves the window as it was.
  virtual Status open_to_all(Window& window, Deadline deadline);

  // A copy to an address of Window::all() is one to every rank, for signals too.
  virtual Status copy(int queue, const CopyBlock* blocks, int count) = 0;
  virtual Status cast(int queue, const CastBlock* blocks, int count) = 0;
  virtual Status accumulate(int queue, const AccumulateBlock* blocks, int count,
                            const AccumulateOptions& options) = 0;
  // Sums only. Ordered like a copy.
  virtual Status read_add(int queue, const ReadAddBlock* blocks, int count,
                          const AccumulateOptions& options);

  // Stores value into *word, a 4-byte aligned word inside a window of a peer (or the own window),
  // and wakes a waiter there.
  virtual Status signal(int queue, uint32_t* word, uint32_t value) = 0;
  // Until *word, in the own window, has cyclically reached value: int32_t(*word - value) >= 0.
  virtual Status wait(int queue, const uint32_t* word, uint32_t value, const WaitGuard& guard) = 0;

  // OK while the peer may still signal; kPeerLost with the reason once it died, sent fail() or said
  // goodbye. A goodbye is no failure (the peer has finished its work), so no listener hears of it:
  // a guard's `check` asks here for the peer it waits for. Every change ends the slice of all
  // waits, so `check` is called soon. After a check that fails, the word is looked at once more, so
  // that a peer's last signal before its goodbye counts.
  virtual Status peer_status(int rank) const = 0;
  // Called at most once per peer, from a thread of the fabric, when a peer died, closed without a
  // goodbye or sent fail(). Set before the first create_window; must not call back into the fabric
  // except wake_all() and peer_status().
  virtual void on_peer_failure(std::function<void(int rank, const Status& reason)> listener) = 0;
  // Ends this rank's waits soon (they look at their guard's flag), e.g. after the flag was set.
  virtual void wake_all() = 0;
  // Tells the peers that this rank's group failed, and why.
  virtual void fail(const Status& reason) = 0;
  // Says goodbye (peers that still wait for this rank learn it from peer_status), closes sockets,
  // joins threads. No call is in flight. Idempotent. Mapped windows stay.
  virtual void close() = 0;
};

inline Status Fabric::open_to_all(Window&, Deadline) {
  return {ErrorKind::kUnsupported, capabilities().no_multicast};
}

inline Status Fabric::read_add(int, const ReadAddBlock*, int, const AccumulateOptions&) {
  return {ErrorKind::kInternal, "a read-add on a fabric without multicast"};
}

}  // namespace tide
