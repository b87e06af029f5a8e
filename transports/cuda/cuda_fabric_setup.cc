// How ranks get a CUDA fabric: votes, queues' words, who can reach whom, windows.
#include <algorithm>
#include <cstring>

#include "transports/cuda/cuda_fabric_impl.h"
#include "transports/host/part_exchange.h"

namespace tide {
namespace {

using cuda::ContextGuard;
using cuda::DeviceContext;
using cuda::DevicePart;
using cuda::DevicePointer;
using cuda::DeviceWindow;
using cuda::KernelLibrary;
using cuda::WaitWatch;

DevicePointer address(const void* pointer) { return reinterpret_cast<DevicePointer>(pointer); }

}  // namespace

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
      DeviceWindow::map(device_, std::move(parts), 0, lines * kLineBytes, nullptr);
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
  shares_gpu_.assign(static_cast<size_t>(size()), 0);
  for (int peer = 0; peer < size(); ++peer) {
    guard.what = "the GPU of rank " + std::to_string(peer);
    guard.check = [this, peer] { return host_->peer_status(peer); };
    TIDE_RETURN_IF_ERROR(
        host_->wait(0, static_cast<uint32_t*>(cards.value()->own()) + peer, 1, guard));
    Card card;
    std::memcpy(&card, static_cast<char*>(cards.value()->peer(peer)) + kCardAt, sizeof(card));
    shares_gpu_[static_cast<size_t>(peer)] = card.uuid == own.uuid ? 1 : 0;
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
        DeviceWindow::map(device_, std::move(parts), rank(), bytes, window_map_);
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

Status CudaFabricImpl::multicast_support() const {
  const auto on_own_gpu = std::count(shares_gpu_.begin(), shares_gpu_.end(), 1);
  return cuda::multicast_support(*device_, options_.multicast, size(), on_own_gpu > 1);
}

// A peer that died, or time that ran out, is no refusal: then the group cannot go on.
Status CudaFabricImpl::vote_on_multicast(Deadline deadline) {
  const Status answer = vote_on(*host_, multicast_support(), deadline);
  capabilities_.multicast = answer.is_ok();
  capabilities_.no_multicast = answer.message();
  return answer.kind() == ErrorKind::kUnsupported ? Status::ok() : answer;
}

Status CudaFabricImpl::open_to_all(Window& window, Deadline deadline) {
  TIDE_RETURN_IF_ERROR(usable());
  const ContextGuard guard(*device_);
  auto& opened = static_cast<DeviceWindow&>(window);
  Result<std::unique_ptr<cuda::Multicast>> multicast = cuda::Multicast::open(
      device_, *host_, multicast_support(), opened.own_part(), multicast_map_, deadline);
  if (multicast.is_ok()) {
    opened.set_multicast(std::move(multicast.value()));
    return Status::ok();
  }
  const ErrorKind kind = multicast.status().kind();
  const bool refused =
      kind == ErrorKind::kUnsupported || kind == ErrorKind::kCuda || kind == ErrorKind::kSystem;
  return Status(refused ? ErrorKind::kUnsupported : kind, multicast.status().message());
}

Result<std::unique_ptr<CudaFabric>> connect_cuda_fabric(const CudaFabricOptions& options,
                                                        KeyValueStore& store) {
  HostFabricOptions host_options = options.host;
  host_options.refuse_window = nullptr;
  Result<std::unique_ptr<Fabric>> host = connect_host_fabric(host_options, store);
  TIDE_RETURN_IF_ERROR(host.status());
  const Deadline deadline = options.host.deadline;
  auto fabric = std::make_unique<CudaFabricImpl>(options, std::move(host.value()));
  TIDE_RETURN_IF_ERROR(vote_on(fabric->host(), fabric->open_device(), deadline));
  TIDE_RETURN_IF_ERROR(vote_on(fabric->host(), fabric->meet_peers(deadline), deadline));
  TIDE_RETURN_IF_ERROR(fabric->vote_on_multicast(deadline));
  return std::unique_ptr<CudaFabric>(std::move(fabric));
}

}  // namespace tide
