#include "tests/unit/cuda_multicast_fake.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

namespace tide::cuda {
namespace {

constexpr size_t kGranularity = size_t{1} << 16;

}  // namespace

FakeMulticast::~FakeMulticast() {
  for (auto& [handle, object] : handles_) {
    if (object->descriptor >= 0) ::close(object->descriptor);
    object->descriptor = -1;
  }
}

MulticastEntries FakeMulticast::entries(std::function<int(AllocationHandle)> memory_descriptor) {
  MulticastEntries entries;
  entries.create = [this](AllocationHandle* handle, const MulticastProperties* properties) {
    std::lock_guard lock(mutex_);
    ++creates_;
    if (properties->devices < 1 || properties->bytes % kGranularity != 0) return kInvalidValue;
    auto made = std::make_shared<Object>();
    made->devices = properties->devices;
    made->bytes = properties->bytes;
    made->descriptor = ::memfd_create("fake-multicast", MFD_CLOEXEC);
    made->creator = *handle = next_handle_++;
    handles_[*handle] = made;
    return kSuccess;
  };
  entries.add_device = [this](AllocationHandle handle, Device device) -> Code {
    std::lock_guard lock(mutex_);
    const std::shared_ptr<Object> into = object(handle);
    if (!into || into->team.size() >= into->devices ||
        std::count(into->team.begin(), into->team.end(), device) > 0) {
      return kInvalidValue;
    }
    if (handle == into->creator) misuse_("a device added through the creator's own handle");
    into->team.push_back(device);
    added_[handle] = device;
    return kSuccess;
  };
  entries.bind_memory = [this, memory_descriptor](AllocationHandle handle, size_t offset,
                                                  AllocationHandle memory, size_t memory_offset,
                                                  size_t bytes, unsigned long long) -> Code {
    const int descriptor = memory_descriptor(memory);
    if (offset != 0 || memory_offset != 0 || descriptor < 0) return kInvalidValue;
    return bind(handle, memory, bytes, descriptor);
  };
  entries.unbind = [this](AllocationHandle handle, Device device, size_t, size_t bytes) -> Code {
    std::lock_guard lock(mutex_);
    const std::shared_ptr<Object> from = object(handle);
    const auto found = from ? from->bound.find(device) : decltype(from->bound.find(device)){};
    if (!from || found == from->bound.end() || found->second.bytes != bytes) {
      misuse_("an unbind of what is not bound");
      return kInvalidValue;
    }
    ::munmap(found->second.pages, bytes);
    from->bound.erase(found);
    return kSuccess;
  };
  entries.granularity = [](size_t* granularity, const MulticastProperties* properties, int) {
    *granularity = kGranularity;
    return properties->bytes > 0 ? kSuccess : kInvalidValue;  // the answer depends on the size
  };
  return entries;
}

Code FakeMulticast::bind(AllocationHandle handle, AllocationHandle memory, size_t bytes,
                         int descriptor) {
  std::lock_guard lock(mutex_);
  const std::shared_ptr<Object> into = object(handle);
  if (!into || bytes != into->bytes || added_.count(handle) == 0) return kInvalidValue;
  if (!is_whole(*into, "a bind")) return kIllegalState;
  void* pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (pages == MAP_FAILED) return kOutOfMemory;
  into->bound[added_[handle]] = {memory, bytes, static_cast<char*>(pages)};
  return kSuccess;
}

std::shared_ptr<FakeMulticast::Object> FakeMulticast::object(AllocationHandle handle) const {
  const auto found = handles_.find(handle);
  return found == handles_.end() ? nullptr : found->second;
}

bool FakeMulticast::is_whole(const Object& object, const std::string& call) {
  if (object.team.size() == object.devices) return true;
  misuse_(call + " before the team is whole: the driver would block");
  return false;
}

bool FakeMulticast::owns(AllocationHandle handle) const {
  std::lock_guard lock(mutex_);
  return handles_.count(handle) > 0;
}

Code FakeMulticast::release(AllocationHandle handle) {
  std::lock_guard lock(mutex_);
  const std::shared_ptr<Object> gone = object(handle);
  if (!gone) return kInvalidHandle;
  if (handle == gone->creator) {
    ::close(gone->descriptor);
    gone->descriptor = -1;
  }
  handles_.erase(handle);
  added_.erase(handle);
  return kSuccess;
}

int FakeMulticast::share(AllocationHandle handle) const {
  std::lock_guard lock(mutex_);
  const std::shared_ptr<Object> shared = object(handle);
  return shared && shared->descriptor >= 0 ? ::dup(shared->descriptor) : -1;
}

Code FakeMulticast::take(AllocationHandle* handle, int descriptor) {
  struct stat wanted = {};
  if (::fstat(descriptor, &wanted) != 0) return kNotFound;
  std::lock_guard lock(mutex_);
  for (const auto& [known, object] : handles_) {
    struct stat own = {};
    if (object->descriptor < 0 || ::fstat(object->descriptor, &own) != 0) continue;
    if (own.st_ino != wanted.st_ino || own.st_dev != wanted.st_dev) continue;
    const std::shared_ptr<Object> found = object;
    *handle = next_handle_++;
    handles_[*handle] = found;
    return kSuccess;
  }
  return kNotFound;
}

Code FakeMulticast::map(DevicePointer at, size_t bytes, size_t offset, AllocationHandle handle) {
  std::lock_guard lock(mutex_);
  const std::shared_ptr<Object> wanted = object(handle);
  if (!wanted || offset != 0 || bytes != wanted->bytes) return kInvalidValue;
  if (!is_whole(*wanted, "a map")) return kIllegalState;
  mapped_[at] = wanted;
  return kSuccess;
}

bool FakeMulticast::unmap(DevicePointer at, size_t bytes) {
  std::lock_guard lock(mutex_);
  const auto found = mapped_.find(at);
  if (found == mapped_.end() || found->second->bytes != bytes) return false;
  mapped_.erase(found);
  return true;
}

std::vector<char*> FakeMulticast::members(DevicePointer at) const {
  std::lock_guard lock(mutex_);
  auto after = mapped_.upper_bound(at);
  if (after == mapped_.begin()) return {};
  --after;
  const Object& object = *after->second;
  if (at >= after->first + object.bytes) return {};
  if (object.bound.size() != object.devices) misuse_("a use before every part is bound");
  std::vector<char*> members;
  for (const auto& [device, binding] : object.bound)
    members.push_back(binding.pages + (at - after->first));
  return members;
}

bool FakeMulticast::is_bound(AllocationHandle memory) const {
  std::lock_guard lock(mutex_);
  for (const auto& [handle, object] : handles_) {
    for (const auto& [device, binding] : object->bound) {
      if (binding.memory == memory) return true;
    }
  }
  return false;
}

int FakeMulticast::creates() const {
  std::lock_guard lock(mutex_);
  return creates_;
}

int FakeMulticast::live() const {
  std::lock_guard lock(mutex_);
  size_t bound = 0;
  for (const auto& [handle, object] : handles_) {
    if (handle == object->creator) bound += object->bound.size();
  }
  return static_cast<int>(handles_.size() + mapped_.size() + bound);
}

}  // namespace tide::cuda
