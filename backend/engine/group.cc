#include "backend/engine/group.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "backend/engine/group_impl.h"

namespace tide {
namespace {

constexpr std::chrono::seconds kClosePatience{1};

const char* refusal_text(Refusal refusal) {
  switch (refusal) {
    case Refusal::kNone:
      return "";
    case Refusal::kArenaLimit:
      return "its process would pass the arena limit (TIDE_ARENA_LIMIT)";
    case Refusal::kAllocations:
      return "too many allocations of this group are in use";
  }
  return "unknown reason";
}

}  // namespace

Result<std::shared_ptr<Group>> Group::create(const GroupOptions& options,
                                             std::unique_ptr<Fabric> fabric,
                                             std::shared_ptr<KeyValueStore> store,
                                             std::optional<GroupNodes> nodes) {
  if (nodes && !fabric->capabilities().blocking) {
    return Status(
        ErrorKind::kUnsupported,
        "group '" + options.name + "': between nodes tide serves memory of the host only");
  }
  if (options.staging_slice_bytes < 64 || options.landing_slice_bytes < 64) {
    return Status(ErrorKind::kInvalidUse,
                  "group '" + options.name + "': slices must have at least 64 bytes, got " +
                      std::to_string(options.staging_slice_bytes) + " of staging and " +
                      std::to_string(options.landing_slice_bytes) + " of landing");
  }
  auto group =
      std::make_shared<GroupImpl>(options, std::move(fabric), std::move(store), std::move(nodes));
  TIDE_RETURN_IF_ERROR(group->open());
  return std::shared_ptr<Group>(std::move(group));
}

GroupImpl::GroupImpl(const GroupOptions& options, std::unique_ptr<Fabric> fabric,
                     std::shared_ptr<KeyValueStore> store, std::optional<GroupNodes> nodes)
    : options_(options),
      rail_note_(nodes ? nodes->rail_note : ""),
      context_(options, std::move(fabric), std::move(nodes)),
      completion_(std::make_shared<CompletionThread>()),
      lanes_(&context_),
      enqueuing_(context_.enqueuing() != nullptr ? std::make_unique<EnqueuingExecutor>(&context_)
                                                 : nullptr),
      caller_(&context_, &context_.host()),
      vote_(std::move(store), context_.rank(), context_.ranks()),
      programs_(context_.rank(), kProgramsKept,
                context_.spans_nodes() ? &context_.topology() : nullptr),
      arena_bytes_(std::make_shared<std::atomic<int64_t>>(0)),
      node_area_(context_.spans_nodes() ? NodeArea(context_.topology(), options.staging_slice_bytes)
                                        : NodeArea()) {}

GroupImpl::~GroupImpl() { close(); }

Status GroupImpl::open() {
  context_.fabric().on_peer_failure(
      [this](int rank, const Status& reason) { context_.peer_failed(rank, reason); });
  if (context_.spans_nodes()) {
    context_.network().on_failure(
        [this](int node, const Status& reason) { context_.node_failed(node, reason); });
  }
  const auto make = [this](Fabric& fabric, int64_t bytes) -> Result<std::shared_ptr<Window>> {
    Result<std::shared_ptr<Window>> window = fabric.create_window(bytes, deadline());
    if (window.is_ok()) return window;
    const Status& reason = window.status();
    return Status(reason.kind(), context_.where() + ": no control page: " + reason.message());
  };
  Result<std::shared_ptr<Window>> window =
      make(context_.host(), ControlPage::bytes(context_.ranks()));
  TIDE_RETURN_IF_ERROR(window.status());
  std::shared_ptr<Window> counters;
  if (EnqueuingFabric* fabric = context_.enqueuing()) {
    fabric->on_wait_failure([this](const Status& reason) { context_.wait_failed(reason); });
    Result<std::shared_ptr<Window>> made =
        make(*fabric, ControlPage::counter_bytes(context_.ranks()));
    TIDE_RETURN_IF_ERROR(made.status());
    counters = made.value();
  }
  context_.control =
      std::make_shared<ControlPage>(window.value(), context_.rank(), context_.ranks(), counters);
  context_.agreement = std::make_unique<Agreement>(context_.control, options_.name);
  context_.allocations = std::make_unique<Allocations>(context_.control);
  return Status::ok();
}

Status GroupImpl::usable() const {
  TIDE_RETURN_IF_ERROR(context_.failure.status());
  if (closed_) return invalid("the group is closed");
  return Status::ok();
}

Status GroupImpl::usable(void* stream) const {
  TIDE_RETURN_IF_ERROR(usable());
  return enqueuing_ ? context_.enqueuing()->check_stream(stream) : Status::ok();
}

void GroupImpl::refuse(const std::string& reason) {
  if (!closed_) context_.control->refuse(reason);
}

Status GroupImpl::invalid(const std::string& text) const {
  if (!closed_) context_.control->refuse(text);
  return Status(ErrorKind::kInvalidUse, context_.where() + ": " + text);
}

Result<uint64_t> GroupImpl::next_sequence() {
  TIDE_RETURN_IF_ERROR(usable());
  if (const std::shared_ptr<OperationState> earlier = flight_record_.at(sequence_)) {
    TIDE_RETURN_IF_ERROR(wait_for(*earlier));
  }
  return sequence_++;
}

std::shared_ptr<OperationState> GroupImpl::start(CallRecord record, std::string subject,
                                                 Binding binding, Lane lane, void* stream) {
  auto operation = std::make_shared<OperationState>(record, std::move(subject), completion_);
  const bool moves = !binding.moves.empty();
  const bool rails = context_.spans_nodes();
  operation->binding() = std::move(binding);
  // A gather's shards are read by its rail too.
  operation->expect(enqueuing_ ? enqueuing_->lanes(operation->binding()) : 1 + moves + rails,
                    rails && lane == Lane::kGather ? 2 : 1);
  announce(record);
  context_.control->publish(record);
  flight_record_.add(operation);
  ++operations_;
  if (enqueuing_) {
    enqueuing_->run(operation, stream);
    return operation;
  }
  if (moves) lanes_.submit(Lane::kMove, operation);
  if (rails) {
    lanes_.submit(lane == Lane::kGather ? Lane::kGatherRail : Lane::kReduceRail, operation);
  }
  lanes_.submit(lane, operation);
  return operation;
}

Status GroupImpl::meet(CallRecord record, const Binding* call) {
  Result<uint64_t> sequence = next_sequence();
  if (!sequence.is_ok()) return sequence.status();
  record.sequence = sequence.value();
  if (call != nullptr) {
    const Direction direction = is_reduce(record.cause) ? Direction::kReduce : Direction::kGather;
    context_.control->publish_table(direction, record.sequence, call->descriptors, {});
  }
  // In the flight record like any call; it has no steps, and this thread is its lane.
  const auto operation = std::make_shared<OperationState>(
      record, std::to_string(record.bytes) + " bytes", completion_);
  operation->expect(1, 0);
  operation->lane_started();
  announce(record);
  context_.control->publish(record);
  flight_record_.add(operation);
  const Status met = agree_to_meet(record, call == nullptr ? nullptr : call->layout.get());
  operation->lane_done(met);
  return met;
}

Status GroupImpl::agree_to_meet(const CallRecord& record, const GroupLayout* layout) {
  const Status met = caller_.meet(record, ++meetings_, layout);
  if (!met.is_ok()) return context_.break_group(met, true);
  std::optional<RefusedMeeting> refused;
  for (int rank = 0; rank < context_.ranks(); ++rank) {
    if (!context_.control->has_page(rank)) continue;
    CallRecord other;
    if (context_.control->read(rank, record.sequence, &other) != ControlPage::Found::kYes) {
      // It has met, and made a whole ring of calls without steps since: whether it refused is gone.
      return context_.break_group(
          Status(ErrorKind::kInternal,
                 context_.where() + ": " + context_.agreement->describe(record) + ": rank " +
                     std::to_string(rank) + " is " + std::to_string(kRecords) + " calls ahead"),
          true);
    }
    if (other.refusal != Refusal::kNone && !refused) refused = {rank, other.refusal};
  }
  TIDE_RETURN_IF_ERROR(tell_nodes(record, &refused));
  if (!refused) return Status::ok();
  return Status(ErrorKind::kUnsupported, "group '" + context_.name() +
                                             "': " + context_.agreement->describe(record) +
                                             ": rank " + std::to_string(refused->rank) + ": " +
                                             refusal_text(refused->refusal));
}

Result<std::shared_ptr<ArenaMemory>> GroupImpl::meet_and_create(const CallRecord& wanted,
                                                                int64_t bytes,
                                                                const Binding* call) {
  CallRecord record = wanted;
  if (options_.arena_limit_bytes > 0 &&
      process_arena_bytes() + bytes > options_.arena_limit_bytes) {
    record.refusal = Refusal::kArenaLimit;
  } else if (record.kind == CallKind::kAllocate && !context_.allocations->full().empty()) {
    record.refusal = Refusal::kAllocations;
  }
  TIDE_RETURN_IF_ERROR(meet(record, call));
  Result<std::shared_ptr<ArenaMemory>> memory =
      create_memory(bytes, record.kind != CallKind::kAllocate);
  if (memory.is_ok()) return memory;
  const Status reason(memory.status().kind(), context_.where() + ": " +
                                                  context_.agreement->describe(record) + ": " +
                                                  memory.status().message());
  if (is_no_refusal(reason)) return context_.break_group(reason, true);
  return Status(ErrorKind::kUnsupported, reason.message());
}

Status GroupImpl::ensure_area(const CallRecord& cause, const Binding& call, ArenaRange* area,
                              int64_t bytes) {
  if (area->memory && area->bytes >= bytes) return Status::ok();
  TIDE_RETURN_IF_ERROR(drain());
  CallRecord record = cause;
  record.kind = CallKind::kAreas;
  record.cause = cause.kind;
  Result<std::shared_ptr<ArenaMemory>> memory = meet_and_create(record, bytes, &call);
  if (!memory.is_ok()) return memory.status();
  const bool has_seats = area == &staging_ && context_.spans_nodes();
  if (has_seats || area == &list_slot_) TIDE_RETURN_IF_ERROR(open_to_all(memory.value().get()));
  *area = {memory.value(), 0, bytes};
  return Status::ok();
}

int64_t GroupImpl::staging_area_bytes() const {
  if (context_.spans_nodes()) return node_area_.bytes;
  return 2 * context_.ranks() * options_.staging_slice_bytes;
}

int64_t GroupImpl::landing_area_bytes() const {
  return 2 * context_.ranks() * options_.landing_slice_bytes;
}

Result<std::shared_ptr<void>> GroupImpl::allocate(int64_t bytes) {
  std::lock_guard<CallMutex> calling(call_mutex_);
  TIDE_RETURN_IF_ERROR(usable());
  if (bytes <= 0) return invalid("allocate wants at least one byte, got " + std::to_string(bytes));
  TIDE_RETURN_IF_ERROR(drain());  // the caller may move memory that they read or write into this
  context_.allocations->sweep();
  CallRecord record;
  record.kind = CallKind::kAllocate;
  record.bytes = static_cast<uint64_t>(bytes);
  Result<std::shared_ptr<ArenaMemory>> memory = meet_and_create(record, bytes, nullptr);
  if (!memory.is_ok()) return memory.status();
  return context_.allocations->add(memory.value());
}

GroupCounters GroupImpl::counters() const {
  GroupCounters counters;
  counters.operations = operations_;
  counters.bytes_pushed = context_.bytes_pushed;
  counters.bytes_copied = context_.bytes_copied;
  counters.bytes_summed = context_.bytes_summed;
  counters.bytes_sent = context_.bytes_sent;
  counters.copies_to_all = context_.copies_to_all;
  counters.read_adds = context_.read_adds;
  counters.arena_bytes = *arena_bytes_;
  counters.plans = plan_count_;
  return counters;
}

std::string GroupImpl::no_multicast() const {
  std::lock_guard<std::mutex> lock(multicast_mutex_);
  return no_multicast_;
}

// The same on all ranks, also where only some nodes have it.
Status GroupImpl::open_to_all(ArenaMemory* memory) {
  if (memory == nullptr) return Status::ok();
  const Capabilities& capabilities = context_.fabric().capabilities();
  Status opened = capabilities.multicast
                      ? memory->open_to_all(context_.fabric(), deadline())
                      : Status(ErrorKind::kUnsupported, capabilities.no_multicast);
  if (opened.is_ok() || opened.kind() == ErrorKind::kUnsupported) {
    if (context_.spans_nodes() && capabilities.differs_by_node) opened = agree(opened);
  }
  if (opened.is_ok()) memory->set_open_to_all();
  if (!opened.is_ok() && opened.kind() != ErrorKind::kUnsupported)
    return context_.break_group(opened, true);
  std::lock_guard<std::mutex> lock(multicast_mutex_);
  no_multicast_ = opened.message();
  return Status::ok();
}

std::string GroupImpl::flight_record() const {
  return flight_record_.to_json(context_, options_.flight_record_size);
}

void GroupImpl::close() {
  if (call_mutex_.is_held_here()) {
    // From a signal handler, below which the call still runs: it ends now, and the last owner
    // closes.
    (void)context_.break_group(
        Status(ErrorKind::kPeerLost, context_.where() + ": closed during a call"), true);
    return;
  }
  std::lock_guard<std::mutex> lock(close_mutex_);
  if (closed_.exchange(true)) return;
  const Deadline patience = Clock::now() + kClosePatience;
  std::unique_lock<CallMutex> calls(call_mutex_, std::try_to_lock);
  while (!calls.owns_lock() && Clock::now() < patience) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    calls.try_lock();
  }
  if (!calls.owns_lock()) {
    (void)context_.break_group(
        Status(ErrorKind::kPeerLost, context_.where() + ": closed during a call"), true);
    calls.lock();
  }
  for (const std::shared_ptr<OperationState>& operation : flight_record_.in_flight()) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(patience - Clock::now());
    if (operation->wait(std::max(left, std::chrono::milliseconds(0))).kind() == ErrorKind::kTimeout)
      break;
  }
  if (!flight_record_.in_flight().empty()) {
    (void)context_.break_group(
        Status(ErrorKind::kPeerLost, context_.where() + ": closed while operations were in flight"),
        true);
  }
  lanes_.stop();
  if (!enqueuing_) completion_->stop();
  // A goodbye alone would leave a peer that has not heard of the failure with "rank closed the
  // group".
  const Status failed = context_.failure.status();
  if (!failed.is_ok()) context_.fabric().fail(failed);
  close_network(failed);
  context_.fabric().close();
  if (enqueuing_) {  // no queue and no thread of the fabric uses anything any more
    enqueuing_->drop_kept();
    completion_->stop();
  }
  if (context_.allocations) context_.allocations->clear();
  slots_.clear();
  staging_ = {};
  landing_ = {};
  list_slot_ = {};
}

}  // namespace tide
