// One rail: a UCX context pinned to one device, and the progress thread that alone touches it.
// Groups (link.h) live on it as workers of their own, so that closing a group's worker ends every
// write into its memory, whatever other groups do.
//
// The thread runs commands, progresses all links, posts chunks under the rail's window, keeps time,
// and sleeps in epoll on the links' event descriptors and its own eventfd, at most 100 ms (UCX may
// forget to ring). It blocks all signals and never takes a lock for long. Any thread may call
// `post` and `run`; everything else belongs to the progress thread, the constants aside.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transports/ucx/transfer_queue.h"
#include "transports/ucx/ucx.h"
#include "transports/ucx/ucx_api.h"

namespace tide {

class UcxLink;

class UcxRail {
 public:
  // Starts the thread and makes the context on it.
  static Result<std::shared_ptr<UcxRail>> open(const UcxRailOptions& options, const UcxApi* api);
  ~UcxRail();
  UcxRail(const UcxRail&) = delete;
  UcxRail& operator=(const UcxRail&) = delete;

  const UcxApi& api() const { return *api_; }
  const UcxRailOptions& options() const { return options_; }
  const std::vector<std::string>& notes() const { return notes_; }
  bool environment_rules() const { return !notes_.empty(); }
  bool cuda_memory() const { return cuda_memory_; }
  // The process that opened it: a forked child has no progress thread.
  int process() const { return process_; }

  // Hands work to the progress thread.
  void post(std::function<void()> command);
  // The same, and waits for its answer. Not from the progress thread.
  Status run(const std::function<Status()>& command);

  // Progress thread only.
  ucp_context_h context() const { return context_; }
  TransferQueue& transfers() { return transfers_; }
  void add_link(std::shared_ptr<UcxLink> link);  // watched until it is closed
  void stop_watching(int descriptor);            // while it still is the link's
  // Its worker has requests that do not end: context, link and what the link keeps stay for good.
  void leave_behind(const UcxLink* link);

 private:
  UcxRail(const UcxRailOptions& options, const UcxApi* api);
  Status make_context();
  void serve();
  bool run_commands();
  bool post_chunks();
  void keep_time();
  void sleep();

  const UcxRailOptions options_;
  const UcxApi* const api_;
  const int process_;
  std::vector<std::string> notes_;
  bool cuda_memory_ = false;
  ucp_context_h context_ = nullptr;
  TransferQueue transfers_;
  std::vector<std::shared_ptr<UcxLink>> links_;
  int next_flow_ = 0;
  bool left_behind_ = false;
  int epoll_ = -1;
  int doorbell_ = -1;

  std::mutex mutex_;
  std::deque<std::function<void()>> commands_;
  bool ending_ = false;
  std::atomic<bool> asleep_{false};
  std::thread thread_;
};

}  // namespace tide
