// Worked example (the paper's), shards of 2, 1 and 3 elements on each of 4 ranks:
//
//   shard order on a rank   p0 p0 | p1 | p2 p2 p2           shard_offset = 0, 2, 3, 6
//   places                  p0: r0 r0 r1 r1 r2 r2 r3 r3     rank 1's run of p0 starts at 2
//                           p1: r0 r1 r2 r3                 rank 1's run of p1 at 1: 9 over all
//                           p2: r0 r0 r0 r1 r1 r1 ...
//
// Dimension 1, a parameter of 2 rows and 4 columns on 2 ranks: rows = 2, row_numel = 2, row j of
// rank r starts at j * 4 + r * 2: rank 1 owns elements 2 3 and 6 7.
#include "backend/layout/group_layout.h"

#include <algorithm>
#include <limits>

#include "backend/layout/hash.h"

namespace tide {
namespace {

constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();

// a * b and a + b of numbers that are not negative; false when the result needs more than 63 bits.
bool multiply(int64_t a, int64_t b, int64_t* product) {
  return !__builtin_mul_overflow(a, b, product);
}
bool add(int64_t a, int64_t b, int64_t* sum) { return !__builtin_add_overflow(a, b, sum); }

bool align_up(int64_t bytes, int64_t* aligned) {
  if (bytes > kLargest - (kPlaceAlignment - 1)) return false;
  *aligned = aligned_place_bytes(bytes);
  return true;
}

std::string named(const std::vector<Parameter>& parameters, size_t p) {
  return "parameter " + std::to_string(p) + " ('" + parameters[p].name + "')";
}

// Bytes of the larger of a parameter's two types: what any product with its numel must allow for.
int64_t widest_bytes(const Parameter& parameter) {
  return std::max(dtype_bytes(parameter.dtype), dtype_bytes(parameter.shard_dtype));
}

std::string check_parameter(const Parameter& parameter, const std::string& name, int ranks) {
  const auto number = [](int64_t value) { return std::to_string(value); };
  if (parameter.shard_numel < 0)
    return name + ": shard_numel must be >= 0, got " + number(parameter.shard_numel);
  if (parameter.unsharded_numel < 0) {
    return name + ": unsharded_numel must be >= 0, got " + number(parameter.unsharded_numel);
  }
  if (parameter.rows < 1) return name + ": rows must be >= 1, got " + number(parameter.rows);
  if (parameter.shard_numel % parameter.rows != 0) {
    return name + ": rows must divide shard_numel, got " + number(parameter.rows) + " rows and " +
           number(parameter.shard_numel) + " elements";
  }
  int64_t padded_numel = 0;
  if (!multiply(parameter.shard_numel, ranks, &padded_numel)) {
    return name + ": " + number(ranks) + " shards of " + number(parameter.shard_numel) +
           " elements are too many for 63 bits";
  }
  if (parameter.unsharded_numel > padded_numel) {
    return name +
           ": unsharded_numel must be at most ranks * shard_numel = " + number(padded_numel) +
           ", got " + number(parameter.unsharded_numel);
  }
  if (parameter.rows > 1 && parameter.unsharded_numel != padded_numel) {
    return name + ": a parameter of several rows cannot be padded, wanted unsharded_numel = " +
           number(padded_numel) + ", got " + number(parameter.unsharded_numel);
  }
  return "";
}

}  // namespace

std::string GroupLayout::check(const std::vector<Parameter>& parameters, int ranks) {
  if (ranks < 1) return "ranks must be >= 1, got " + std::to_string(ranks);
  if (parameters.size() > static_cast<size_t>(std::numeric_limits<int>::max()))
    return "too many parameters";
  int64_t total_bytes = 0;
  for (size_t p = 0; p < parameters.size(); ++p) {
    const std::string refusal = check_parameter(parameters[p], named(parameters, p), ranks);
    if (!refusal.empty()) return refusal;
    int64_t bytes = 0;
    if (!multiply(parameters[p].shard_numel * ranks, widest_bytes(parameters[p]), &bytes) ||
        !align_up(bytes, &bytes) || !add(total_bytes, bytes, &total_bytes)) {
      return named(parameters, p) + ": the group's bytes up to here are too many for 63 bits";
    }
  }
  return "";
}

GroupLayout::GroupLayout(std::vector<Parameter> parameters, int ranks)
    : parameters_(std::move(parameters)), ranks_(ranks) {
  shard_offsets_.reserve(parameters_.size() + 1);
  slot_offsets_.reserve(parameters_.size() + 1);
  shard_offsets_.push_back(0);
  slot_offsets_.push_back(0);
  hash_ = hash_combine(hash_combine(kHashSeed, static_cast<uint64_t>(ranks)), parameters_.size());
  for (const Parameter& parameter : parameters_) {
    const int64_t element_bytes = dtype_bytes(parameter.dtype);
    int64_t place_bytes = 0;
    align_up(parameter.shard_numel * ranks * element_bytes, &place_bytes);
    shard_offsets_.push_back(shard_offsets_.back() + parameter.shard_numel);
    slot_offsets_.push_back(slot_offsets_.back() + place_bytes);
    shard_bytes_ += parameter.shard_numel * element_bytes;
    hash_ = hash_combine(hash_, static_cast<uint64_t>(parameter.shard_numel));
    hash_ = hash_combine(hash_, static_cast<uint64_t>(parameter.unsharded_numel));
    hash_ = hash_combine(hash_, static_cast<uint64_t>(parameter.rows));
    hash_ = hash_combine(hash_, static_cast<uint64_t>(parameter.dtype) * 256 +
                                    static_cast<uint64_t>(parameter.shard_dtype));
  }
}

int64_t GroupLayout::valid_numel(int p, int rank) const {
  const Parameter& parameter = parameters_[p];
  const int64_t left = parameter.unsharded_numel - rank * parameter.shard_numel;
  return std::clamp<int64_t>(left, 0, parameter.shard_numel);
}

int GroupLayout::blocks(int p, int rank, int64_t begin, int64_t numel, Block blocks[3]) const {
  if (numel <= 0) return 0;
  const Parameter& parameter = parameters_[p];
  // One run, or the runs of a single rank, which lie one behind the other on both sides.
  if (parameter.rows == 1 || ranks_ == 1) {
    blocks[0] = Block{begin, rank * parameter.shard_numel + begin, 1, numel, numel, numel};
    return 1;
  }
  const int64_t row_numel = parameter.shard_numel / parameter.rows;
  const int64_t place_pitch = ranks_ * row_numel;
  int count = 0;
  while (numel > 0) {
    const int64_t row = begin / row_numel;
    const int64_t column = begin % row_numel;
    Block& block = blocks[count++];
    block.shard_begin = begin;
    block.place_begin = row * place_pitch + rank * row_numel + column;
    if (column == 0 && numel >= row_numel) {
      block.rows = numel / row_numel;
      block.row_numel = row_numel;
    } else {
      block.rows = 1;
      block.row_numel = std::min(numel, row_numel - column);
    }
    block.shard_pitch = row_numel;
    block.place_pitch = place_pitch;
    begin += block.rows * block.row_numel;
    numel -= block.rows * block.row_numel;
  }
  return count;
}

}  // namespace tide
