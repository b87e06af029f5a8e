#include "backend/engine/allocations.h"

#include <unistd.h>

#include <string>
#include <utility>

namespace tide {

std::string Allocations::full() {
  sweep();
  std::lock_guard<std::mutex> lock(mutex_);
  if (entries_.count(next_ - kAllocations) == 0) return "";
  return "allocation " + std::to_string(next_ - kAllocations) +
         " is still in use, and a group keeps at most " + std::to_string(kAllocations) +
         " in a row; free it on every rank, or allocate fewer, larger tensors";
}

std::shared_ptr<void> Allocations::add(std::shared_ptr<ArenaMemory> memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t id = next_++;
  char* own = memory->own();
  // The control page lives as long as the pointer: a release after the group's end writes to a page
  // nobody reads. A forked child has no page, and what it frees is still the parent's.
  std::shared_ptr<void> user(own, [control = control_, memory, id, owner = ::getpid()](void*) {
    if (::getpid() == owner) control->release(id);
  });
  entries_[id] = Entry{std::move(memory), user};
  by_address_[own] = id;
  return user;
}

bool Allocations::find(const void* address, int64_t bytes, Posting* posting,
                       std::shared_ptr<void>* hold) {
  const char* first = static_cast<const char*>(address);
  std::lock_guard<std::mutex> lock(mutex_);
  auto next = by_address_.upper_bound(first);
  if (next == by_address_.begin()) return false;
  --next;
  const auto entry = entries_.find(next->second);
  const int64_t offset = first - next->first;
  if (entry == entries_.end() || offset + bytes > entry->second.memory->bytes()) return false;
  *hold = entry->second.user.lock();
  if (!*hold) return false;
  *posting = {next->second, offset};
  return true;
}

std::shared_ptr<ArenaMemory> Allocations::memory(int64_t id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = entries_.find(id);
  return entry == entries_.end() ? nullptr : entry->second.memory;
}

void Allocations::sweep() {
  std::vector<std::shared_ptr<ArenaMemory>> dropped;  // unmapped outside the lock
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    bool released = true;
    for (int r = 0; r < control_->ranks() && released; ++r)
      released = control_->is_released(r, entry->first);
    if (!released) {
      ++entry;
      continue;
    }
    by_address_.erase(entry->second.memory->own());
    dropped.push_back(std::move(entry->second.memory));
    entry = entries_.erase(entry);
  }
}

void Allocations::clear() {
  std::map<int64_t, Entry> dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  dropped.swap(entries_);
  by_address_.clear();
}

}  // namespace tide
