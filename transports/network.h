// The seam between nodes: puts into registered memory of other nodes, and counted events that say
// what arrived. A Network is one group's view of this process's rail: the peers are the ranks with
// the same local index, named by their node.
//
// Its user is a rail queue: it begins an operation, posts puts and signals, waits for events,
// drains, ends. Calls that post return at once, waits block the calling thread only; all may come
// from several threads. Events are counters, not a sequence: messages of different events may
// overtake each other, and a wait asks for an amount, never for an order.
//
// What a put promises. An event of a put is counted at the receiver after the bytes it tells of lie
// in the receiver's memory: whoever saw the count (by wait or count) reads these bytes. The source
// may be overwritten, and for the sender the put is over, when drain() of its operation has
// returned.
//
// The first error is sticky: it breaks the Network for good, every later call and every wait in
// progress returns it, and the peers are told over the wire. Telling them through the store as
// well, and looking there, is the engine's: the store is used only inside the collective calls
// below and by whoever made the Network. After an error: fail() (if the error is the engine's own),
// then close(), whose answer says whether the regions may be used again.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "transports/fabric.h"

namespace tide {

enum class MemoryKind : uint8_t { kHost, kCuda };

struct NetworkCapabilities {
  std::string kind;       // "memory", "ucx"
  std::string transport;  // as in effect, "tcp", "rc_mlx5"; what differs from what was asked for is
                          // in `notes`
  std::string device;     // "rail0", "mlx5_3:1"
  std::string version;    // of the library below: "UCX 1.22.0"
  bool cuda_memory = false;  // MemoryKind::kCuda can be registered; otherwise the engine stages
  int64_t window_bytes =
      0;  // most bytes of this rail that are under way at a time, all groups together
  std::vector<std::string> notes;  // sentences for `tide doctor` and `tide.report`
};

struct MemoryBlock {
  void* base = nullptr;
  int64_t bytes = 0;
  MemoryKind kind = MemoryKind::kHost;
};

struct Segment {
  const void* from = nullptr;
  int64_t to_offset = 0;  // in the receiver's region
  int64_t bytes = 0;
};

// Segments go in order. The receiver counts the first head_bytes of them under kHead as soon as
// they are there, while the rest still flows, and all of them under kArrival at the end; both in
// bytes. Zero bytes tell the receiver nothing.
struct Put {
  int node = -1;
  uint64_t operation = 0;
  uint16_t round = 0;
  uint16_t part = 0;
  int region = 0;
  std::vector<Segment> segments;
  int64_t head_bytes = 0;  // 0: no head event; clipped to the segments' bytes
};

// (operation, round, part) of a kind; what each kind means is the plan's. kConfirm and kGrant are
// sent by signal().
enum class EventKind : uint8_t { kHead, kArrival, kConfirm, kGrant };
struct Event {
  EventKind kind = EventKind::kArrival;
  uint64_t operation = 0;
  uint16_t round = 0;
  uint16_t part = 0;
};

class Network {
 public:
  virtual ~Network() = default;

  virtual const NetworkCapabilities& capabilities() const = 0;
  virtual int node() const = 0;
  virtual int nodes() const = 0;

  // Collective: every node calls it in the same order with the same id and bytes, else it is
  // refused on all by name. The memory stays where it is until remove_region or close; puts of
  // peers may land in it from here on.
  virtual Status add_region(int id, const MemoryBlock& block, Deadline deadline) = 0;
  // Collective: quiesces, then ends the registration; nothing lands there any more once it has
  // returned OK.
  virtual Status remove_region(int id, Deadline deadline) = 0;
  // Local and optional: memory that puts read from. Saves its registration at the first put.
  virtual Status add_source(const MemoryBlock& block) = 0;
  virtual void remove_source(const void* base) = 0;  // no put that reads it is under way

  // Operations are numbered in call order from 1, equally on all nodes. `hash` (of the program)
  // goes with every message of the operation; a node that runs another one under this number breaks
  // the Network on both sides, naming `what`.
  virtual Status begin(uint64_t operation, uint64_t hash, const std::string& what) = 0;
  virtual Status put(const Put& put) = 0;
  virtual Status signal(int node, const Event& event, int64_t amount = 1) = 0;
  // What has been counted so far of an event from `node`; events of operations that have not begun
  // here are kept.
  virtual int64_t count(int node, const Event& event) const = 0;
  // Until count(node, event) >= amount; ends as Fabric::wait does, or with the Network's error.
  virtual Status wait(int node, const Event& event, int64_t amount, const WaitGuard& guard) = 0;
  // Until this node's puts and signals of the operation are over.
  virtual Status drain(uint64_t operation, const WaitGuard& guard) = 0;
  // Forgets the operation: later messages of it are dropped. After drain; operations may end in any
  // order.
  virtual void end(uint64_t operation) = 0;

  // Collective: drains all own operations and meets the peers. Once it has returned OK, no byte of
  // what any node posted before is under way.
  virtual Status quiesce(Deadline deadline) = 0;

  // The sticky error, OK before it.
  virtual Status error() const = 0;
  // OK while the node may still send; kPeerLost once it died, fell silent, sent fail() or said
  // goodbye (no failure).
  virtual Status peer_status(int node) const = 0;
  // Called once, from a thread of the network, with the first error that did not come from fail(),
  // and the node it came from (-1: none). Set before the first begin; may call wake_all,
  // peer_status, count, error and fail only.
  virtual void on_failure(std::function<void(int node, const Status& reason)> listener) = 0;
  virtual void wake_all() = 0;
  virtual void fail(const Status& reason) = 0;

  // Without an error: says goodbye and waits for the peers' until the deadline. With one: cuts the
  // connections at once. No call is in flight. OK: no peer can write into the regions any more, and
  // no put reads its source. Otherwise: the memory of both must stay mapped and must never be used
  // again. Idempotent.
  virtual Status close(Deadline deadline) = 0;
};

}  // namespace tide
