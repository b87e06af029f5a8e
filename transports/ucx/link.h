// One group on a rail, as the progress thread knows it: a worker, two endpoints per peer (data for
// puts, control for messages), remote keys, and what is under way. Everything here runs on the
// rail's progress thread.
//
// A put goes out chunk by chunk on the data endpoint. Behind the head's last chunk, and behind the
// last one, the endpoint is flushed; when the flush says that the bytes lie at the peer, the event
// goes out on the control endpoint, and the peer's handler counts it on its board. UCX promises no
// other order between puts and messages.
//
// Life: open -> connect -> (up) -> begin_close -> step_close until closed. The first error is kept
// on the board; the link then drops what waits, tells the peers, and posts nothing more. Closing
// cuts the connections (after an error) or ends them in order; either way it lasts until no request
// of UCX is left, or until kGiveUp: then worker and link are left alone for good (rail.h), and
// memory that they may still reach must be, too.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transports/event_board.h"
#include "transports/ucx/message.h"
#include "transports/ucx/rail.h"

namespace tide {

class UcxLink {
 public:
  struct RemoteRegion {
    uint64_t base = 0;
    std::string key;  // packed
  };

  UcxLink(UcxRail& rail, std::shared_ptr<EventBoard> board, std::chrono::milliseconds peer_timeout);
  ~UcxLink();
  UcxLink(const UcxLink&) = delete;
  UcxLink& operator=(const UcxLink&) = delete;

  Status open();  // makes the worker
  Result<std::string> address();
  // Endpoints to all nodes but the own one, in node order, as on every node.
  Status connect(const std::vector<std::string>& addresses, uint64_t epoch);
  // (transport, device) of the endpoints' lanes, each pair once.
  Result<std::vector<std::pair<std::string, std::string>>> lanes();
  // From now on a peer that is silent for the peer timeout is lost.
  void watch_silence();

  // Memory that puts of this link read or write, kept for as long as they may.
  void keep(std::shared_ptr<const void> memory) { kept_ = std::move(memory); }

  Result<RemoteRegion> map_region(int id, const MemoryBlock& block);
  Status open_region(int id, const std::vector<RemoteRegion>& remote);  // by node
  void unmap_region(int id);
  Status map_source(const MemoryBlock& block);
  void unmap_source(const void* base);

  void put(std::shared_ptr<Transfer> transfer);
  void signal(int node, const Event& event, int64_t amount, uint64_t hash);

  // Sticky. `node` is where the error came from, -1 for this one; the listener hears of it if
  // `tell`.
  void break_off(const Status& reason, int node, bool tell);
  // The rest of it where the board is broken already: drops what waits, tells the peers and the
  // listener.
  void after_break(const Status& reason, int node, bool tell);
  void say_goodbye() { send_to_all(MessageKind::kGoodbye, {}); }
  // Every peer has heard this node's goodbye, or can hear nothing any more.
  bool goodbye_is_heard() const;
  void begin_close(bool cut, std::function<void(const Status&)> closed);
  bool is_closing() const { return state_ == State::kSpeaking || state_ == State::kClosing; }
  bool is_closed() const { return state_ == State::kClosed; }

  // For the rail's loop.
  bool progress();  // true if anything moved
  bool arm();       // false: something is there, progress again
  int descriptor() const { return descriptor_; }
  void keep_time(Deadline now);
  void post_chunk(int flow, const Chunk& chunk);
  void set_first_flow(int flow) { first_flow_ = flow; }
  int first_flow() const { return first_flow_; }
  int nodes() const { return board_->nodes(); }

  void set_listener(std::function<void(int, const Status&)> listener);
  uint64_t foreign_messages() const { return foreign_messages_.load(std::memory_order_relaxed); }

 private:
  enum class State : uint8_t { kOpen, kSpeaking, kClosing, kClosed };
  struct Endpoint {
    UcxLink* link = nullptr;
    int node = -1;
    const char* name = "";
    ucp_ep_h handle = nullptr;
  };
  struct Peer {
    Endpoint data;
    Endpoint control;
    bool failed = false;
    bool heard_goodbye = false;  // ours
    Deadline heard;
    Status trouble;  // an endpoint broke; judged a moment later, as a goodbye may be on its way
    Deadline trouble_since;
    std::map<int, ucp_rkey_h> keys;
    std::map<int, uint64_t> bases;
  };
  struct Region {
    ucp_mem_h handle = nullptr;
    MemoryBlock block;
  };
  // What a request's callback needs; the request owns it.
  struct InFlight {
    enum class Kind : uint8_t { kChunk, kFlush, kMessage, kLastWords, kClose };
    Kind kind = Kind::kChunk;
    UcxLink* link = nullptr;
    int node = -1;
    std::shared_ptr<Transfer> transfer;  // kChunk, kFlush
    int64_t bytes = 0;                   // kChunk
    EventKind event = EventKind::kHead;  // kFlush: what it tells
    int64_t ends_post_of = -1;           // kMessage: the operation whose post is over with it
    std::string text;                    // kMessage: sent from here
  };

  Status make_endpoint(Endpoint& endpoint, const std::string& address);
  Result<ucp_mem_h> map(const MemoryBlock& block);
  ucp_mem_h handle_of(const void* from, int64_t bytes) const;
  void flush_then_tell(int node, const std::shared_ptr<Transfer>& transfer, EventKind event);
  void send(int node, const Message& message, const std::string& text, int64_t ends_post_of);
  void send_to_all(MessageKind kind, const std::string& text);
  Message message_of(uint8_t kind) const;
  // Counts the request that `call` makes, and ends it at once if it is over already.
  void start(std::unique_ptr<InFlight> flight,
             const std::function<ucs_status_ptr_t(ucp_request_param_t&)>& call);
  void finished(std::unique_ptr<InFlight> flight, ucs_status_t status);
  void endpoint_failed(int node, ucs_status_t status);
  void received(const void* header, size_t header_bytes, const std::string& text);
  void close_endpoints();
  void step_close(Deadline now);
  std::string failed(const std::string& what, ucs_status_t status) const;

  static void on_request(void* request, ucs_status_t status, void* user_data);
  static void on_endpoint_error(void* argument, ucp_ep_h handle, ucs_status_t status);
  static ucs_status_t on_message(void* argument, const void* header, size_t header_bytes,
                                 void* data, size_t bytes, const ucp_am_recv_param_t* parameters);

  UcxRail& rail_;
  const UcxApi& api_;
  const std::shared_ptr<EventBoard> board_;
  const std::chrono::milliseconds peer_timeout_;
  ucp_worker_h worker_ = nullptr;
  int descriptor_ = -1;
  int first_flow_ = 0;
  uint64_t epoch_ = 0;
  std::vector<Peer> peers_;  // by node; never resized: endpoints' callbacks point into it
  std::map<int, Region> regions_;
  std::map<const void*, Region> sources_;
  std::shared_ptr<const void> kept_;
  std::vector<std::pair<std::string, std::string>> early_;  // messages from before connect()
  int64_t in_flight_ = 0;
  int64_t last_words_ = 0;
  State state_ = State::kOpen;
  bool cut_ = false;
  bool watching_silence_ = false;
  Deadline speaking_until_;
  Deadline closing_until_;
  Deadline next_heartbeat_;
  Deadline last_look_;
  std::function<void(const Status&)> closed_;
  std::mutex listener_mutex_;
  std::function<void(int, const Status&)> listener_;
  std::atomic<uint64_t> foreign_messages_{0};
};

}  // namespace tide
