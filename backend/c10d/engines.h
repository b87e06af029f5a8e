// The engine's groups of one process group: one for the processor's memory, one for the GPU that
// this rank uses, each made at its first operation (engine_link.h).
//
// A process group serves one GPU a rank: the first whose tensors it got. Thread-safe; the links
// live as long as this object.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backend/c10d/engine_link.h"

namespace tide {

class Engines {
 public:
  // A staging slice of 0 bytes follows the device. `make_room`: see CudaFabricOptions.
  Engines(EngineLinkOptions options, std::shared_ptr<KeyValueStore> store,
          std::function<void(int device)> make_room);

  // The link for a device: kHostMemory or a GPU's ordinal. kInvalidUse for a second GPU.
  Result<EngineLink*> link(int device);
  // Groups made so far; of one kind of device, null where there is none.
  std::vector<std::shared_ptr<Group>> made() const;
  std::shared_ptr<Group> made(bool on_gpu) const;

  std::chrono::milliseconds timeout() const { return host_.timeout(); }
  void set_timeout(std::chrono::milliseconds timeout);
  void abort(const Status& reason);
  void close();

 private:
  std::vector<EngineLink*> links() const;

  const std::shared_ptr<KeyValueStore> store_;
  const std::function<void(int)> make_room_;
  EngineLink host_;
  mutable std::mutex mutex_;  // guards what follows
  EngineLinkOptions options_;
  std::unique_ptr<EngineLink> gpu_;
  int device_ = kHostMemory;
  std::optional<Status> aborted_;
};

}  // namespace tide
