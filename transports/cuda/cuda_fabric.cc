#include "transports/cuda/cuda_fabric.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "kernels/cuda_lists.h"
#include "transports/cuda/device_queue.h"
#include "transports/cuda/device_window.h"
#include "transports/cuda/kernel_library.h"
#include "transports/cuda/wait_watch.h"
#include "transports/host/part_exchange.h"

namespace tide {
namespace {

using cuda::ContextGuard;
using cuda::DeviceContext;
using cuda::DevicePart;
using cuda::DevicePointer;
using cuda::DeviceQueue;
using cuda::DeviceWindow;
using cuda::KernelLibrary;
using cuda::ListBuilder;
using cuda::WaitWatch;

constexpr int64_t kLineBytes = 64;
constexpr int64_t kSmallSum =
    int64_t{cuda::kCtas} * cuda::kTileVectors * 4;  // elements; below: small tiles
constexpr std::chrono::milliseconds kDrainTime{1000};

DevicePointer address(const void* pointer) { return reinterpret_cast<DevicePointer>(pointer); }

// A yes or no of all ranks; the first refusing rank's reason.
Status vote(Fabric& host, const Status& own, Deadline deadline) {
  PartExchange exchange;
  exchange.make = [&]() -> Result<Descriptor> {
    TIDE_RETURN_IF_ERROR(own);
    return Descriptor();
  };
  exchange.use = [](const std::vector<const Descriptor*>&) { return Status::ok(); };
  return exchange_parts(host, exchange, deadline);
}

class CudaFabricImpl final : public CudaFabric {
 public:
  CudaFabricImpl(const CudaFabricOptions& options, std::unique_ptr<Fabric> host)
      : options_(options),
        owner_(::getpid()),
        label_("rank " + std::to_string(options.host.rank) + " of group '" + options.host.group +
               "'"),
        host_(std::move(host)),
        window_map_(std::make_shared<WindowMap>()) {
    capabilities_.blocking = false;
    capabilities_.kind = "cuda";
  }
  ~CudaFabricImpl() override;

  // What of the set-up concerns this rank alone; voted by the caller.
  Status open_device();
  Status open_queues();
  // Learns the peers' GPUs; the own answer to whether all can be reached.
  Status meet_peers(Deadline deadline);

  const Capabilities& capabilities() const override { return capabilities_; }
  int rank() const override { return options_.host.rank; }
  int size() const override { return options_.host.size; }
  Result<std::shared_ptr<Window>> create_window(int64_t bytes, Deadline deadline) override;
  Status copy(int queue, const CopyBlock* blocks, int count) override;
  Status cast(int queue, const CastBlock* blocks, int count) override;
  Status accumulate(int queue, const AccumulateBlock* blocks, int count,
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
  Status mark(int queue, std::function<void()> passed) override;
  void* stream(int queue) const override {
    return queues_.at(static_cast<size_t>(queue))->stream();
  }
  Status wait_for_stream(int queue, void* user_stream) override;
  Status release_stream(int queue, void* user_stream) override;
  bool is_drained() const override { return !watch_ || watch_->is_drained(); }

 private:
  Status usable() const;
  DeviceQueue& queue_of(int queue) { return *queues_.at(static_cast<size_t>(queue)); }
  Status launch(int queue, const std::string& kernel, ListBuilder& list);
  Status order(cuda::Stream first, cuda::Stream then);
  bool drain();

  const CudaFabricOptions options_;
  const pid_t owner_;
  const std::string label_;
  Capabilities capabilities_;
  std::unique_ptr<Fabric> host_;
  std::shared_ptr<DeviceContext> device_;
  std::shared_ptr<WindowMap> window_map_;
  std::unique_ptr<KernelLibrary> kernels_;
  std::shared_ptr<DeviceWindow> words_;  // own lines: flag of poison, zero, then one a queue
  void* progress_ = nullptr;             // host memory: one line a queue
  cuda::Stream poison_stream_ = nullptr;
  cuda::Stream setup_stream_ = nullptr;
  std::vector<std::unique_ptr<DeviceQueue>> queues_;
  std::unique_ptr<WaitWatch> watch_;
  std::atomic<bool> closed_{false};

  std::mutex listener_mutex_;
  std::function<void(const Status&)> listener_;
};

// Set-up -----------------------------------------------------------------------------------------

Status CudaFabricImpl::open_device() {
  TIDE_RETURN_IF_ERROR(options_.api.status());
  TIDE_RETURN_IF_ERROR(options_.images.status());
  Result<std::shared_ptr<DeviceContext>> device =
      DeviceContext::open(options_.api.value(), options_.device);
  TIDE_RETURN_IF_ERROR(device.status());
  device_ = std::move(device.value());
  const ContextGuard guard(*device_);
  Result<std::unique_ptr<KernelLibrary>> kernels =
      KernelLibrary::load(device_->api(), options_.images.value());
  TIDE_RETURN_IF_ERROR(kernels.status());
  kernels_ = std::move(kernels.value());
  return open_queues();
}

Status CudaFabricImpl::open_queues() {
  const cuda::DriverApi& api = device_->api();
  const int64_t lines = 2 + options_.queues;
  Result<DevicePart> part = DevicePart::allocate(device_, lines * kLineBytes);
  TIDE_RETURN_IF_ERROR(part.status());
  std::vector<DevicePart> parts;
  parts.push_back(std::move(part.value()));
  Result<std::shared_ptr<DeviceWindow>> words =
      DeviceWindow::map(device_, parts, 0, lines * kLineBytes, nullptr);
  TIDE_RETURN_IF_ERROR(words.status());
  words_ = std::move(words.value());

  const auto host_bytes = static_cast<size_t>(options_.queues * kLineBytes);
  TIDE_RETURN_IF_ERROR(device_->check(
      api.host_allocate(&progress_, host_bytes, cuda::kHostPortable | cuda::kHostMapped),
      "cuMemHostAlloc", "making progress words"));
  std::memset(progress_, 0, host_bytes);
  DevicePointer progress = 0;
  TIDE_RETURN_IF_ERROR(device_->check(api.host_device_pointer(&progress, progress_, 0),
                                      "cuMemHostGetDevicePointer", "making progress words"));
  int least = 0;
  int greatest = 0;
  TIDE_RETURN_IF_ERROR(device_->check(api.stream_priority_range(&least, &greatest),
                                      "cuCtxGetStreamPriorityRange", "making queues"));
  for (cuda::Stream* stream : {&poison_stream_, &setup_stream_}) {
    TIDE_RETURN_IF_ERROR(
        device_->check(api.stream_create(stream, cuda::kStreamNonBlocking, greatest),
                       "cuStreamCreateWithPriority", "making queues"));
  }
  const DevicePointer base = address(words_->own());
  TIDE_RETURN_IF_ERROR(
      device_->check(api.set_bytes(base, 0, static_cast<size_t>(lines * kLineBytes), setup_stream_),
                     "cuMemsetD8Async", "clearing words"));
  TIDE_RETURN_IF_ERROR(device_->check(api.stream_synchronize(setup_stream_), "cuStreamSynchronize",
                                      "clearing words"));
  for (int q = 0; q < options_.queues; ++q) {
    auto queue = std::make_unique<DeviceQueue>(device_, size());
    // High priority places the few CTAs of local kernels at the next free slot; copies to peers
    // take no notice of it.
    TIDE_RETURN_IF_ERROR(
        queue->open(greatest, {progress + static_cast<DevicePointer>(q * kLineBytes),
                               base + static_cast<DevicePointer>((2 + q) * kLineBytes),
                               base + static_cast<DevicePointer>(kLineBytes)}));
    queues_.push_back(std::move(queue));
  }
  WaitWatch::Options watch;
  watch.device = device_;
  watch.poison_stream = poison_stream_;
  watch.poison_flag = base;
  watch.progress = static_cast<uint32_t*>(progress_);
  watch.queues = options_.queues;
  watch.label = label_;
  watch.on_failure = [this](const Status& status) {
    std::function<void(const Status&)> listener;
    {
      std::lock_guard lock(listener_mutex_);
      listener = listener_;
    }
    if (listener) listener(status);
  };
  static_assert(WaitWatch::kProgressStride * sizeof(uint32_t) == kLineBytes);
  watch_ = std::make_unique<WaitWatch>(std::move(watch));
  return Status::ok();
}

Status CudaFabricImpl::meet_peers(Deadline deadline) {
  struct Card {
    cuda::Uuid uuid;
    uint32_t is_mig;
  };
  constexpr int64_t kCardAt = 2048;
  if (size() > static_cast<int>(kCardAt / sizeof(uint32_t))) {
    return {ErrorKind::kUnsupported, "more ranks than a node can have"};
  }
  Result<std::shared_ptr<Window>> cards = host_->create_window(4096, deadline);
  TIDE_RETURN_IF_ERROR(cards.status());
  const Card own = {device_->uuid(), device_->is_mig() ? 1u : 0u};
  std::memcpy(static_cast<char*>(cards.value()->own()) + kCardAt, &own, sizeof(own));
  WaitGuard guard;
  guard.timeout =
      std::max(std::chrono::milliseconds(0),
               std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()));
  for (int peer = 0; peer < size(); ++peer) {
    TIDE_RETURN_IF_ERROR(
        host_->signal(0, static_cast<uint32_t*>(cards.value()->peer(peer)) + rank(), 1));
  }
  Status answer;
  for (int peer = 0; peer < size(); ++peer) {
    guard.what = "the GPU of rank " + std::to_string(peer);
    guard.check = [this, peer] { return host_->peer_status(peer); };
    TIDE_RETURN_IF_ERROR(
        host_->wait(0, static_cast<uint32_t*>(cards.value()->own()) + peer, 1, guard));
    Card card;
    std::memcpy(&card, static_cast<char*>(cards.value()->peer(peer)) + kCardAt, sizeof(card));
    if (answer.is_ok()) answer = can_reach(*device_, card.uuid, card.is_mig != 0);
  }
  return answer;
}

Result<std::shared_ptr<Window>> CudaFabricImpl::create_window(int64_t bytes, Deadline deadline) {
  TIDE_RETURN_IF_ERROR(usable());
  const ContextGuard guard(*device_);
  std::vector<DevicePart> own;
  std::shared_ptr<DeviceWindow> window;
  PartExchange exchange;
  exchange.bytes = bytes;
  exchange.make = [&]() -> Result<Descriptor> {
    if (bytes <= 0)
      return Status(ErrorKind::kInvalidUse, "a window of " + std::to_string(bytes) + " bytes");
    if (options_.host.refuse_window) TIDE_RETURN_IF_ERROR(options_.host.refuse_window(bytes));
    Result<DevicePart> part = DevicePart::allocate(device_, bytes);
    TIDE_RETURN_IF_ERROR(part.status());
    own.push_back(std::move(part.value()));
    return own[0].share();
  };
  exchange.use = [&](const std::vector<const Descriptor*>& descriptors) -> Status {
    std::vector<DevicePart> parts;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) {
        parts.push_back(std::move(own[0]));
        continue;
      }
      Result<DevicePart> part =
          DevicePart::import(device_, *descriptors[static_cast<size_t>(peer)]);
      TIDE_RETURN_IF_ERROR(part.status());
      parts.push_back(std::move(part.value()));
    }
    Result<std::shared_ptr<DeviceWindow>> mapped =
        DeviceWindow::map(device_, parts, rank(), bytes, window_map_);
    TIDE_RETURN_IF_ERROR(mapped.status());
    window = std::move(mapped.value());
    const cuda::DriverApi& api = device_->api();
    TIDE_RETURN_IF_ERROR(device_->check(
        api.set_bytes(address(window->own()), 0, static_cast<size_t>(bytes), setup_stream_),
        "cuMemsetD8Async", "clearing a window"));
    return device_->check(api.stream_synchronize(setup_stream_), "cuStreamSynchronize",
                          "clearing a window");
  };
  // The verdicts come after every rank's clearing: nobody writes into a part that its owner still
  // clears.
  TIDE_RETURN_IF_ERROR(exchange_parts(*host_, exchange, deadline));
  return std::shared_ptr<Window>(std::move(window));
}

// Steps ------------------------------------------------------------------------------------------

Status CudaFabricImpl::usable() const {
  if (::getpid() != owner_) {
    return {ErrorKind::kInvalidUse,
            label_ + ": called in a forked child; CUDA does not survive a fork"};
  }
  if (closed_.load(std::memory_order_relaxed))
    return {ErrorKind::kInvalidUse, label_ + ": the fabric is closed"};
  if (watch_ && watch_->is_poisoned())
    return {ErrorKind::kPeerLost, label_ + ": the group has failed"};
  return Status::ok();
}

Status CudaFabricImpl::launch(int queue, const std::string& kernel, ListBuilder& list) {
  list.set_poison(static_cast<const uint32_t*>(words_->own()));
  const Status status = kernels_->launch(queue_of(queue).stream(), kernel, list);
  list.clear();
  return status;
}

Status CudaFabricImpl::copy(int queue, const CopyBlock* blocks, int count) {
  TIDE_RETURN_IF_ERROR(usable());
  const ContextGuard guard(*device_);
  DeviceQueue& to = queue_of(queue);
  ListBuilder
      local;  // copies on the own GPU need SMs however they are made: few, and all in one launch
  for (int i = 0; i < count; ++i) {
    const CopyBlock& block = blocks[i];
    const auto place = window_map_->find(block.to, 1);
    if (place && place->rank != rank()) {
      TIDE_RETURN_IF_ERROR(to.copy(block, place->rank));
    } else if (!local.append(block)) {
      TIDE_RETURN_IF_ERROR(launch(queue, cuda::pack_kernel(), local));
      local.append(block);
    }
  }
  TIDE_RETURN_IF_ERROR(to.flush());
  return launch(queue, cuda::pack_kernel(), local);
}

Status CudaFabricImpl::cast(int queue, const CastBlock* blocks, int count) {
  TIDE_RETURN_IF_ERROR(usable());
  const ContextGuard guard(*device_);
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
      TIDE_RETURN_IF_ERROR(launch(queue, kernel, list));
      list.append(block);
    }
    const bool last_of_kind = i + 1 == count || blocks[i + 1].from_dtype != block.from_dtype ||
                              blocks[i + 1].to_dtype != block.to_dtype;
    if (last_of_kind) TIDE_RETURN_IF_ERROR(launch(queue, kernel, list));
  }
  return Status::ok();
}

Status CudaFabricImpl::accumulate(int queue, const AccumulateBlock* blocks, int count,
                                  const AccumulateOptions& options) {
  TIDE_RETURN_IF_ERROR(usable());
  const ContextGuard guard(*device_);
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
      TIDE_RETURN_IF_ERROR(launch(queue, kernel, list));
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
      TIDE_RETURN_IF_ERROR(launch(queue, kernel, list));
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
  if (place->rank == rank()) return queue_of(queue).signal_own(address(word), value);
  return queue_of(queue).signal_peer(place->rank, address(word), value);
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
  const uint32_t step = watch_->add(queue, address(word), value, guard, nullptr);
  const Status status = queue_of(queue).wait(step, address(word), value);
  if (!status.is_ok()) watch_->take_back(queue);
  return status;
}

Status CudaFabricImpl::mark(int queue, std::function<void()> passed) {
  TIDE_RETURN_IF_ERROR(usable());
  const ContextGuard context(*device_);
  const uint32_t step = watch_->add(queue, 0, 0, WaitGuard(), std::move(passed));
  const Status status = queue_of(queue).wait(step, 0, 0);
  if (!status.is_ok()) watch_->take_back(queue);
  return status;
}

Status CudaFabricImpl::order(cuda::Stream first, cuda::Stream then) {
  TIDE_RETURN_IF_ERROR(usable());
  const ContextGuard context(*device_);
  const cuda::DriverApi& api = device_->api();
  cuda::Event event = nullptr;
  TIDE_RETURN_IF_ERROR(device_->check(api.event_create(&event, cuda::kEventWithoutTiming),
                                      "cuEventCreate", "ordering streams"));
  Status status =
      device_->check(api.event_record(event, first), "cuEventRecord", "ordering streams");
  if (status.is_ok())
    status = device_->check(api.stream_wait_event(then, event, 0), "cuStreamWaitEvent",
                            "ordering streams");
  (void)api.event_destroy(event);  // freed when the device has passed it
  return status;
}

Status CudaFabricImpl::wait_for_stream(int queue, void* user_stream) {
  return order(static_cast<cuda::Stream>(user_stream), queue_of(queue).stream());
}

Status CudaFabricImpl::release_stream(int queue, void* user_stream) {
  TIDE_RETURN_IF_ERROR(queue_of(queue).flush());
  return order(queue_of(queue).stream(), static_cast<cuda::Stream>(user_stream));
}

// Ends -------------------------------------------------------------------------------------------

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
    const uint32_t step = watch_->add(q, 0, 0, WaitGuard(), nullptr);
    if (!queue_of(q).wait(step, 0, 0).is_ok()) watch_->take_back(q);
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

}  // namespace

Result<std::unique_ptr<CudaFabric>> connect_cuda_fabric(const CudaFabricOptions& options,
                                                        KeyValueStore& store) {
  HostFabricOptions host_options = options.host;
  host_options.refuse_window = nullptr;
  Result<std::unique_ptr<Fabric>> host = connect_host_fabric(host_options, store);
  TIDE_RETURN_IF_ERROR(host.status());
  const Deadline deadline = options.host.deadline;
  auto fabric = std::make_unique<CudaFabricImpl>(options, std::move(host.value()));
  TIDE_RETURN_IF_ERROR(vote(fabric->host(), fabric->open_device(), deadline));
  TIDE_RETURN_IF_ERROR(vote(fabric->host(), fabric->meet_peers(deadline), deadline));
  return std::unique_ptr<CudaFabric>(std::move(fabric));
}

}  // namespace tide
