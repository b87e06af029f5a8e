#include "transports/ucx/link.h"

#include <algorithm>

namespace tide {
namespace {

// Last words (a goodbye's answer, a failure's text) get this long to leave before the connections
// are cut.
constexpr std::chrono::milliseconds kSpeaking{300};
constexpr std::chrono::seconds kGiveUp{5};

Deadline tick() { return Clock::now(); }

}  // namespace

UcxLink::UcxLink(UcxRail& rail, std::shared_ptr<EventBoard> board,
                 std::chrono::milliseconds peer_timeout)
    : rail_(rail), api_(rail.api()), board_(std::move(board)), peer_timeout_(peer_timeout) {}

UcxLink::~UcxLink() = default;

std::string UcxLink::failed(const std::string& what, ucs_status_t status) const {
  return board_->label() + ": " + what + " over " + rail_.options().device +
         " failed: " + api_.status_string(status);
}

Status UcxLink::open() {
  ucp_worker_params_t parameters = {};
  parameters.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  parameters.thread_mode = UCS_THREAD_MODE_SINGLE;
  ucs_status_t status = api_.worker_create(rail_.context(), &parameters, &worker_);
  if (status != UCS_OK) {
    worker_ = nullptr;
    return {ErrorKind::kSystem, failed("making a worker", status)};
  }
  status = api_.worker_get_efd(worker_, &descriptor_);
  if (status == UCS_OK) {
    ucp_am_handler_param_t handler = {};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                         UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = kMessageId;
    handler.flags = UCP_AM_FLAG_WHOLE_MSG;
    handler.cb = on_message;
    handler.arg = this;
    status = api_.worker_set_am_recv_handler(worker_, &handler);
  }
  if (status == UCS_OK) return Status::ok();
  api_.worker_destroy(worker_);
  worker_ = nullptr;
  return {ErrorKind::kSystem, failed("preparing a worker", status)};
}

Result<std::string> UcxLink::address() {
  ucp_worker_attr_t attributes = {};
  // The network only: addresses of shared memory would be tried first and cannot work between
  // nodes.
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS | UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS;
  attributes.address_flags = UCP_WORKER_ADDRESS_FLAG_NET_ONLY;
  const ucs_status_t status = api_.worker_query(worker_, &attributes);
  if (status != UCS_OK)
    return Status(ErrorKind::kSystem, failed("asking for the worker's address", status));
  std::string text(reinterpret_cast<const char*>(attributes.address), attributes.address_length);
  api_.worker_release_address(worker_, attributes.address);
  return text;
}

Status UcxLink::make_endpoint(Endpoint& endpoint, const std::string& address) {
  ucp_ep_params_t parameters = {};
  parameters.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                          UCP_EP_PARAM_FIELD_ERR_HANDLER;
  parameters.address = reinterpret_cast<const ucp_address_t*>(address.data());
  parameters.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  parameters.err_handler.cb = on_endpoint_error;
  parameters.err_handler.arg = &endpoint;
  const ucs_status_t status = api_.ep_create(worker_, &parameters, &endpoint.handle);
  if (status == UCS_OK) return Status::ok();
  endpoint.handle = nullptr;
  return {ErrorKind::kSystem, failed("connecting the " + std::string(endpoint.name) +
                                         " endpoint to " + board_->name_of(endpoint.node),
                                     status)};
}

Status UcxLink::connect(const std::vector<std::string>& addresses, uint64_t epoch) {
  epoch_ = epoch;
  peers_ = std::vector<Peer>(addresses.size());
  for (int node = 0; node < nodes(); ++node) {
    Peer& peer = peers_[static_cast<size_t>(node)];
    peer.heard = tick();
    if (node == board_->node()) continue;
    peer.data = {this, node, "data", nullptr};
    peer.control = {this, node, "control", nullptr};
    const std::string& address = addresses[static_cast<size_t>(node)];
    TIDE_RETURN_IF_ERROR(make_endpoint(peer.data, address));
    TIDE_RETURN_IF_ERROR(make_endpoint(peer.control, address));
  }
  const auto early = std::move(early_);
  early_.clear();
  for (const auto& [header, text] : early) received(header.data(), header.size(), text);
  return Status::ok();
}

Result<std::vector<std::pair<std::string, std::string>>> UcxLink::lanes() {
  std::vector<std::pair<std::string, std::string>> found;
  for (const Peer& peer : peers_) {
    for (const Endpoint* endpoint : {&peer.data, &peer.control}) {
      if (endpoint->handle == nullptr) continue;
      ucp_transport_entry_t entries[32] = {};
      ucp_ep_attr_t attributes = {};
      attributes.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
      attributes.transports = {entries, std::size(entries), sizeof entries[0]};
      const ucs_status_t status = api_.ep_query(endpoint->handle, &attributes);
      if (status != UCS_OK)
        return Status(ErrorKind::kSystem, failed("asking for an endpoint's transports", status));
      for (unsigned i = 0; i < attributes.transports.num_entries; ++i) {
        const std::pair<std::string, std::string> lane(entries[i].transport_name,
                                                       entries[i].device_name);
        if (std::find(found.begin(), found.end(), lane) == found.end()) found.push_back(lane);
      }
    }
  }
  return found;
}

Result<ucp_mem_h> UcxLink::map(const MemoryBlock& block) {
  const ucs_memory_type_t wanted =
      block.kind == MemoryKind::kCuda ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
  if (block.kind == MemoryKind::kCuda && !rail_.cuda_memory()) {
    return Status(ErrorKind::kUnsupported,
                  board_->label() + ": UCX cannot register GPU memory for " +
                      rail_.options().device + "; stage it through host memory");
  }
  ucp_mem_map_params_t parameters = {};
  parameters.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                          UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  parameters.address = block.base;
  parameters.length = static_cast<size_t>(block.bytes);
  parameters.memory_type = wanted;
  ucp_mem_h handle = nullptr;
  const std::string what = "registering " + std::to_string(block.bytes) + " bytes";
  ucs_status_t status = api_.mem_map(rail_.context(), &parameters, &handle);
  if (status != UCS_OK) return Status(ErrorKind::kSystem, failed(what, status));
  ucp_mem_attr_t attributes = {};
  attributes.field_mask = UCP_MEM_ATTR_FIELD_MEM_TYPE;
  status = api_.mem_query(handle, &attributes);
  if (status == UCS_OK && attributes.mem_type == wanted) return handle;
  api_.mem_unmap(rail_.context(), handle);
  if (status != UCS_OK) return Status(ErrorKind::kSystem, failed(what, status));
  return Status(ErrorKind::kUnsupported,
                board_->label() + ": UCX takes this memory for another kind than it is (" + what +
                    ", wanted kind " + std::to_string(wanted) + ", got " +
                    std::to_string(attributes.mem_type) + "); is UCX built with CUDA?");
}

Result<UcxLink::RemoteRegion> UcxLink::map_region(int id, const MemoryBlock& block) {
  if (regions_.count(id) != 0) {
    return Status(ErrorKind::kInvalidUse,
                  board_->label() + ": region " + std::to_string(id) + " is registered already");
  }
  const Result<ucp_mem_h> handle = map(block);
  if (!handle.is_ok()) return handle.status();
  void* buffer = nullptr;
  size_t bytes = 0;
  const ucs_status_t status = api_.rkey_pack(rail_.context(), handle.value(), &buffer, &bytes);
  if (status != UCS_OK) {
    api_.mem_unmap(rail_.context(), handle.value());
    return Status(ErrorKind::kSystem, failed("packing a memory key", status));
  }
  RemoteRegion region;
  region.base = reinterpret_cast<uint64_t>(block.base);
  region.key.assign(static_cast<const char*>(buffer), bytes);
  api_.rkey_buffer_release(buffer);
  regions_[id] = {handle.value(), block};
  return region;
}

Status UcxLink::open_region(int id, const std::vector<RemoteRegion>& remote) {
  for (int node = 0; node < nodes(); ++node) {
    if (node == board_->node()) continue;
    Peer& peer = peers_[static_cast<size_t>(node)];
    const RemoteRegion& region = remote[static_cast<size_t>(node)];
    ucp_rkey_h key = nullptr;
    const ucs_status_t status = api_.ep_rkey_unpack(peer.data.handle, region.key.data(), &key);
    if (status != UCS_OK) {
      return {ErrorKind::kSystem,
              failed("opening the memory key of " + board_->name_of(node), status)};
    }
    peer.keys[id] = key;
    peer.bases[id] = region.base;
  }
  return Status::ok();
}

void UcxLink::unmap_region(int id) {
  for (Peer& peer : peers_) {
    const auto key = peer.keys.find(id);
    if (key == peer.keys.end()) continue;
    api_.rkey_destroy(key->second);
    peer.keys.erase(key);
    peer.bases.erase(id);
  }
  const auto region = regions_.find(id);
  if (region == regions_.end()) return;
  api_.mem_unmap(rail_.context(), region->second.handle);
  regions_.erase(region);
}

Status UcxLink::map_source(const MemoryBlock& block) {
  if (sources_.count(block.base) != 0) return Status::ok();
  const Result<ucp_mem_h> handle = map(block);
  if (!handle.is_ok()) return handle.status();
  sources_[block.base] = {handle.value(), block};
  return Status::ok();
}

void UcxLink::unmap_source(const void* base) {
  const auto source = sources_.find(base);
  if (source == sources_.end()) return;
  api_.mem_unmap(rail_.context(), source->second.handle);
  sources_.erase(source);
}

ucp_mem_h UcxLink::handle_of(const void* from, int64_t bytes) const {
  const char* begin = static_cast<const char*>(from);
  const auto holds = [&](const Region& region) {
    const char* base = static_cast<const char*>(region.block.base);
    return begin >= base && begin + bytes <= base + region.block.bytes;
  };
  auto source = sources_.upper_bound(from);
  if (source != sources_.begin() && holds((--source)->second)) return source->second.handle;
  for (const auto& [id, region] : regions_) {
    if (holds(region)) return region.handle;
  }
  return nullptr;
}

bool UcxLink::goodbye_is_heard() const {
  for (int node = 0; node < static_cast<int>(peers_.size()); ++node) {
    const Peer& peer = peers_[static_cast<size_t>(node)];
    if (node != board_->node() && !peer.heard_goodbye && !peer.failed) return false;
  }
  return true;
}

void UcxLink::begin_close(bool cut, std::function<void(const Status&)> closed) {
  if (state_ == State::kClosed) return closed(Status::ok());
  closed_ = std::move(closed);
  cut_ = cut;
  for (int node = 0; node < nodes(); ++node) rail_.transfers().drop(first_flow_ + node);
  state_ = State::kSpeaking;
  speaking_until_ = tick() + kSpeaking;
  for (Peer& peer : peers_) {
    if (peer.control.handle == nullptr || peer.failed) continue;
    auto flight = std::make_unique<InFlight>();
    flight->kind = InFlight::Kind::kLastWords;
    ++last_words_;
    start(std::move(flight), [&](const ucp_request_param_t& parameters) {
      return api_.ep_flush_nbx(peer.control.handle, &parameters);
    });
  }
}

void UcxLink::close_endpoints() {
  state_ = State::kClosing;
  closing_until_ = tick() + kGiveUp;
  for (Peer& peer : peers_) {
    for (Endpoint* endpoint : {&peer.data, &peer.control}) {
      if (endpoint->handle == nullptr) continue;
      const ucp_ep_h handle = std::exchange(endpoint->handle, nullptr);
      auto flight = std::make_unique<InFlight>();
      flight->kind = InFlight::Kind::kClose;
      start(std::move(flight), [&](ucp_request_param_t& parameters) {
        parameters.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
        parameters.flags = UCP_EP_CLOSE_FLAG_FORCE;
        return api_.ep_close_nbx(handle, &parameters);
      });
    }
  }
}

void UcxLink::step_close(Deadline now) {
  if (state_ == State::kSpeaking && (last_words_ == 0 || now >= speaking_until_)) close_endpoints();
  if (state_ != State::kClosing) return;
  if (in_flight_ == 0) {
    while (!regions_.empty()) unmap_region(regions_.begin()->first);
    while (!sources_.empty()) unmap_source(sources_.begin()->first);
    if (worker_ != nullptr) {
      rail_.stop_watching(descriptor_);
      api_.worker_destroy(worker_);
    }
    worker_ = nullptr;
    kept_ = nullptr;
    state_ = State::kClosed;
    closed_(Status::ok());
  } else if (now >= closing_until_) {
    // Never progressed again. Its memory stays registered, so peers may still reach it.
    state_ = State::kClosed;
    rail_.stop_watching(descriptor_);
    rail_.leave_behind(this);
    closed_({ErrorKind::kInternal, board_->label() + ": " + std::to_string(in_flight_) +
                                       " requests of UCX did not end in " +
                                       std::to_string(kGiveUp.count()) +
                                       " s after their connections were cut; memory that peers may "
                                       "write must not be used again"});
  }
}

}  // namespace tide
