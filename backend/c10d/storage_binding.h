// Storage surgery: a tensor's storage made to lie in memory that tide owns. Includes only torch's
// cheap headers.
#pragma once

#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <memory>
#include <string>

namespace tide {

// Lets an empty storage (resized to 0) hold `bytes` bytes at `address`, for as long as torch likes:
// all tensors and views of it read there. `keep_alive` is dropped, once, when torch frees the
// storage (resize to 0, or its end), on the thread that does it. A storage that lies there already
// is left alone. Returns an empty string, or why it cannot be bound.
std::string bind_storage(c10::StorageImpl& storage, void* address, size_t bytes,
                         std::shared_ptr<void> keep_alive);

// Why move_storage() may not move it: memory that torch's allocator of its device did not give.
// Empty: it may.
std::string movable(const c10::StorageImpl& storage);

// Moves a movable storage to `address`, where its bytes have been copied, and fixes its size.
void move_storage(c10::StorageImpl& storage, void* address, std::shared_ptr<void> keep_alive);

// Whether bind_storage() or move_storage() put it where it is.
bool storage_is_bound(const c10::StorageImpl& storage);

}  // namespace tide
