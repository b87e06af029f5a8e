#include "backend/engine/slot_ring.h"

#include <algorithm>

namespace tide {

int SlotRing::take() {
  if (free_.empty()) return -1;
  const int slot = free_.front();
  free_.pop_front();
  return slot;
}

void SlotRing::put(int slot) { free_.push_back(slot); }

void SlotRing::touch(int slot) {
  remove(slot);
  put(slot);
}

void SlotRing::remove(int slot) {
  free_.erase(std::remove(free_.begin(), free_.end(), slot), free_.end());
}

bool SlotRing::contains(int slot) const {
  return std::find(free_.begin(), free_.end(), slot) != free_.end();
}

}  // namespace tide
