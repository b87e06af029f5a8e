// Memory of this rank that its peers may write, and how much of it the process holds: slots,
// staging, landing areas and what allocate() gave out. The control page is not counted.
//
// Pages stay mapped while any shared_ptr<ArenaMemory> lives: the group holds one, every operation
// in flight that reads or writes it, and every SlotLease. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "backend/engine/group.h"
#include "transports/fabric.h"

namespace tide {

// Bytes that all groups of this process hold now.
int64_t process_arena_bytes();

class ArenaMemory {
 public:
  // Collective, as Fabric::create_window. `group_bytes` counts the group's own arena and outlives
  // this object's holder.
  static Result<std::shared_ptr<ArenaMemory>> create(
      Fabric& fabric, int64_t bytes, Deadline deadline,
      std::shared_ptr<std::atomic<int64_t>> group_bytes);
  ~ArenaMemory();

  ArenaMemory(const ArenaMemory&) = delete;
  ArenaMemory& operator=(const ArenaMemory&) = delete;

  int64_t bytes() const { return window_->bytes(); }
  char* at(int rank, int64_t offset) const {
    return static_cast<char*>(window_->peer(rank)) + offset;
  }
  char* own() const { return static_cast<char*>(window_->own()); }
  // Collective, see there.
  Status open_to_all(Fabric& fabric, Deadline deadline) {
    return fabric.open_to_all(*window_, deadline);
  }
  // Whether all ranks of the group go by it. Set once.
  bool is_open_to_all() const { return is_open_to_all_; }
  void set_open_to_all() { is_open_to_all_ = true; }
  // The same offset of every part of this node at once; only where it is open.
  char* at_all(int64_t offset) const { return static_cast<char*>(window_->all()) + offset; }

  // Between nodes: its number on the network; -1 where no put may land in it. Set once.
  int region() const { return region_; }
  void set_region(int region) { region_ = region; }

 private:
  ArenaMemory(std::shared_ptr<Window> window, std::shared_ptr<std::atomic<int64_t>> group_bytes);

  std::shared_ptr<Window> window_;
  std::shared_ptr<std::atomic<int64_t>> group_bytes_;
  int region_ = -1;
  bool is_open_to_all_ = false;
};

// A run of bytes at the same offset of every rank's part.
struct ArenaRange {
  std::shared_ptr<ArenaMemory> memory;
  int64_t offset = 0;
  int64_t bytes = 0;

  char* at(int rank) const { return memory->at(rank, offset); }
  char* at_all() const { return memory->at_all(offset); }
  bool is_open_to_all() const { return memory && memory->is_open_to_all(); }
};

// See group.h. Its end means that no storage is bound to the slot any more; the slot itself rejoins
// the ring at the plan's next vacate() or gather(), which happen at the same place of the call
// order on all ranks.
class SlotLease {
 public:
  explicit SlotLease(std::shared_ptr<ArenaMemory> memory) : memory_(std::move(memory)) {}

 private:
  std::shared_ptr<ArenaMemory> memory_;
};

}  // namespace tide
