// The order in which shared slots go out: the slot vacated longest ago first, never the lowest free
// one (a slot that has just been vacated is the one that peers and the own rank are most likely
// still busy with).
//
// Pure and deterministic: ranks that make the same calls in the same order hold the same ring.
// Indices are the arena's. Not thread-safe: only the thread that makes a group's calls touches it.
#pragma once

#include <deque>

namespace tide {

class SlotRing {
 public:
  // The slot vacated longest ago, taken out; -1 when no slot is free.
  int take();
  // Vacated now: goes out last. Also for new slots. It must not be in the ring.
  void put(int slot);
  // As take() and put() of this slot at once: it has been used again (as staging) at this place of
  // the call order.
  void touch(int slot);
  // Takes it out for good; no-op when it is not in the ring.
  void remove(int slot);

  bool contains(int slot) const;
  int size() const { return static_cast<int>(free_.size()); }

 private:
  std::deque<int> free_;
};

}  // namespace tide
