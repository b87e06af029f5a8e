#include "transports/host/window_map.h"

#include <mutex>

namespace tide {

void WindowMap::add(const void* base, int ranks, int64_t bytes, int64_t stride) {
  std::unique_lock lock(mutex_);
  entries_.push_back({reinterpret_cast<uintptr_t>(base), ranks, bytes, stride});
}

void WindowMap::remove(const void* base) {
  std::unique_lock lock(mutex_);
  std::erase_if(entries_, [base](const Entry& entry) {
    return entry.base == reinterpret_cast<uintptr_t>(base);
  });
}

std::optional<WindowMap::Place> WindowMap::find(const void* address, int64_t bytes) const {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  std::shared_lock lock(mutex_);
  for (const Entry& entry : entries_) {
    if (wanted < entry.base) continue;
    const auto distance = static_cast<int64_t>(wanted - entry.base);
    const int64_t rank = distance / entry.stride;
    if (rank >= entry.ranks) continue;
    const int64_t offset = distance - rank * entry.stride;
    if (offset + bytes > entry.bytes) return std::nullopt;
    return Place{static_cast<int>(rank), offset};
  }
  return std::nullopt;
}

}  // namespace tide
