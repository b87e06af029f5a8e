#include "backend/c10d/storage_binding.h"

#include <c10/core/Allocator.h>

#include <utility>

namespace tide {
namespace {

using KeepAlive = std::shared_ptr<void>;

void release(void* context) { delete static_cast<KeepAlive*>(context); }

// torch calls the deleter only for a context that is not null, so the holder is the context.
c10::DataPtr data_pointer(void* address, KeepAlive keep_alive, c10::Device device) {
  return c10::DataPtr(address, new KeepAlive(std::move(keep_alive)), &release, device);
}

}  // namespace

std::string bind_storage(c10::StorageImpl& storage, void* address, size_t bytes,
                         std::shared_ptr<void> keep_alive) {
  if (bytes == 0) return "";
  if (storage_is_bound(storage) && storage.mutable_data() == address && storage.nbytes() == bytes)
    return "";
  if (!storage.resizable()) return "its storage cannot be resized";
  if (storage.nbytes() != 0) {
    return "its storage wanted empty, got " + std::to_string(storage.nbytes()) +
           " bytes; free it by resize_(0) first";
  }
  storage.set_data_ptr_noswap(data_pointer(address, std::move(keep_alive), storage.device()));
  storage.set_nbytes(bytes);
  return "";
}

std::string movable(const c10::StorageImpl& storage) {
  const c10::Allocator* own = c10::GetAllocator(storage.device_type());
  if (own != nullptr && storage.data_ptr().get_deleter() == own->raw_deleter()) return "";
  return "its memory is not torch's own (shared, mapped or borrowed), so it cannot move";
}

void move_storage(c10::StorageImpl& storage, void* address, std::shared_ptr<void> keep_alive) {
  if (storage.nbytes() == 0) return;
  storage.set_data_ptr_noswap(data_pointer(address, std::move(keep_alive), storage.device()));
  storage.set_resizable(false);
}

bool storage_is_bound(const c10::StorageImpl& storage) {
  return storage.data_ptr().get_deleter() == &release;
}

}  // namespace tide
