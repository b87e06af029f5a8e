#include "backend/c10d/engines.h"

#include <utility>

#include "backend/c10d/prefixed_keys.h"

namespace tide {
namespace {

// A sum beside a large product waits for it: on a GPU few and large ones.
EngineLinkOptions with_staging(EngineLinkOptions options, int64_t slice_bytes) {
  if (options.group.staging_slice_bytes == 0) options.group.staging_slice_bytes = slice_bytes;
  return options;
}

}  // namespace

Engines::Engines(EngineLinkOptions options, std::shared_ptr<KeyValueStore> store,
                 std::function<void(int)> make_room)
    : store_(store),
      make_room_(std::move(make_room)),
      host_(with_staging(options, 2 << 20), std::move(store)),
      options_(std::move(options)) {}

Result<EngineLink*> Engines::link(int device) {
  if (device == kHostMemory) return &host_;
  std::lock_guard<std::mutex> lock(mutex_);
  if (gpu_ && device != device_) {
    return Status(ErrorKind::kInvalidUse,
                  "group '" + options_.group.name + "' serves GPU " + std::to_string(device_) +
                      " of this process, got tensors on GPU " + std::to_string(device) +
                      "; a process group serves one GPU a rank");
  }
  if (!gpu_) {
    EngineLinkOptions options = with_staging(options_, 16 << 20);
    options.device = device;
    if (make_room_) options.make_room = [this, device] { make_room_(device); };
    // It meets apart from the group of the processor's memory.
    gpu_ = std::make_unique<EngineLink>(std::move(options),
                                        std::make_shared<PrefixedKeys>(store_, "gpu/"));
    device_ = device;
    if (aborted_) gpu_->abort(*aborted_);
  }
  return gpu_.get();
}

std::vector<EngineLink*> Engines::links() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<EngineLink*> links = {const_cast<EngineLink*>(&host_)};
  if (gpu_) links.push_back(gpu_.get());
  return links;
}

std::vector<std::shared_ptr<Group>> Engines::made() const {
  std::vector<std::shared_ptr<Group>> groups;
  for (EngineLink* link : links()) {
    if (std::shared_ptr<Group> group = link->group_if_made()) groups.push_back(std::move(group));
  }
  return groups;
}

std::shared_ptr<Group> Engines::made(bool on_gpu) const {
  if (!on_gpu) return host_.group_if_made();
  std::lock_guard<std::mutex> lock(mutex_);
  return gpu_ ? gpu_->group_if_made() : nullptr;
}

void Engines::set_timeout(std::chrono::milliseconds timeout) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    options_.group.timeout = timeout;
  }
  for (EngineLink* link : links()) link->set_timeout(timeout);
}

void Engines::abort(const Status& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!aborted_) aborted_ = reason;
  }
  for (EngineLink* link : links()) link->abort(reason);
}

void Engines::close() {
  for (EngineLink* link : links()) link->close();
}

}  // namespace tide
