// The thread that looks after waits on the device: it starts a wait's deadline when its queue has
// reached it, asks the wait's guard as a blocked thread would, and after a failure releases every
// blocked queue by poison.
//
// A queue tells where it stands by a word in host memory that its stream writes: 2n - 1 when wait n
// is reached, 2n when it is passed. The thread reads those words and calls the driver only to
// poison, by stream writes from a stream of its own (a copy or a memset would hang while a user's
// thread sits in cudaFree). A poisoned word is the value waited for plus 2^30: past it in the
// cyclic comparison, and never met by counting. A peer may still overwrite it, so it is repeated
// until the queues have drained.
//
// Thread-safe. Guards are used from this thread until their wait has passed or the watch has ended.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "transports/cuda/device_context.h"
#include "transports/fabric.h"

namespace tide::cuda {

inline constexpr uint32_t kPoisonDistance = 1u << 30;

class WaitWatch {
 public:
  struct Options {
    std::shared_ptr<DeviceContext> device;
    Stream poison_stream = nullptr;  // used by this thread alone; outlives it
    DevicePointer poison_flag = 0;   // set to 1 before the first word is poisoned
    uint32_t* progress = nullptr;    // one word per queue, kProgressStride words apart
    int queues = 0;
    std::string label;  // "rank 1 of group 'x'"
    // Called once, from this thread, with the first error of a wait; not when the group had failed
    // before.
    std::function<void(const Status&)> on_failure;
  };
  static constexpr int kProgressStride = 16;

  explicit WaitWatch(Options options);
  ~WaitWatch();

  // Before the wait is enqueued. `word` is 0 for a mark: nothing is waited for, `passed` is called
  // when it is passed (from this thread; must not block), with whether that was before any poison
  // was written. Returns n.
  uint32_t add(int queue, DevicePointer word, uint32_t value, WaitGuard guard,
               std::function<void(bool clean)> passed);
  // Takes back the newest entry of the queue: its enqueuing failed.
  void take_back(int queue);

  // Releases all queues from now on, also those that reach a wait later. OK when the reason is told
  // elsewhere.
  void poison();
  bool is_poisoned() const;
  // Whether every wait and mark has passed.
  bool is_drained() const;
  bool wait_drained(std::chrono::milliseconds timeout) const;
  // WaitGuard::what of the waits that queues stand in now.
  std::vector<std::string> standing_in() const;
  // Looks at the guards soon.
  void wake();
  // How many driver calls this thread has made: for tests of "no call without a failure".
  uint64_t poison_writes() const;

 private:
  struct Entry {
    uint32_t step = 0;
    DevicePointer word = 0;
    uint32_t value = 0;
    WaitGuard guard;
    std::function<void(bool)> passed;
    bool reached = false;
    Deadline since{};
    Deadline next_check{};
  };
  struct Queue {
    uint32_t steps = 0;
    std::deque<std::shared_ptr<Entry>> entries;
  };

  void run();
  void retire(std::unique_lock<std::mutex>& lock);
  Status look(std::unique_lock<std::mutex>& lock);
  void write_poison(std::unique_lock<std::mutex>& lock);
  // Other side: the stream's write in DeviceQueue::wait, a whole word that the device stores.
  uint32_t progress_of(int queue) const {
    return std::atomic_ref<uint32_t>(options_.progress[queue * kProgressStride])
        .load(std::memory_order_acquire);
  }

  const Options options_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<Queue> queues_;
  bool poisoned_ = false;
  bool is_clean_ = true;  // no poison was written yet
  bool reported_ = false;
  bool woken_ = false;
  bool idle_ = false;  // nothing pending: the thread looks at nothing until it is told
  bool ending_ = false;
  uint64_t poison_writes_ = 0;
  std::thread thread_;
};

}  // namespace tide::cuda
