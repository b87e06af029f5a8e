#include "transports/cuda/cuda_fabric.h"

#include <algorithm>

#include "transports/cuda/cuda_fabric_impl.h"

namespace tide {
namespace {

using cuda::ContextGuard;
using cuda::DeviceContext;
using cuda::DevicePointer;
using cuda::DeviceQueue;
using cuda::ListBuilder;

constexpr int64_t kSmallSum =
    int64_t{cuda::kCtas} * cuda::kTileVectors * 4;  // elements; below: small tiles
constexpr std::chrono::milliseconds kDrainTime{1000};

// A copy costs so much whatever its size; where the small ones of a call would cost more than is
// worth a kernel, one writes them to the peer's memory.
struct CopyCost {
  int64_t small_bytes;  // what is larger takes longer than the cost itself
  double microseconds;
  double worth_a_kernel;  // microseconds
};
// To another GPU: of the host, once for each peer. A copy engine moves the bytes, a kernel would
// need SMs.
constexpr CopyCost kCopyToPeer = {64 << 10, 0.8, 300};
// On the own GPU: of the device. SMs move the bytes in any case.
constexpr CopyCost kCopyOnOwnGpu = {2 << 20, 6.0, 100};

DevicePointer address(const void* pointer) { return reinterpret_cast<DevicePointer>(pointer); }

// An event behind the point; freed when the device has passed it.
class EventPoint final : public StreamPoint {
 public:
  EventPoint(std::shared_ptr<DeviceContext> device, cuda::Event event)
      : device_(std::move(device)), event_(event) {}
  ~EventPoint() override {
    const ContextGuard guard(*device_);
    (void)device_->api().event_destroy(event_);
  }
  EventPoint(const EventPoint&) = delete;
  EventPoint& operator=(const EventPoint&) = delete;

  Status release(void* user_stream) const override {
    const ContextGuard guard(*device_);
    return device_->check(
        device_->api().stream_wait_event(static_cast<cuda::Stream>(user_stream), event_, 0),
        "cuStreamWaitEvent", "ordering streams");
  }

 private:
  const std::shared_ptr<DeviceContext> device_;
  const cuda::Event event_;
};

}  // namespace

Result<DeviceQueue*> CudaFabricImpl::queue_of(int queue) {
  if (queue < 0 || queue >= static_cast<int>(queues_.size()))
    return Status(ErrorKind::kInternal, label_ + ": no queue " + std::to_string(queue));
  std::unique_ptr<DeviceQueue>& kept = queues_[static_cast<size_t>(queue)];
  if (!kept) {
    auto made = std::make_unique<DeviceQueue>(device_, size());
    const DevicePointer words = reinterpret_cast<DevicePointer>(words_->own());
    TIDE_RETURN_IF_ERROR(
        made->open(priority_, {queue_progress_ + static_cast<DevicePointer>(queue * kLineBytes),
                               words + static_cast<DevicePointer>((2 + queue) * kLineBytes),
                               words + static_cast<DevicePointer>(kLineBytes)}));
    kept = std::move(made);
  }
  return kept.get();
}

Status CudaFabricImpl::usable() const {
  TIDE_RETURN_IF_ERROR(open());
  if (watch_ && watch_->is_poisoned())
    return {ErrorKind::kPeerLost, label_ + ": the group has failed"};
  return Status::ok();
}

Status CudaFabricImpl::open() const {
  if (::getpid() != owner_) {
    return {ErrorKind::kInvalidUse,
            label_ + ": called in a forked child; CUDA does not survive a fork"};
  }
  if (closed_.load(std::memory_order_relaxed))
    return {ErrorKind::kInvalidUse, label_ + ": the fabric is closed"};
  return Status::ok();
}

Status CudaFabricImpl::launch(DeviceQueue& queue, const std::string& kernel, ListBuilder& list,
                              unsigned most_ctas) {
  list.set_poison(static_cast<const uint32_t*>(words_->own()));
  const Status status = kernels_->launch(queue.stream(), kernel, list, most_ctas);
  list.clear();
  return status;
}

Status CudaFabricImpl::copy(int queue, const CopyBlock* blocks, int count) {
  TIDE_RETURN_IF_ERROR(usable());
  const ContextGuard guard(*device_);
  Result<DeviceQueue*> found = queue_of(queue);
  TIDE_RETURN_IF_ERROR(found.status());
  DeviceQueue& to = *found.value();
  if (count > 0 && multicast_map_->find(blocks[0].to, 1)) return copy_to_all(to, blocks, count);
  // Copies on the own GPU need SMs however they are made: few, and all in one launch.
  ListBuilder local;
  const int64_t by_kernel_bytes = largest_by_kernel(blocks, count);
  for (int i = 0; i < count; ++i) {
    const CopyBlock& block = blocks[i];
    if (block.to == block.from) continue;  // a shard that lies at its own place already
    const auto place = window_map_->find(block.to, 1);
    if (place && place->rank != rank()) {
      if (block.rows * block.row_bytes > by_kernel_bytes) {
        TIDE_RETURN_IF_ERROR(to.copy(block, place->rank));
        continue;
      }
      to.wrote_to(place->rank);
    }
    if (!local.append(block)) {
      TIDE_RETURN_IF_ERROR(launch(to, cuda::pack_kernel(), local));
      local.append(block);
    }
  }
  TIDE_RETURN_IF_ERROR(to.flush());
  return launch(to, cuda::pack_kernel(), local);
}

// By copy engine alone: a kernel's plain store to such an address means nothing.
Status CudaFabricImpl::copy_to_all(DeviceQueue& queue, const CopyBlock* blocks, int count) {
  for (int i = 0; i < count; ++i) TIDE_RETURN_IF_ERROR(queue.copy(blocks[i], rank()));
  for (int peer = 0; peer < size(); ++peer) queue.wrote_to(peer);
  return queue.flush();
}

Status CudaFabricImpl::read_add(int queue, const ReadAddBlock* blocks, int count,
                                const AccumulateOptions& options) {
  TIDE_RETURN_IF_ERROR(usable());
  const ContextGuard guard(*device_);
  Result<DeviceQueue*> found = queue_of(queue);
  TIDE_RETURN_IF_ERROR(found.status());
  ListBuilder list;
  const auto send = [&] {
    return launch(*found.value(), cuda::multicast_kernel(), list, cuda::kCombineCtas);
  };
  for (int i = 0; i < count; ++i) {
    const ReadAddBlock& block = blocks[i];
    TIDE_RETURN_IF_ERROR(cuda::can_accumulate(DType::kFloat32, block.output_dtype, options));
    if (block.numel > 0 &&
        !multicast_map_->find(block.from, block.numel * dtype_bytes(DType::kFloat32))) {
      return {ErrorKind::kInternal, label_ + ": a read-add outside every window opened to all"};
    }
    const bool new_kind = i > 0 && blocks[i - 1].output_dtype != block.output_dtype;
    if (new_kind || !list.append_multicast(block, options)) {
      TIDE_RETURN_IF_ERROR(send());
      list.append_multicast(block, options);
    }
  }
  return send();
}

int64_t CudaFabricImpl::largest_by_kernel(const CopyBlock* blocks, int count) const {
  if (count == 0) return 0;
  const auto place = window_map_->find(blocks[0].to, 1);  // a call's blocks go to one rank
  if (!place || place->rank == rank()) return 0;
  const bool here = shares_gpu_[static_cast<size_t>(place->rank)] != 0;
  const CopyCost& cost = here ? kCopyOnOwnGpu : kCopyToPeer;
  const auto worth = [&](int64_t copies) {
    return static_cast<double>(copies * (here ? 1 : size() - 1)) * cost.microseconds >
           cost.worth_a_kernel;
  };
  if (!worth(count)) return 0;
  const auto small = std::count_if(blocks, blocks + count, [&](const CopyBlock& block) {
    return block.rows * block.row_bytes <= cost.small_bytes;
  });
  return worth(small) ? cost.small_bytes : 0;
}

Status CudaFabricImpl::cast(int queue, const CastBlock* blocks, int count) {
  TIDE_RETURN_IF_ERROR(usable());
  const ContextGuard guard(*device_);
  Result<DeviceQueue*> found = queue_of(queue);
  TIDE_RETURN_IF_ERROR(found.status());
  DeviceQueue& on = *found.value();
  ListBuilder list;
  for (int i = 0; i < count; ++i) {
    const CastBlock& block = blocks[i];
    if (block.from_dtype == block.to_dtype) {
      const CopyBlock same = {block.to, block.from, 1, block.numel * dtype_bytes(block.to_dtype),
                              0,        0};
      TIDE_RETURN_IF_ERROR(copy(queue, &same, 1));
      continue;
    }
    TIDE_RETURN_IF_ERROR(cuda::can_cast(block.from_dtype, block.to_dtype));
    const std::string kernel = cuda::cast_kernel(block.from_dtype, block.to_dtype);
    if (!list.append(block)) {
      TIDE_RETURN_IF_ERROR(launch(on, kernel, list));
      list.append(block);
    }
    const bool last_of_kind = i + 1 == count || blocks[i + 1].from_dtype != block.from_dtype ||
                              blocks[i + 1].to_dtype != block.to_dtype;
    if (last_of_kind) TIDE_RETURN_IF_ERROR(launch(on, kernel, list));
  }
  return Status::ok();
}

Status CudaFabricImpl::accumulate(int queue, const AccumulateBlock* blocks, int count,
                                  const AccumulateOptions& options) {
  TIDE_RETURN_IF_ERROR(usable());
  const ContextGuard guard(*device_);
  Result<DeviceQueue*> found = queue_of(queue);
  TIDE_RETURN_IF_ERROR(found.status());
  DeviceQueue& on = *found.value();
  int64_t numel = 0;
  for (int i = 0; i < count; ++i) numel += blocks[i].numel;
  ListBuilder list;
  const auto begin_list = [&] {
    if (numel < kSmallSum) list.use_small_tiles();
  };
  begin_list();
  for (int i = 0; i < count; ++i) {
    const AccumulateBlock& block = blocks[i];
    TIDE_RETURN_IF_ERROR(cuda::can_accumulate(block.slice_dtype, block.output_dtype, options));
    const std::string kernel = cuda::accumulate_kernel(block.slice_dtype);
    if (!list.append(block, options)) {
      TIDE_RETURN_IF_ERROR(launch(on, kernel, list));
      begin_list();
      if (!list.append(block, options)) {
        return {
            ErrorKind::kUnsupported,
            label_ + ": a sum of " + std::to_string(block.slices.size()) + " slices is too long"};
      }
    }
    const bool last_of_kind = i + 1 == count || blocks[i + 1].slice_dtype != block.slice_dtype ||
                              blocks[i + 1].output_dtype != block.output_dtype;
    if (last_of_kind) {
      TIDE_RETURN_IF_ERROR(launch(on, kernel, list));
      begin_list();
    }
  }
  return Status::ok();
}

Status CudaFabricImpl::signal(int queue, uint32_t* word, uint32_t value) {
  TIDE_RETURN_IF_ERROR(usable());
  const auto place = window_map_->find(word, sizeof(*word));
  if (!place) return {ErrorKind::kInternal, label_ + ": signal to a word outside every window"};
  const ContextGuard guard(*device_);
  Result<DeviceQueue*> on = queue_of(queue);
  TIDE_RETURN_IF_ERROR(on.status());
  if (place->rank == rank()) return on.value()->signal_own(address(word), value);
  return on.value()->signal_peer(place->rank, address(word), value);
}

Status CudaFabricImpl::wait(int queue, const uint32_t* word, uint32_t value,
                            const WaitGuard& guard) {
  TIDE_RETURN_IF_ERROR(usable());
  const auto place = window_map_->find(word, sizeof(*word));
  if (!place || place->rank != rank()) {
    return {ErrorKind::kInternal,
            label_ + ": wait for a word outside its own windows (" + guard.what + ")"};
  }
  const ContextGuard context(*device_);
  Result<DeviceQueue*> on = queue_of(queue);
  TIDE_RETURN_IF_ERROR(on.status());
  const uint32_t step = watch_->add(queue, address(word), value, guard, nullptr);
  const Status status = on.value()->wait(step, address(word), value);
  if (!status.is_ok()) watch_->take_back(queue);
  return status;
}

Status CudaFabricImpl::mark(int queue, std::function<void(bool)> passed) {
  TIDE_RETURN_IF_ERROR(open());
  const ContextGuard context(*device_);
  Result<DeviceQueue*> on = queue_of(queue);
  TIDE_RETURN_IF_ERROR(on.status());
  const uint32_t step = watch_->add(queue, 0, 0, WaitGuard(), std::move(passed));
  const Status status = on.value()->wait(step, 0, 0);
  if (!status.is_ok()) watch_->take_back(queue);
  return status;
}

void* CudaFabricImpl::stream(int queue) {
  const ContextGuard context(*device_);
  Result<DeviceQueue*> found = queue_of(queue);
  return found.is_ok() ? found.value()->stream() : nullptr;
}

Status CudaFabricImpl::check_stream(void* user_stream) const {
  const ContextGuard context(*device_);
  int capturing = cuda::kCaptureNone;
  TIDE_RETURN_IF_ERROR(device_->check(
      device_->api().stream_is_capturing(static_cast<cuda::Stream>(user_stream), &capturing),
      "cuStreamIsCapturing", "looking at the caller's stream"));
  if (capturing == cuda::kCaptureNone) return Status::ok();
  return {ErrorKind::kInvalidUse,
          label_ + ": the stream records a CUDA graph; tide's collectives cannot be part of one"};
}

Result<std::shared_ptr<StreamPoint>> CudaFabricImpl::point_of_stream(void* user_stream) {
  TIDE_RETURN_IF_ERROR(usable());
  const ContextGuard context(*device_);
  const cuda::DriverApi& api = device_->api();
  cuda::Event event = nullptr;
  TIDE_RETURN_IF_ERROR(device_->check(api.event_create(&event, cuda::kEventWithoutTiming),
                                      "cuEventCreate", "ordering streams"));
  auto point = std::make_shared<EventPoint>(device_, event);
  TIDE_RETURN_IF_ERROR(
      device_->check(api.event_record(event, static_cast<cuda::Stream>(user_stream)),
                     "cuEventRecord", "ordering streams"));
  return std::shared_ptr<StreamPoint>(std::move(point));
}

Result<std::shared_ptr<StreamPoint>> CudaFabricImpl::point_of_queue(int queue) {
  TIDE_RETURN_IF_ERROR(usable());
  const ContextGuard context(*device_);
  Result<DeviceQueue*> on = queue_of(queue);
  TIDE_RETURN_IF_ERROR(on.status());
  TIDE_RETURN_IF_ERROR(on.value()->flush());
  return point_of_stream(on.value()->stream());
}

Status CudaFabricImpl::wait_for_point(int queue, const StreamPoint& point) {
  TIDE_RETURN_IF_ERROR(usable());
  const ContextGuard context(*device_);
  Result<DeviceQueue*> on = queue_of(queue);
  TIDE_RETURN_IF_ERROR(on.status());
  TIDE_RETURN_IF_ERROR(on.value()->flush());
  return point.release(on.value()->stream());
}

Status CudaFabricImpl::settle() {
  TIDE_RETURN_IF_ERROR(usable());
  const ContextGuard context(*device_);
  return device_->check(device_->api().context_synchronize(), "cuCtxSynchronize",
                        "waiting for the device");
}

void CudaFabricImpl::on_wait_failure(std::function<void(const Status&)> listener) {
  std::lock_guard lock(listener_mutex_);
  listener_ = std::move(listener);
}

void CudaFabricImpl::wake_all() {
  if (watch_) watch_->wake();
  host_->wake_all();
}

void CudaFabricImpl::fail(const Status& reason) {
  if (::getpid() != owner_) return;
  if (watch_) watch_->poison();
  host_->fail(reason);
}

CudaFabricImpl::~CudaFabricImpl() {
  if (::getpid() == owner_) {
    close();
    return;
  }
  // A forked child: neither the thread nor the driver exists here. Everything is left where it is.
  (void)watch_.release();
  (void)kernels_.release();
  for (std::unique_ptr<DeviceQueue>& queue : queues_) (void)queue.release();
  if (words_) words_->abandon();
}

// Waits until every queue has got to its end; after a second by poison. False: it did not help.
bool CudaFabricImpl::drain() {
  if (!watch_) return true;
  for (int q = 0; q < static_cast<int>(queues_.size()); ++q) {
    const std::unique_ptr<DeviceQueue>& queue = queues_[static_cast<size_t>(q)];
    if (!queue) continue;
    const uint32_t step = watch_->add(q, 0, 0, WaitGuard(), nullptr);
    if (!queue->wait(step, 0, 0).is_ok()) watch_->take_back(q);
  }
  if (watch_->wait_drained(kDrainTime)) return true;
  watch_->poison();
  return watch_->wait_drained(kDrainTime);
}

void CudaFabricImpl::close() {
  if (::getpid() != owner_ || closed_.exchange(true)) return;
  if (device_) {
    const ContextGuard guard(*device_);
    const bool drained = drain();
    host_->close();  // first: nobody is told of an end while queues still run, and no listener runs
                     // after this
    watch_.reset();
    const cuda::DriverApi& api = device_->api();
    queues_.clear();
    for (cuda::Stream stream : {poison_stream_, setup_stream_}) {
      if (stream != nullptr) (void)api.stream_destroy(stream);
    }
    if (drained) {  // else words and kernels are left where they are: a queue may still use them
      if (progress_ != nullptr) (void)api.host_free(progress_);
      kernels_.reset();
    } else {
      if (words_) words_->abandon();
      (void)kernels_.release();
    }
    words_.reset();
    return;
  }
  host_->close();
}

}  // namespace tide
