// The engine's Group of one process group: made at the first operation that needs it, by all ranks
// in that operation.
//
// Three ends: a Group, over one node or several; kUnsupported with a reason that is the same on all
// ranks (node_setup.h), kept for good; or an error, kept too: no later call may succeed on some
// ranks only. Thread-safe. abort() and close() do not wait for a thread that is making the group;
// stop the store to end its waits. In a forked child every call returns an error, and destruction
// leaks what belongs to the parent.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "backend/c10d/node_setup.h"
#include "backend/engine/group.h"
#include "transports/fabric.h"

namespace tide {

inline constexpr int kHostMemory = -1;

struct EngineLinkOptions {
  GroupOptions group;
  int rank = 0;
  int size = 1;
  bool multicast = true;     // false: this rank does not want it, so the group has none
  int program_rank = 0;      // of this process in the default group
  int64_t node_size = 0;     // 0: ranks of one host are one node; else program ranks of each
  RailOptions rail;          // between nodes
  int device = kHostMemory;  // whose memory the group serves: a GPU's ordinal in this process
  std::function<void()> make_room;  // see CudaFabricOptions
};

class EngineLink {
 public:
  EngineLink(EngineLinkOptions options, std::shared_ptr<KeyValueStore> store);
  ~EngineLink();

  // Collective at its first call.
  Result<std::shared_ptr<Group>> group();
  // Null before the first call of group(), or when it failed.
  std::shared_ptr<Group> group_if_made() const;

  std::chrono::milliseconds timeout() const;
  void set_timeout(std::chrono::milliseconds timeout);
  // Breaks the group; a group that was not made yet stays unmade.
  void abort(const Status& reason);
  void close();

 private:
  Result<std::shared_ptr<Group>> make();

  const pid_t process_;
  const std::shared_ptr<KeyValueStore> store_;
  std::mutex making_mutex_;  // held while the group is made, which may take until its deadline
  mutable std::mutex state_mutex_;  // guards what follows; never held while waiting
  EngineLinkOptions options_;
  std::shared_ptr<Group> group_;
  std::optional<Status> refusal_;  // why there is none
};

// An error in a process that was forked after the group was made; OK otherwise.
Status check_process(pid_t process, const std::string& group_name);

}  // namespace tide
