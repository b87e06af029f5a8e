#include "backend/engine/planning.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

#include "backend/plan/reduce_plan.h"

namespace tide {
namespace {

constexpr int64_t kSlotAlignment = 4096;

class Writer {
 public:
  void number(int64_t value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void text(const std::string& value) {
    number(static_cast<int64_t>(value.size()));
    bytes_ += value;
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  int64_t number() {
    int64_t value = 0;
    if (bytes_.size() - at_ < sizeof(value)) {
      good_ = false;
      return 0;
    }
    std::memcpy(&value, bytes_.data() + at_, sizeof(value));
    at_ += sizeof(value);
    return value;
  }
  std::string text() {
    const int64_t size = number();
    if (!good_ || size < 0 || static_cast<uint64_t>(size) > bytes_.size() - at_) {
      good_ = false;
      return "";
    }
    at_ += static_cast<size_t>(size);
    return bytes_.substr(at_ - static_cast<size_t>(size), static_cast<size_t>(size));
  }
  // A number of entries that each take at least one number.
  int64_t count() {
    const int64_t value = number();
    if (value >= 0 && static_cast<uint64_t>(value) <= bytes_.size() / sizeof(int64_t)) return value;
    good_ = false;
    return 0;
  }
  bool is_good() const { return good_; }
  bool is_at_end() const { return at_ == bytes_.size(); }

 private:
  const std::string& bytes_;
  size_t at_ = 0;
  bool good_ = true;
};

std::string rank_text(size_t rank) { return "rank " + std::to_string(rank); }

std::string parameter_text(const Parameter& parameter) {
  return std::to_string(parameter.shard_numel) + " x " + dtype_name(parameter.shard_dtype) +
         " a shard, " + std::to_string(parameter.unsharded_numel) + " x " +
         dtype_name(parameter.dtype) + " in all, " + std::to_string(parameter.rows) + " rows";
}

bool same_shape(const Parameter& a, const Parameter& b) {
  return a.dtype == b.dtype && a.shard_dtype == b.shard_dtype && a.shard_numel == b.shard_numel &&
         a.unsharded_numel == b.unsharded_numel && a.rows == b.rows;
}

// What differs between rank 0's request and another's; empty when nothing does.
std::string difference(const PlanRequest& first, const PlanRequest& other, size_t rank) {
  if (first.parameters.size() != other.parameters.size()) {
    return "ranks disagree: " + rank_text(rank) + " has " +
           std::to_string(other.parameters.size()) + " parameters, rank 0 has " +
           std::to_string(first.parameters.size());
  }
  for (size_t p = 0; p < first.parameters.size(); ++p) {
    if (same_shape(first.parameters[p], other.parameters[p])) continue;
    return "ranks disagree about parameter " + std::to_string(p) + " ('" +
           first.parameters[p].name + "'): " + rank_text(rank) + " has " +
           parameter_text(other.parameters[p]) + ", rank 0 has " +
           parameter_text(first.parameters[p]);
  }
  const auto flags = [](const PlanRequest& request) {
    return std::string(request.serve_gather ? "gather " : "") +
           (request.serve_reduce ? "reduce " : "") +
           (request.stays_unsharded ? "stays_unsharded " : "") +
           (request.may_lease ? "may_lease " : "") + dtype_name(request.gradient_dtype);
  };
  if (flags(first) == flags(other)) return "";
  return "ranks disagree about options: " + rank_text(rank) + " has " + flags(other) +
         ", rank 0 has " + flags(first);
}

bool is_float(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

// A parameter whose shard cannot be cast as its gather would have to; empty when there is none.
std::string uncastable(const PlanRequest& request) {
  if (!request.serve_gather) return "";
  for (const Parameter& parameter : request.parameters) {
    if (parameter.dtype == parameter.shard_dtype) continue;
    if (is_float(parameter.dtype) && is_float(parameter.shard_dtype)) continue;
    return "parameter '" + parameter.name + "': a gather cannot cast " +
           dtype_name(parameter.shard_dtype) + " to " + dtype_name(parameter.dtype);
  }
  return "";
}

std::string own_refusal(const PlanRequest& request, int ranks) {
  if (!request.refusal.empty()) return request.refusal;
  if (!request.serve_gather && !request.serve_reduce) return "neither direction is asked for";
  if (request.serve_reduce && !is_summable(request.gradient_dtype)) {
    return std::string("gradients of ") + dtype_name(request.gradient_dtype) + " cannot be summed";
  }
  const std::string cast = uncastable(request);
  return cast.empty() ? GroupLayout::check(request.parameters, ranks) : cast;
}

std::string refusal(const std::vector<PlanBallot>& ballots, size_t index) {
  for (size_t rank = 0; rank < ballots.size(); ++rank) {
    const std::string reason =
        own_refusal(ballots[rank].requests[index], static_cast<int>(ballots.size()));
    if (!reason.empty()) return rank_text(rank) + ": " + reason;
  }
  for (size_t rank = 1; rank < ballots.size(); ++rank) {
    const std::string reason =
        difference(ballots[0].requests[index], ballots[rank].requests[index], rank);
    if (!reason.empty()) return reason;
  }
  return "";
}

// Slot and staging of an accepted request. A leased slot must hold the packed slices of all ranks:
// their alignment may take a little more than the places do, gradients of a wider type far more.
void choose_memory(const PlanRequest& request, const GroupLayout& layout, bool leases,
                   PlanAnswer* answer) {
  answer->slot_bytes = request.serve_gather ? layout.slot_bytes() : 0;
  answer->staging = Staging::kNone;
  if (!request.serve_reduce || layout.ranks() == 1) return;
  answer->staging = Staging::kArea;
  if (!request.serve_gather || !request.may_lease || !leases) return;
  ReduceOptions options;
  for (int p = 0; p < layout.size(); ++p) {
    options.subset.push_back(p);
    options.dtypes.push_back(request.gradient_dtype);
  }
  const int64_t bare_bytes =
      layout.shard_numel() * dtype_bytes(request.gradient_dtype) * layout.ranks();
  if (bare_bytes > layout.slot_bytes()) return;
  answer->staging = Staging::kLeased;
  answer->slot_bytes =
      std::max(answer->slot_bytes, packed_shard_bytes(layout, options) * layout.ranks());
}

// Both >= 0 but for what a process that is over its limit has available.
int64_t add_saturated(int64_t available, int64_t freed) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  return available > most - freed ? most : available + freed;
}

// Fills in what the accepted requests need of the arena.
void size_arena(const std::vector<PlanBallot>& ballots, const ArenaState& arena,
                PlanDecision* decision) {
  const PlanBallot& ballot = ballots[0];
  bool shared = false;
  bool leased = arena.shared_leased;
  bool area = false;
  int64_t largest = 0;
  int64_t bytes = 0;
  decision->own_slot_bytes.assign(ballot.requests.size(), 0);
  for (size_t i = 0; i < ballot.requests.size(); ++i) {
    const PlanAnswer& answer = decision->answers[i];
    if (!answer.accepted) continue;
    area = area || answer.staging == Staging::kArea;
    if (answer.slot_bytes == 0) continue;
    if (ballot.requests[i].stays_unsharded) {
      decision->own_slot_bytes[i] = align_slot(answer.slot_bytes);
      bytes += decision->own_slot_bytes[i];
    } else {
      shared = true;
      leased = leased || answer.staging == Staging::kLeased;
      largest = std::max(largest, align_slot(answer.slot_bytes));
    }
  }
  decision->new_shared_slots = 0;
  decision->replaces_shared = false;
  decision->shared_slot_bytes = arena.shared_slot_bytes;
  if (shared) {
    const int wanted = std::max(ballot.prefetch_depth, arena.prefetch_depth) + 1 + (leased ? 1 : 0);
    decision->replaces_shared = largest > arena.shared_slot_bytes;
    decision->shared_slot_bytes = std::max(largest, arena.shared_slot_bytes);
    decision->new_shared_slots = decision->replaces_shared
                                     ? std::max(wanted, arena.shared_slots)
                                     : std::max(0, wanted - arena.shared_slots);
    bytes += decision->new_shared_slots * decision->shared_slot_bytes;
  }
  decision->makes_area = area && !arena.has_area;
  if (decision->makes_area) {
    bytes += arena.node_area_bytes > 0
                 ? arena.node_area_bytes
                 : 2 * static_cast<int64_t>(ballots.size()) * ballot.staging_slice_bytes;
  }
  decision->new_bytes = bytes;
}

}  // namespace

int64_t align_slot(int64_t bytes) {
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

std::string encode(const PlanBallot& ballot) {
  Writer writer;
  writer.number(ballot.prefetch_depth);
  writer.number(ballot.staging_slice_bytes);
  writer.number(ballot.landing_slice_bytes);
  writer.number(ballot.available_bytes);
  writer.number(static_cast<int64_t>(ballot.retirable.size()));
  for (const int plan : ballot.retirable) writer.number(plan);
  writer.number(static_cast<int64_t>(ballot.requests.size()));
  for (const PlanRequest& request : ballot.requests) {
    writer.text(request.name);
    writer.text(request.refusal);
    writer.number((request.serve_gather ? 1 : 0) | (request.serve_reduce ? 2 : 0) |
                  (request.stays_unsharded ? 4 : 0) | (request.may_lease ? 8 : 0));
    writer.number(static_cast<int64_t>(request.gradient_dtype));
    writer.number(static_cast<int64_t>(request.parameters.size()));
    for (const Parameter& parameter : request.parameters) {
      writer.text(parameter.name);
      writer.number(static_cast<int64_t>(parameter.dtype) |
                    static_cast<int64_t>(parameter.shard_dtype) << 8);
      writer.number(parameter.shard_numel);
      writer.number(parameter.unsharded_numel);
      writer.number(parameter.rows);
    }
  }
  return writer.take();
}

Result<PlanBallot> decode(const std::string& bytes) {
  Reader reader(bytes);
  PlanBallot ballot;
  ballot.prefetch_depth = static_cast<int>(reader.number());
  ballot.staging_slice_bytes = reader.number();
  ballot.landing_slice_bytes = reader.number();
  ballot.available_bytes = reader.number();
  ballot.retirable.resize(static_cast<size_t>(reader.count()));
  for (int& plan : ballot.retirable) plan = static_cast<int>(reader.number());
  ballot.requests.resize(static_cast<size_t>(reader.count()));
  for (PlanRequest& request : ballot.requests) {
    request.name = reader.text();
    request.refusal = reader.text();
    const int64_t flags = reader.number();
    request.serve_gather = flags & 1;
    request.serve_reduce = flags & 2;
    request.stays_unsharded = flags & 4;
    request.may_lease = flags & 8;
    request.gradient_dtype = static_cast<DType>(reader.number());
    request.parameters.resize(static_cast<size_t>(reader.count()));
    for (Parameter& parameter : request.parameters) {
      parameter.name = reader.text();
      const int64_t dtypes = reader.number();
      parameter.dtype = static_cast<DType>(dtypes & 255);
      parameter.shard_dtype = static_cast<DType>(dtypes >> 8 & 255);
      parameter.shard_numel = reader.number();
      parameter.unsharded_numel = reader.number();
      parameter.rows = reader.number();
    }
    if (!reader.is_good()) break;
  }
  if (!reader.is_good() || !reader.is_at_end()) {
    return Status(ErrorKind::kInternal,
                  "a ballot of " + std::to_string(bytes.size()) + " bytes cannot be read");
  }
  return ballot;
}

std::vector<int> retired_by_all(const std::vector<PlanBallot>& ballots) {
  std::vector<int> retired = ballots[0].retirable;
  for (const PlanBallot& ballot : ballots) {
    std::vector<int> both;
    std::set_intersection(retired.begin(), retired.end(), ballot.retirable.begin(),
                          ballot.retirable.end(), std::back_inserter(both));
    retired = std::move(both);
  }
  return retired;
}

PlanDecision decide(const std::vector<PlanBallot>& ballots, const ArenaState& arena) {
  PlanDecision decision;
  const PlanBallot& first = ballots[0];
  int64_t available_bytes = std::numeric_limits<int64_t>::max();
  size_t poorest = 0;
  for (size_t rank = 0; rank < ballots.size(); ++rank) {
    const PlanBallot& ballot = ballots[rank];
    const auto numbers = [](const PlanBallot& of) {
      return std::to_string(of.requests.size()) + " groups, prefetch depth " +
             std::to_string(of.prefetch_depth) + ", staging slices of " +
             std::to_string(of.staging_slice_bytes) + " and landing slices of " +
             std::to_string(of.landing_slice_bytes) + " bytes";
    };
    if (numbers(ballot) != numbers(first)) {
      decision.error = Status(ErrorKind::kInvalidUse,
                              "ranks disagree about what they plan: rank 0 has " + numbers(first) +
                                  ", " + rank_text(rank) + " has " + numbers(ballot));
      return decision;
    }
    if (ballot.available_bytes < available_bytes) {
      available_bytes = ballot.available_bytes;
      poorest = rank;
    }
  }
  available_bytes = add_saturated(available_bytes, arena.freed_bytes);
  for (size_t i = 0; i < first.requests.size(); ++i) {
    PlanAnswer answer;
    answer.reason = refusal(ballots, i);
    answer.accepted = answer.reason.empty();
    if (answer.accepted) {
      const GroupLayout layout(first.requests[i].parameters, static_cast<int>(ballots.size()));
      choose_memory(first.requests[i], layout, arena.node_area_bytes == 0, &answer);
    }
    decision.answers.push_back(std::move(answer));
  }
  for (size_arena(ballots, arena, &decision); decision.new_bytes > available_bytes;
       size_arena(ballots, arena, &decision)) {
    PlanAnswer* largest = nullptr;
    for (PlanAnswer& answer : decision.answers) {
      if (answer.accepted && (largest == nullptr || answer.slot_bytes >= largest->slot_bytes))
        largest = &answer;
    }
    if (largest == nullptr) break;
    *largest = PlanAnswer{};
    largest->reason = rank_text(poorest) + ": the arena limit leaves " +
                      std::to_string(available_bytes) + " bytes and these groups need " +
                      std::to_string(decision.new_bytes) +
                      "; raise TIDE_ARENA_LIMIT or lower the prefetch depth";
  }
  return decision;
}

}  // namespace tide
