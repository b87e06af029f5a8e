// The multicast part of the driver in ordinary memory: objects, teams, and what an address that
// stands for all members means. Part of cuda_driver_fake.
//
// Strict where the real driver would block for ever, or silently do something else: binding or
// mapping before the team is whole, an object that its creator has let go of, memory released
// while it is bound. Such uses are told to `misuse`.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transports/cuda/driver_api.h"

namespace tide::cuda {

class FakeMulticast {
 public:
  explicit FakeMulticast(std::function<void(const std::string&)> misuse)
      : misuse_(std::move(misuse)) {}
  ~FakeMulticast();

  // `memory_descriptor`: of an ordinary allocation's handle, -1 for none.
  MulticastEntries entries(std::function<int(AllocationHandle)> memory_descriptor);

  // Handles of multicast objects, in calls that they share with memory.
  bool owns(AllocationHandle handle) const;
  Code release(AllocationHandle handle);
  int share(AllocationHandle handle) const;  // a new descriptor, -1 for none
  // kNotFound: no descriptor of an object.
  Code take(AllocationHandle* handle, int descriptor);
  Code map(DevicePointer at, size_t bytes, size_t offset, AllocationHandle handle);
  // False: not mapped here.
  bool unmap(DevicePointer at, size_t bytes);

  // Every member's memory behind the address; empty where none is mapped.
  std::vector<char*> members(DevicePointer at) const;
  bool is_bound(AllocationHandle memory) const;

  int creates() const;
  int live() const;  // objects, handles, bindings and mappings

 private:
  struct Binding {
    AllocationHandle memory = 0;
    size_t bytes = 0;
    char* pages = nullptr;
  };
  struct Object {
    unsigned devices = 0;
    size_t bytes = 0;
    int descriptor = -1;  // its name
    AllocationHandle creator = 0;
    std::vector<Device> team;
    std::map<Device, Binding> bound;
  };

  std::shared_ptr<Object> object(AllocationHandle handle) const;
  bool is_whole(const Object& object, const std::string& call);
  Code bind(AllocationHandle handle, AllocationHandle memory, size_t bytes, int descriptor);

  const std::function<void(const std::string&)> misuse_;
  mutable std::mutex mutex_;
  std::map<AllocationHandle, std::shared_ptr<Object>> handles_;
  std::map<AllocationHandle, Device> added_;  // by the handle through which it was
  std::map<DevicePointer, std::shared_ptr<Object>> mapped_;
  AllocationHandle next_handle_ = AllocationHandle{1} << 32;
  int creates_ = 0;
};

}  // namespace tide::cuda
