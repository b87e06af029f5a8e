// What several nodes add to a group: operations announced to the network, meetings and memory
// agreed by all nodes, coalesced gathers through a slot.
#include <algorithm>
#include <utility>

#include "backend/engine/group_impl.h"
#include "backend/engine/json_text.h"
#include "backend/layout/hash.h"
#include "backend/plan/batches.h"
#include "backend/plan/cut.h"

namespace tide {
namespace {

constexpr std::chrono::seconds kGoodbyePatience{1};
constexpr int kAreas = 2;

// Everything that must be equal on all ranks.
uint64_t hash_of_call(const CallRecord& record) {
  uint64_t hash = hash_combine(
      kHashSeed, static_cast<uint64_t>(record.kind) << 8 | static_cast<uint64_t>(record.cause));
  for (const uint64_t value :
       {static_cast<uint64_t>(static_cast<int64_t>(record.plan)),
        static_cast<uint64_t>(static_cast<int64_t>(record.slot)), record.program_hash,
        record.layout_hash, record.options, record.scale_bits, record.tensors, record.bytes}) {
    hash = hash_combine(hash, value);
  }
  return hash;
}

// A refusal as one number of a meeting: 1 without one.
int64_t word_of(const std::optional<RefusedMeeting>& refused) {
  if (!refused) return 1;
  return 1 + (int64_t{refused->rank} << 8 | static_cast<int64_t>(refused->refusal));
}

std::optional<RefusedMeeting> refused_by(int64_t word) {
  if (word <= 1) return std::nullopt;
  return RefusedMeeting{static_cast<int>((word - 1) >> 8), static_cast<Refusal>((word - 1) & 255)};
}

}  // namespace

// Pieces of packed gradients and their partial sums start at multiples of 64 bytes, and a partial
// sum takes at most twice the bytes of its gradient.
NodeArea::NodeArea(const Topology& topology, int64_t staging_slice_bytes) {
  const int64_t locals = topology.local_ranks();
  const int64_t batch = std::min<int64_t>({kLargestBatch, locals, topology.nodes()});
  segment_bytes = std::max(
      kPieceAlignment, staging_slice_bytes / (batch * locals) / kPieceAlignment * kPieceAlignment);
  const auto add = [this](Space space, int64_t slices, int64_t slice_bytes) {
    offset[static_cast<size_t>(space)] = bytes;
    bytes += slices * slice_bytes;
  };
  add(Space::kStaging, kAreas * batch * locals * locals, segment_bytes);
  add(Space::kSeat, kAreas * locals * locals, 2 * segment_bytes);
  add(Space::kPartial, kAreas * batch * locals, 2 * segment_bytes);
  add(Space::kBlock, kAreas * batch * locals, 2 * segment_bytes);
  add(Space::kTotal, locals, 2 * segment_bytes);
}

void GroupImpl::announce(const CallRecord& record) {
  if (!context_.spans_nodes()) return;
  const Status begun = context_.network().begin(rail_operation_of(record), hash_of_call(record),
                                                context_.agreement->describe(record));
  if (begun.is_ok()) return;
  (void)context_.break_group(
      Status(begun.kind(), context_.where() + ": " + context_.agreement->describe(record) + ": " +
                               begun.message()),
      true);
}

Status GroupImpl::tell_nodes(const CallRecord& record, std::optional<RefusedMeeting>* refused) {
  if (!context_.spans_nodes()) return Status::ok();
  Result<std::vector<int64_t>> words = caller_.meet_nodes(record, word_of(*refused));
  if (!words.is_ok()) return context_.break_group(words.status(), true);
  for (const int64_t word : words.value()) {
    const std::optional<RefusedMeeting> other = refused_by(word);
    if (other && (!*refused || other->rank < (*refused)->rank)) *refused = other;
  }
  return Status::ok();
}

Status GroupImpl::agree(const Status& own) {
  const auto check = [&](int missing_rank) {
    TIDE_RETURN_IF_ERROR(context_.failure.status());
    TIDE_RETURN_IF_ERROR(context_.look_for_interrupt());
    return context_.fabric().peer_status(missing_rank);
  };
  const std::string ballot = own.is_ok() ? "" : static_cast<char>(own.kind()) + own.message();
  Result<std::vector<std::string>> ballots = vote_.exchange(ballot, deadline(), check);
  if (!ballots.is_ok()) return ballots.status();
  for (size_t rank = 0; rank < ballots.value().size(); ++rank) {
    const std::string& other = ballots.value()[rank];
    if (other.empty()) continue;
    // Not what one rank alone ran into: all go on alike.
    return Status(ErrorKind::kUnsupported, "rank " + std::to_string(rank) + ": " + other.substr(1));
  }
  return Status::ok();
}

Result<std::shared_ptr<ArenaMemory>> GroupImpl::create_memory(int64_t bytes, bool for_puts) {
  Result<std::shared_ptr<ArenaMemory>> created =
      ArenaMemory::create(context_.fabric(), bytes, deadline(), arena_bytes_);
  if (!context_.spans_nodes() || (!created.is_ok() && is_no_refusal(created.status())))
    return created;
  Status agreed = agree(created.status());
  if (agreed.is_ok() && for_puts) agreed = register_memory(*created.value());
  if (agreed.is_ok() && for_puts) regions_.push_back(created.value());
  if (agreed.is_ok()) return created;
  if (agreed.kind() == ErrorKind::kUnsupported) return agreed;
  // Other ranks may have heard something else.
  return Status(ErrorKind::kPeerLost, context_.break_group(agreed, true).message());
}

// The nodes of a rail answer alike; rails may differ.
Status GroupImpl::register_memory(ArenaMemory& memory) {
  const int region = static_cast<int>(regions_.size());
  const Status registered =
      context_.network().add_region(region, {memory.own(), memory.bytes()}, deadline());
  if (!registered.is_ok() && is_no_refusal(registered)) return registered;
  const Status agreed = agree(registered);
  if (!agreed.is_ok() && registered.is_ok() && agreed.kind() == ErrorKind::kUnsupported)
    TIDE_RETURN_IF_ERROR(context_.network().remove_region(region, deadline()));
  if (agreed.is_ok()) memory.set_region(region);
  return agreed;
}

Status GroupImpl::drop_regions() {
  for (size_t region = 0; region < regions_.size(); ++region) {
    const std::shared_ptr<ArenaMemory>& memory = regions_[region];
    if (!memory || memory == staging_.memory || memory == list_slot_.memory) continue;
    const bool has_slot = std::any_of(slots_.begin(), slots_.end(), [&](const auto& slot) {
      return slot.second.range.memory == memory;
    });
    if (has_slot) continue;
    TIDE_RETURN_IF_ERROR(context_.network().remove_region(static_cast<int>(region), deadline()));
    regions_[region] = nullptr;
  }
  return Status::ok();
}

void GroupImpl::close_network(const Status& failed) {
  if (!context_.spans_nodes()) return;
  if (!failed.is_ok()) context_.network().fail(failed);
  const Status closed = context_.network().close(Clock::now() + kGoodbyePatience);
  // A peer may still write there: the pages stay mapped, and nobody gets them again.
  if (!closed.is_ok()) new std::vector<std::shared_ptr<ArenaMemory>>(regions_);
  regions_.clear();
}

std::string GroupImpl::nodes() const {
  if (!context_.spans_nodes()) return "{}";
  const Topology& topology = context_.topology();
  const NetworkCapabilities& network = context_.network().capabilities();
  const int local = topology.local(context_.rank());
  std::string notes = rail_note_.empty() ? "" : quoted(rail_note_);
  for (const std::string& note : network.notes) notes += (notes.empty() ? "" : ", ") + quoted(note);
  return "{\"nodes\": " + std::to_string(topology.nodes()) +
         ", \"local_ranks\": " + std::to_string(topology.local_ranks()) +
         ", \"node\": " + std::to_string(topology.node(context_.rank())) +
         ", \"local\": " + std::to_string(local) +
         ", \"rail\": " + std::to_string(topology.rail(local)) +
         ", \"device\": " + quoted(network.device) +
         ", \"transport\": " + quoted(network.transport) +
         ", \"version\": " + quoted(network.version) + ", \"notes\": [" + notes + "]}";
}

// A coalesced gather lands in a slot of its own and goes on to the outputs from there.
Status GroupImpl::bind_list_between_nodes(CallRecord record, Binding* binding) {
  const GroupLayout& layout = *binding->layout;
  const int64_t bytes = align_slot(layout.slot_bytes());
  if (bytes == 0) return Status::ok();
  if (list_slot_.bytes < bytes) {
    // The new one first: its meeting finds out whether all ranks are in this call.
    TIDE_RETURN_IF_ERROR(ensure_area(record, *binding, &list_slot_, bytes));
    list_user_ = nullptr;
    TIDE_RETURN_IF_ERROR(drop_regions());
  }
  binding->slot = {list_slot_.memory, list_slot_.offset, bytes};
  if (list_user_) binding->after.push_back(list_user_);
  for (int p = 0; p < layout.size(); ++p) {
    const int64_t size =
        layout.parameter(p).unsharded_numel * dtype_bytes(layout.parameter(p).dtype);
    if (size == 0) continue;
    binding->unpacks.push_back({binding->outputs[p],
                                binding->slot.at(context_.rank()) + layout.slot_offset(p), 1, size,
                                size, size});
  }
  return Status::ok();
}

}  // namespace tide
