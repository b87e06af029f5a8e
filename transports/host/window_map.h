// Which rank's memory an address belongs to: every window of one fabric, all ranks' parts of a
// window side by side. Shared by the fabric and its windows (a window may live longer).
// Thread-safe; lookups do not block each other.
#pragma once

#include <cstdint>
#include <optional>
#include <shared_mutex>
#include <vector>

namespace tide {

class WindowMap {
 public:
  struct Place {
    int rank = -1;
    int64_t offset = 0;  // in that rank's part
  };

  // Parts of `bytes` each, rank r's at base + r * stride. `base` names the window in remove().
  void add(const void* base, int ranks, int64_t bytes, int64_t stride);
  void remove(const void* base);

  // Nothing when the `bytes` at `address` do not lie in one rank's part of one window.
  std::optional<Place> find(const void* address, int64_t bytes) const;

 private:
  struct Entry {
    uintptr_t base = 0;
    int ranks = 0;
    int64_t bytes = 0;
    int64_t stride = 0;
  };

  mutable std::shared_mutex mutex_;
  std::vector<Entry> entries_;  // in order of creation: control pages, asked for most, come first
};

}  // namespace tide
