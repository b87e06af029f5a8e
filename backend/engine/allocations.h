// What allocate() gave out: memory in windows, so that peers can write gather outputs where the
// caller wants them.
//
// An allocation's number counts from 0 in call order and is equal on all ranks. A rank releases one
// when the last copy of its pointer is gone (garbage collection: at another time on every rank);
// the window goes when all have released, as until then a peer may still post it. Pages that this
// rank's storages use never go before they do. Thread-safe: the calling thread adds and sweeps,
// lanes look up.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/engine/arena.h"
#include "backend/engine/control_page.h"

namespace tide {

class Allocations {
 public:
  explicit Allocations(std::shared_ptr<ControlPage> control) : control_(std::move(control)) {}

  // Empty when another allocation fits; else why not (4096 live at a time).
  std::string full();
  // Numbers it; the pointer is the own part of `memory`, released with its last copy.
  std::shared_ptr<void> add(std::shared_ptr<ArenaMemory> memory);

  // Where [address, address + bytes) lies, and a hold that keeps it from being released; false: in
  // no live allocation.
  bool find(const void* address, int64_t bytes, Posting* posting, std::shared_ptr<void>* hold);
  // Memory of allocation `id`; null when it is gone.
  std::shared_ptr<ArenaMemory> memory(int64_t id) const;

  // Drops windows that every rank has released.
  void sweep();
  void clear();

 private:
  struct Entry {
    std::shared_ptr<ArenaMemory> memory;
    std::weak_ptr<void> user;
  };

  const std::shared_ptr<ControlPage> control_;
  mutable std::mutex mutex_;
  std::map<int64_t, Entry> entries_;           // by number
  std::map<const char*, int64_t> by_address_;  // start of the own part -> number
  int64_t next_ = 0;
};

}  // namespace tide
