#include "backend/engine/arena.h"

#include <utility>

namespace tide {
namespace {

std::atomic<int64_t>& process_bytes() {
  static std::atomic<int64_t> bytes{0};
  return bytes;
}

}  // namespace

int64_t process_arena_bytes() { return process_bytes().load(std::memory_order_relaxed); }

Result<std::shared_ptr<ArenaMemory>> ArenaMemory::create(
    Fabric& fabric, int64_t bytes, Deadline deadline,
    std::shared_ptr<std::atomic<int64_t>> group_bytes) {
  Result<std::shared_ptr<Window>> window = fabric.create_window(bytes, deadline);
  if (!window.is_ok()) return window.status();
  return std::shared_ptr<ArenaMemory>(
      new ArenaMemory(std::move(window.value()), std::move(group_bytes)));
}

ArenaMemory::ArenaMemory(std::shared_ptr<Window> window,
                         std::shared_ptr<std::atomic<int64_t>> group_bytes)
    : window_(std::move(window)), group_bytes_(std::move(group_bytes)) {
  process_bytes().fetch_add(window_->bytes(), std::memory_order_relaxed);
  group_bytes_->fetch_add(window_->bytes(), std::memory_order_relaxed);
}

ArenaMemory::~ArenaMemory() {
  process_bytes().fetch_sub(window_->bytes(), std::memory_order_relaxed);
  group_bytes_->fetch_sub(window_->bytes(), std::memory_order_relaxed);
}

}  // namespace tide
