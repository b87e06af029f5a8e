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

// A copy costs the host so much whatever its size; where the small ones of a call, made to each
// peer in turn, would cost it more than a few launches, a kernel writes them to the peer's memory.
constexpr int64_t kSmallPiece = 64 << 10;  // bytes; the link takes longer than the host for more
constexpr double kCopyMicroseconds = 0.8;
constexpr double kWorthAKernelMicroseconds = 300;

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
  Result<DeviceQueue*> queue_of(int queue);
  Result<DevicePart> allocate(int64_t bytes);
  Status launch(DeviceQueue& queue, const std::string& kernel, ListBuilder& list);
  // Whether a kernel makes the small ones of these copies to peers.
  bool many_small(const CopyBlock* blocks, int count) const;
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
  std::vector<std::unique_ptr<DeviceQueue>> queues_;  // null until the first use
  DevicePointer queue_progress_ = 0;                  // progress_, as the device sees it
  int priority_ = 0;
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
  TIDE_RETURN_IF_ERROR(device_->check(api.host_device_pointer(&queue_progress_, progress_, 0),
                                      "cuMemHostGetDevicePointer", "making progress words"));
  // High priority places the few CTAs of local kernels at the next free slot; copies to peers take
  // no notice of it.
  int least = 0;
  TIDE_RETURN_IF_ERROR(device_->check(api.stream_priority_range(&least, &priority_),
                                      "cuCtxGetStreamPriorityRange", "making queues"));
  for (cuda::Stream* stream : {&poison_stream_, &setup_stream_}) {
    TIDE_RETURN_IF_ERROR(
        device_->check(api.stream_create(stream, cuda::kStreamNonBlocking, priority_),
                       "cuStreamCreateWithPriority", "making queues"));
  }
  const DevicePointer base = address(words_->own());
  TIDE_RETURN_IF_ERROR(
      device_->check(api.set_bytes(base, 0, static_cast<size_t>(lines * kLineBytes), setup_stream_),
                     "cuMemsetD8Async", "clearing words"));
  TIDE_RETURN_IF_ERROR(device_->check(api.stream_synchronize(setup_stream_), "cuStreamSynchronize",
                                      "clearing words"));
  queues_.resize(static_cast<size_t>(options_.queues));
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

Result<DevicePart> CudaFabricImpl::allocate(int64_t bytes) {
  Result<DevicePart> part = DevicePart::allocate(device_, bytes);
  if (part.is_ok() || part.status().kind() != ErrorKind::kSystem || !options_.make_room)
    return part;
  options_.make_room();
  return DevicePart::allocate(device_, bytes);
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
    Result<DevicePart> part = allocate(bytes);
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

Status CudaFabricImpl::launch(DeviceQueue& queue, const std::string& kernel, ListBuilder& list) {
  list.set_poison(static_cast<const uint32_t*>(words_->own()));
  const Status status = kernels_->launch(queue.stream(), kernel, list);
  list.clear();
  return status;
}

Status CudaFabricImpl::copy(int queue, const CopyBlock* blocks, int count) {
  TIDE_RETURN_IF_ERROR(usable());
  const ContextGuard guard(*device_);
  Result<DeviceQueue*> found = queue_of(queue);
  TIDE_RETURN_IF_ERROR(found.status());
  DeviceQueue& to = *found.value();
  // Copies on the own GPU need SMs however they are made: few, and all in one launch.
  ListBuilder local;
  const bool by_kernel = many_small(blocks, count);
  for (int i = 0; i < count; ++i) {
    const CopyBlock& block = blocks[i];
    if (block.to == block.from) continue;  // a shard that lies at its own place already
    const auto place = window_map_->find(block.to, 1);
    if (place && place->rank != rank()) {
      if (!by_kernel || block.rows * block.row_bytes > kSmallPiece) {
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

bool CudaFabricImpl::many_small(const CopyBlock* blocks, int count) const {
  const auto worth = [this](int64_t copies) {
    return static_cast<double>(copies * (size() - 1)) * kCopyMicroseconds >
           kWorthAKernelMicroseconds;
  };
  if (!worth(count)) return false;
  return worth(std::count_if(blocks, blocks + count, [](const CopyBlock& block) {
    return block.rows * block.row_bytes <= kSmallPiece;
  }));
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
