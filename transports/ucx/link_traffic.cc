// The traffic half of a link: puts, messages, heartbeats, and what breaks it.
#include <algorithm>
#include <cstring>

#include "transports/ucx/link.h"

namespace tide {
namespace {

constexpr size_t kMostText = 2000;
constexpr size_t kMostEarly = 4096;
// A peer that ends may reset one connection before its goodbye on the other has been read.
constexpr std::chrono::milliseconds kGrace{100};
// A progress thread that did not run for so long cannot blame its peers for the silence.
constexpr std::chrono::milliseconds kOwnSleep{1000};

}  // namespace

void UcxLink::put(std::shared_ptr<Transfer> transfer) {
  if (state_ != State::kOpen || !board_->error().is_ok()) return;
  const int flow = first_flow_ + transfer->put.node;
  rail_.transfers().add(flow, std::move(transfer));
}

void UcxLink::post_chunk(int flow, const Chunk& chunk) {
  const int node = flow - first_flow_;
  Peer& peer = peers_[static_cast<size_t>(node)];
  const auto key = peer.keys.find(chunk.transfer->put.region);
  if (state_ != State::kOpen || peer.failed || key == peer.keys.end()) {
    rail_.transfers().landed(flow, chunk.bytes);
    return;
  }
  auto flight = std::make_unique<InFlight>();
  flight->kind = InFlight::Kind::kChunk;
  flight->node = node;
  flight->bytes = chunk.bytes;
  flight->transfer = chunk.transfer;
  const ucp_mem_h memory = handle_of(chunk.from, chunk.bytes);
  const uint64_t to =
      peer.bases[chunk.transfer->put.region] + static_cast<uint64_t>(chunk.to_offset);
  start(std::move(flight), [&](ucp_request_param_t& parameters) {
    parameters.op_attr_mask |= UCP_OP_ATTR_FLAG_MULTI_SEND;
    if (memory != nullptr) {
      parameters.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
      parameters.memh = memory;
    }
    return api_.put_nbx(peer.data.handle, chunk.from, static_cast<size_t>(chunk.bytes), to,
                        key->second, &parameters);
  });
  if (chunk.transfer->failed) return;
  if (chunk.ends_head) flush_then_tell(node, chunk.transfer, EventKind::kHead);
  if (chunk.ends_all) flush_then_tell(node, chunk.transfer, EventKind::kArrival);
}

void UcxLink::flush_then_tell(int node, const std::shared_ptr<Transfer>& transfer,
                              EventKind event) {
  auto flight = std::make_unique<InFlight>();
  flight->kind = InFlight::Kind::kFlush;
  flight->node = node;
  flight->transfer = transfer;
  flight->event = event;
  Peer& peer = peers_[static_cast<size_t>(node)];
  start(std::move(flight), [&](const ucp_request_param_t& parameters) {
    return api_.ep_flush_nbx(peer.data.handle, &parameters);
  });
}

Message UcxLink::message_of(uint8_t kind) const {
  Message message;
  message.kind = kind;
  message.from_node = board_->node();
  message.epoch = epoch_;
  return message;
}

void UcxLink::signal(int node, const Event& event, int64_t amount, uint64_t hash) {
  Message message = message_of(static_cast<uint8_t>(event.kind));
  message.operation = event.operation;
  message.hash = hash;
  message.round = event.round;
  message.part = event.part;
  message.amount = amount;
  send(node, message, {}, static_cast<int64_t>(event.operation));
}

void UcxLink::send(int node, const Message& message, const std::string& text,
                   int64_t ends_post_of) {
  Peer& peer = peers_[static_cast<size_t>(node)];
  if (peer.failed || peer.control.handle == nullptr) return;
  auto flight = std::make_unique<InFlight>();
  flight->kind = InFlight::Kind::kMessage;
  flight->node = node;
  flight->ends_post_of = ends_post_of;
  flight->text = text.substr(0, kMostText);
  const std::string& body = flight->text;  // lives with the request
  start(std::move(flight), [&](ucp_request_param_t& parameters) {
    parameters.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    parameters.flags = UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_COPY_HEADER;
    return api_.am_send_nbx(peer.control.handle, kMessageId, &message, sizeof message,
                            body.empty() ? nullptr : body.data(), body.size(), &parameters);
  });
}

void UcxLink::send_to_all(MessageKind kind, const std::string& text) {
  for (int node = 0; node < static_cast<int>(peers_.size()); ++node) {
    if (node != board_->node()) send(node, message_of(static_cast<uint8_t>(kind)), text, -1);
  }
}

void UcxLink::start(std::unique_ptr<InFlight> flight,
                    const std::function<ucs_status_ptr_t(ucp_request_param_t&)>& call) {
  ucp_request_param_t parameters = {};
  parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  parameters.cb.send = on_request;
  flight->link = this;
  InFlight* const raw =
      flight.release();  // the callback may come, and free it, only from a later progress call
  parameters.user_data = raw;
  ++in_flight_;
  const ucs_status_ptr_t request = call(parameters);
  if (UCS_PTR_IS_PTR(request)) return;
  finished(std::unique_ptr<InFlight>(raw),
           UCS_PTR_IS_ERR(request) ? UCS_PTR_STATUS(request) : UCS_OK);
}

void UcxLink::on_request(void* request, ucs_status_t status, void* user_data) {
  auto* const flight = static_cast<InFlight*>(user_data);
  UcxLink* const link = flight->link;
  link->api_.request_free(request);
  link->finished(std::unique_ptr<InFlight>(flight), status);
}

void UcxLink::finished(std::unique_ptr<InFlight> flight, ucs_status_t status) {
  --in_flight_;
  const bool ok = status == UCS_OK;
  switch (flight->kind) {
    case InFlight::Kind::kChunk:
      rail_.transfers().landed(first_flow_ + flight->node, flight->bytes);
      if (!ok) flight->transfer->failed = true;
      break;
    case InFlight::Kind::kFlush:
      // A flush is content when a put before it failed: nothing is outstanding then.
      if (ok && state_ == State::kOpen && !flight->transfer->failed) {
        const Put& put = flight->transfer->put;
        const bool head = flight->event == EventKind::kHead;
        Message message = message_of(static_cast<uint8_t>(flight->event));
        message.operation = put.operation;
        message.hash = flight->transfer->hash;
        message.round = put.round;
        message.part = put.part;
        message.amount = head ? std::min(put.head_bytes, flight->transfer->total_bytes)
                              : flight->transfer->total_bytes;
        send(flight->node, message, {}, head ? -1 : static_cast<int64_t>(put.operation));
      }
      break;
    case InFlight::Kind::kMessage:
      if (ok && flight->ends_post_of >= 0)
        board_->post_over(static_cast<uint64_t>(flight->ends_post_of));
      break;
    case InFlight::Kind::kLastWords:
      --last_words_;
      return;
    case InFlight::Kind::kClose:
      return;
  }
  if (!ok) endpoint_failed(flight->node, status);
}

void UcxLink::on_endpoint_error(void* argument, ucp_ep_h, ucs_status_t status) {
  const auto* endpoint = static_cast<const Endpoint*>(argument);
  endpoint->link->endpoint_failed(endpoint->node, status);
}

void UcxLink::endpoint_failed(int node, ucs_status_t status) {
  if (state_ != State::kOpen) return;
  Peer& peer = peers_[static_cast<size_t>(node)];
  if (peer.failed || !peer.trouble.is_ok()) return;
  peer.trouble = {ErrorKind::kPeerLost,
                  failed("the connection to " + board_->name_of(node), status)};
  peer.trouble_since = Clock::now();
}

ucs_status_t UcxLink::on_message(void* argument, const void* header, size_t header_bytes,
                                 void* data, size_t bytes, const ucp_am_recv_param_t* parameters) {
  // A rendezvous is never offered by tide; without its data it is judged by its header alone.
  const bool here = (parameters->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0 && data != nullptr;
  const std::string text(here ? static_cast<const char*>(data) : "",
                         here ? std::min(bytes, kMostText) : 0);
  static_cast<UcxLink*>(argument)->received(header, header_bytes, text);
  return UCS_OK;
}

void UcxLink::received(const void* header, size_t header_bytes, const std::string& text) {
  if (peers_.empty()) {  // a peer connected first; its messages count once this node has, too
    if (early_.size() < kMostEarly)
      early_.emplace_back(std::string(static_cast<const char*>(header), header_bytes), text);
    return;
  }
  Message message;
  std::string reason;
  const MessageVerdict verdict =
      read_message(header, header_bytes, epoch_, nodes(), message, reason);
  if (verdict == MessageVerdict::kForeign) {
    foreign_messages_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  if (verdict == MessageVerdict::kBroken || message.from_node == board_->node()) {
    break_off({ErrorKind::kInvalidUse, board_->label() + " received " + reason}, -1, true);
    return;
  }
  const int node = message.from_node;
  Peer& peer = peers_[static_cast<size_t>(node)];
  peer.heard = Clock::now();
  switch (static_cast<MessageKind>(message.kind)) {
    case MessageKind::kHeartbeat:
      return;
    case MessageKind::kGoodbye:
      board_->left(node);
      send(node, message_of(static_cast<uint8_t>(MessageKind::kGoodbyeHeard)), {}, -1);
      return;
    case MessageKind::kGoodbyeHeard:
      peer.heard_goodbye = true;
      return;
    case MessageKind::kFailure:
      break_off({ErrorKind::kPeerLost,
                 board_->label() + ": " + board_->name_of(node) + " reported: " + text},
                node, true);
      return;
    default:
      break;
  }
  const Event event{static_cast<EventKind>(message.kind), message.operation, message.round,
                    message.part};
  const Status counted = board_->counted(node, event, message.amount, message.hash);
  if (!counted.is_ok()) break_off(counted, node, true);
}

void UcxLink::break_off(const Status& reason, int node, bool tell) {
  if (board_->break_with(reason, node)) after_break(reason, node, tell);
}

void UcxLink::after_break(const Status& reason, int node, bool tell) {
  for (int peer = 0; peer < nodes(); ++peer) rail_.transfers().drop(first_flow_ + peer);
  send_to_all(MessageKind::kFailure, reason.to_string());
  if (!tell) return;
  std::lock_guard lock(listener_mutex_);
  if (listener_) listener_(node, reason);
}

void UcxLink::set_listener(std::function<void(int, const Status&)> listener) {
  std::lock_guard lock(listener_mutex_);
  listener_ = std::move(listener);
}

bool UcxLink::progress() {
  if (worker_ == nullptr) return false;
  return api_.worker_progress(worker_) != 0;
}

bool UcxLink::arm() { return worker_ == nullptr || api_.worker_arm(worker_) == UCS_OK; }

void UcxLink::watch_silence() {
  watching_silence_ = true;
  for (Peer& peer : peers_) peer.heard = Clock::now();
}

void UcxLink::keep_time(Deadline now) {
  const auto asleep = now - last_look_;
  last_look_ = now;
  if (state_ != State::kOpen) return step_close(now);
  if (peers_.empty() || !board_->error().is_ok()) return;
  if (now >= next_heartbeat_) {
    next_heartbeat_ = now + rail_.options().heartbeat;
    send_to_all(MessageKind::kHeartbeat, {});
  }
  for (int node = 0; node < nodes(); ++node) {
    Peer& peer = peers_[static_cast<size_t>(node)];
    if (node == board_->node() || peer.failed) continue;
    if (asleep > kOwnSleep) peer.heard = now;
    if (!peer.trouble.is_ok() && now - peer.trouble_since >= kGrace) {
      peer.failed = true;
      if (!board_->has_left(node)) return break_off(peer.trouble, node, true);
    }
    if (watching_silence_ && now - peer.heard > peer_timeout_ && !board_->has_left(node)) {
      peer.failed = true;
      return break_off({ErrorKind::kPeerLost,
                        board_->label() + ": " + board_->name_of(node) + " has been silent for " +
                            std::to_string(peer_timeout_.count()) + " ms on " +
                            rail_.options().device + ": its process is frozen or the link is dead"},
                       node, true);
    }
  }
}

}  // namespace tide
