// The CUDA fabric itself. Internal to cuda_fabric*.cc: set-up and windows in one, steps and ends in
// the other. Threads and errors: cuda_fabric.h.
#pragma once

#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda_lists.h"
#include "transports/cuda/cuda_fabric.h"
#include "transports/cuda/device_queue.h"
#include "transports/cuda/device_window.h"
#include "transports/cuda/kernel_library.h"
#include "transports/cuda/wait_watch.h"

namespace tide {

inline constexpr int64_t kLineBytes = 64;  // of a queue's word

class CudaFabricImpl final : public CudaFabric {
 public:
  CudaFabricImpl(const CudaFabricOptions& options, std::unique_ptr<Fabric> host)
      : options_(options),
        owner_(::getpid()),
        label_("rank " + std::to_string(options.host.rank) + " of group '" + options.host.group +
               "'"),
        host_(std::move(host)),
        window_map_(std::make_shared<WindowMap>()),
        multicast_map_(std::make_shared<WindowMap>()) {
    capabilities_.blocking = false;
    capabilities_.kind = "cuda";
    capabilities_.differs_by_node = true;
  }
  ~CudaFabricImpl() override;

  // What of the set-up concerns this rank alone; voted by the caller.
  Status open_device();
  Status open_queues();
  // Learns the peers' GPUs; the own answer to whether all can be reached.
  Status meet_peers(Deadline deadline);
  // Collective: whether windows may be opened to all. An error: peers are missing.
  Status vote_on_multicast(Deadline deadline);

  const Capabilities& capabilities() const override { return capabilities_; }
  int rank() const override { return options_.host.rank; }
  int size() const override { return options_.host.size; }
  Result<std::shared_ptr<Window>> create_window(int64_t bytes, Deadline deadline) override;
  Status open_to_all(Window& window, Deadline deadline) override;
  Status copy(int queue, const CopyBlock* blocks, int count) override;
  Status cast(int queue, const CastBlock* blocks, int count) override;
  Status accumulate(int queue, const AccumulateBlock* blocks, int count,
                    const AccumulateOptions& options) override;
  Status read_add(int queue, const ReadAddBlock* blocks, int count,
                  const AccumulateOptions& options) override;
  Status signal(int queue, uint32_t* word, uint32_t value) override;
  Status wait(int queue, const uint32_t* word, uint32_t value, const WaitGuard& guard) override;
  Status peer_status(int rank) const override { return host_->peer_status(rank); }
  void on_peer_failure(std::function<void(int, const Status&)> listener) override {
    host_->on_peer_failure(std::move(listener));
  }
  void wake_all() override;
  void fail(const Status& reason) override;
  void close() override;

  Fabric& host() override { return *host_; }
  void on_wait_failure(std::function<void(const Status&)> listener) override;
  Status mark(int queue, std::function<void(bool)> passed) override;
  void* stream(int queue) override;
  bool is_drained() const override { return !watch_ || watch_->is_drained(); }
  std::vector<std::string> standing_in() const override {
    return watch_ ? watch_->standing_in() : std::vector<std::string>();
  }
  Status check_stream(void* user_stream) const override;
  Result<std::shared_ptr<StreamPoint>> point_of_stream(void* user_stream) override;
  Result<std::shared_ptr<StreamPoint>> point_of_queue(int queue) override;
  Status wait_for_point(int queue, const StreamPoint& point) override;
  Status settle() override;

 private:
  Status usable() const;
  Status open() const;  // usable(), or failed and not yet closed
  // Made now if need be; the context is current.
  Result<cuda::DeviceQueue*> queue_of(int queue);
  Result<cuda::DevicePart> allocate(int64_t bytes);
  Status launch(cuda::DeviceQueue& queue, const std::string& kernel, cuda::ListBuilder& list,
                unsigned most_ctas = cuda::kCtas);
  Status multicast_support() const;
  Status copy_to_all(cuda::DeviceQueue& queue, const CopyBlock* blocks, int count);
  // A kernel makes those of these copies to a peer that are no larger; 0: none.
  int64_t largest_by_kernel(const CopyBlock* blocks, int count) const;
  bool drain();

  const CudaFabricOptions options_;
  const pid_t owner_;
  const std::string label_;
  Capabilities capabilities_;
  std::unique_ptr<Fabric> host_;
  std::shared_ptr<cuda::DeviceContext> device_;
  std::shared_ptr<WindowMap> window_map_;
  std::shared_ptr<WindowMap> multicast_map_;  // addresses that stand for all ranks' parts
  std::vector<char> shares_gpu_;              // by rank: it is on this rank's GPU
  std::unique_ptr<cuda::KernelLibrary> kernels_;
  std::shared_ptr<cuda::DeviceWindow> words_;  // own lines: flag of poison, zero, then one a queue
  void* progress_ = nullptr;                   // host memory: one line a queue
  cuda::Stream poison_stream_ = nullptr;
  cuda::Stream setup_stream_ = nullptr;
  std::vector<std::unique_ptr<cuda::DeviceQueue>> queues_;  // null until the first use
  cuda::DevicePointer queue_progress_ = 0;                  // progress_, as the device sees it
  int priority_ = 0;
  std::unique_ptr<cuda::WaitWatch> watch_;
  std::atomic<bool> closed_{false};

  std::mutex listener_mutex_;
  std::function<void(const Status&)> listener_;
};

}  // namespace tide
