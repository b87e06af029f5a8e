// Worked example, a gather of one bf16 parameter of 6 elements on 3 ranks: rank 1's shard holds
// contents s, s + 1 (cells of 2 bytes). The step "copy piece 0 of shard 1: shard -> slot of 2"
// reads both cells of rank 1's shard memory and writes them at bytes 4 and 6 of rank 2's slot. When
// rank 2 uses the slot, bytes 4 and 6 must hold s and s + 1.
#include "backend/plan/checker_memory.h"

#include <algorithm>
#include <numeric>

#include "backend/layout/hash.h"

namespace tide {
namespace {

enum class Stands : uint64_t { kShard = 1, kCastShard, kGradient, kSum, kZero, kPartial, kTotal };

// Far apart for different things, so that counting up by cells never meets another content; never
// 0.
uint64_t content_of(Stands stands, std::initializer_list<int> parts) {
  uint64_t hash = hash_combine(kHashSeed, static_cast<uint64_t>(stands));
  for (int part : parts) hash = hash_combine(hash, static_cast<uint64_t>(part));
  return hash | 1;
}

}  // namespace

CheckerMemory::CheckerMemory(const CheckedSequence& sequence)
    : sequence_(sequence),
      granule_(1),
      shadow_(1),
      pushed_bytes_(static_cast<size_t>(sequence.processes), 0),
      rail_bytes_(static_cast<size_t>(sequence.processes), 0) {
  for (const CheckedOperation& checked : sequence.operations) {
    bindings_.push_back(bind(checked));
    amounts_.emplace_back(checked.programs.size());
  }
  number_shard_versions();
  granule_ = find_granule();
  shadow_ = ShadowMemory(granule_);
  make_regions();
  preset_shards();
}

bool CheckerMemory::is_reduce(int index) const {
  return operation(index).programs.front()->direction == Direction::kReduce;
}

int CheckerMemory::process_of(int index, int rank) const {
  return sequence_.groups[operation(index).group][rank];
}

CheckerMemory::Binding CheckerMemory::bind(const CheckedOperation& checked) {
  const GroupLayout& layout = *checked.layout;
  const bool reduce = checked.programs.front()->direction == Direction::kReduce;
  Binding binding;
  binding.element_bytes.assign(static_cast<size_t>(layout.size()), 0);
  for (int p = 0; p < layout.size() && !reduce; ++p) {
    binding.element_bytes[p] = dtype_bytes(layout.parameter(p).dtype);
  }
  for (size_t i = 0; i < checked.subset.size() && reduce; ++i) {
    binding.element_bytes[checked.subset[i]] = dtype_bytes(checked.gradient_dtypes[i]);
  }
  for (int p = 0; p < layout.size(); ++p) {
    const Parameter& parameter = layout.parameter(p);
    const int64_t bytes = binding.element_bytes[p];
    binding.shard_offsets.push_back(binding.shards_bytes);
    binding.gradient_offsets.push_back(binding.gradients_bytes);
    binding.summed_offsets.push_back(binding.summed_bytes);
    binding.shards_bytes +=
        aligned_place_bytes(parameter.shard_numel * dtype_bytes(parameter.shard_dtype));
    binding.gradients_bytes += aligned_place_bytes(parameter.unsharded_numel * bytes);
    binding.summed_bytes += aligned_place_bytes(parameter.shard_numel * bytes);
    binding.unsharded_bytes += parameter.unsharded_numel * bytes;
    binding.result_bytes += (reduce ? parameter.shard_numel : parameter.unsharded_numel) * bytes;
  }
  return binding;
}

void CheckerMemory::number_shard_versions() {
  std::map<std::pair<int, int>, int> versions;
  for (const ScriptItem& item : sequence_.script) {
    int& version = versions[{operation(item.operation).group, operation(item.operation).shards}];
    if (item.action == Action::kIssue) bindings_[item.operation].shard_version = version;
    if (item.action == Action::kUpdateShards) ++version;
  }
}

int64_t CheckerMemory::find_granule() const {
  int64_t granule = kPlaceAlignment;
  for (size_t o = 0; o < bindings_.size(); ++o) {
    const CheckedOperation& checked = sequence_.operations[o];
    for (int p = 0; p < checked.layout->size(); ++p) {
      const Parameter& parameter = checked.layout->parameter(p);
      for (int64_t bytes : {bindings_[o].element_bytes[p], dtype_bytes(parameter.shard_dtype)}) {
        for (int64_t numel : {parameter.shard_numel / parameter.rows, parameter.unsharded_numel}) {
          granule = std::gcd(granule, numel * bytes);
        }
      }
    }
    for (const auto& program : checked.programs) {
      granule = std::gcd(std::gcd(granule, program->slice_bytes), program->partial_bytes);
      for (const Piece& piece : program->pieces) {
        const int64_t bytes = bindings_[o].element_bytes[piece.parameter];
        const int64_t shard_bytes =
            dtype_bytes(checked.layout->parameter(piece.parameter).shard_dtype);
        for (int64_t numel : {piece.begin, piece.numel}) {
          granule = std::gcd(std::gcd(granule, numel * bytes), numel * shard_bytes);
        }
        granule = std::gcd(std::gcd(granule, piece.packed_offset), piece.partial_offset);
      }
      for (const Step& step : program->steps) granule = std::gcd(granule, step.head_bytes);
    }
  }
  return granule;
}

template <typename Visit>
void CheckerMemory::for_each_memory(int index, int process, Visit visit) const {
  const CheckedOperation& checked = operation(index);
  const Binding& binding = bindings_[index];
  const Program& program = *checked.programs.front();
  const Space arriving = is_reduce(index) ? Space::kStaging : Space::kLanding;
  const int64_t area_bytes =
      int64_t{program.areas} * program.slices(arriving) * program.slice_bytes;
  if (is_reduce(index)) {
    visit(Key{Kind::kGradients, process, 0, checked.gradients}, binding.gradients_bytes);
    visit(Key{Kind::kOutputs, process, checked.group, checked.outputs}, binding.summed_bytes);
    if (checked.gradient_slot >= 0) {
      visit(Key{Kind::kSlot, process, checked.group, checked.gradient_slot},
            checked.layout->slot_bytes());
    }
    if (leased(index)) {
      visit(Key{Kind::kSlot, process, checked.group, checked.slot},
            std::max(area_bytes, checked.layout->slot_bytes()));
    } else {
      visit(Key{Kind::kStaging, process, checked.group, 0}, area_bytes);
    }
    if (is_node_reduce(index)) {
      const auto visit_partial = [&](Kind kind, Space space, int areas) {
        visit(Key{kind, process, checked.group, 0},
              int64_t{areas} * program.slices(space) * program.partial_bytes);
      };
      visit_partial(Kind::kPartial, Space::kPartial, program.areas);
      visit_partial(Kind::kSeats, Space::kSeat, program.areas);
      visit_partial(Kind::kBlocks, Space::kBlock, program.areas);
      visit_partial(Kind::kTotals, Space::kTotal, 1);
    }
    return;
  }
  visit(Key{Kind::kShards, process, checked.group, checked.shards}, binding.shards_bytes);
  if (checked.slot >= 0) {
    visit(Key{Kind::kSlot, process, checked.group, checked.slot}, checked.layout->slot_bytes());
  } else {
    visit(Key{Kind::kOutputs, process, checked.group, checked.outputs}, binding.gradients_bytes);
  }
  visit(Key{Kind::kLanding, process, checked.group, 0}, area_bytes);
}

void CheckerMemory::make_regions() {
  static const char* const kNames[] = {"shards",  "slot",    "gradients", "staging", "landing",
                                       "outputs", "partial", "seats",     "blocks",  "totals"};
  std::map<Key, int64_t> sizes;
  for (size_t o = 0; o < bindings_.size(); ++o) {
    for (int process : sequence_.groups[operation(static_cast<int>(o)).group]) {
      for_each_memory(static_cast<int>(o), process, [&](const Key& key, int64_t bytes) {
        sizes[key] = std::max(sizes[key], bytes);
      });
    }
  }
  for (const auto& [key, bytes] : sizes) {
    const auto [kind, process, group, index] = key;
    regions_[key] = shadow_.add_region(
        std::string(kNames[static_cast<int>(kind)]) + " " + std::to_string(index) + " of process " +
            std::to_string(process) + " in group " + std::to_string(group),
        bytes, passes(kind));
  }
}

// Memory that an operation's bytes only pass through.
bool CheckerMemory::passes(Kind kind) {
  return kind == Kind::kStaging || kind == Kind::kLanding || kind == Kind::kPartial ||
         kind == Kind::kSeats || kind == Kind::kBlocks || kind == Kind::kTotals;
}

int CheckerMemory::region(Kind kind, int process, int group, int index) const {
  const auto found = regions_.find(Key{kind, process, group, index});
  return found == regions_.end() ? -1 : found->second;
}

void CheckerMemory::preset_shards() {
  for (int o = 0; o < static_cast<int>(bindings_.size()); ++o) {
    if (is_reduce(o)) continue;
    for (int rank = 0; rank < operation(o).layout->ranks(); ++rank) {
      const int memory =
          region(Kind::kShards, process_of(o, rank), operation(o).group, operation(o).shards);
      for (int p = 0; p < operation(o).layout->size(); ++p) {
        const Parameter& parameter = operation(o).layout->parameter(p);
        shadow_.preset({memory, bindings_[o].shard_offsets[p],
                        parameter.shard_numel * dtype_bytes(parameter.shard_dtype)},
                       shard_content(o, rank, p, 0));
      }
    }
  }
}

uint64_t CheckerMemory::shard_content(int index, int rank, int parameter, int version) const {
  return content_of(Stands::kShard,
                    {operation(index).group, operation(index).shards, version, rank, parameter});
}

uint64_t CheckerMemory::gathered_content(int index, int rank, int parameter) const {
  const int version = bindings_[index].shard_version;
  const Parameter& described = operation(index).layout->parameter(parameter);
  if (described.dtype == described.shard_dtype)
    return shard_content(index, rank, parameter, version);
  return content_of(Stands::kCastShard,
                    {operation(index).group, operation(index).shards, version, rank, parameter});
}

uint64_t CheckerMemory::gradient_content(int index, int rank, int parameter) const {
  return content_of(Stands::kGradient, {index, rank, parameter});
}

uint64_t CheckerMemory::summed_content(int index, int rank, int parameter) const {
  return content_of(Stands::kSum, {index, rank, parameter});
}

uint64_t CheckerMemory::padding_content(int index, int rank, int parameter) const {
  return content_of(Stands::kZero, {index, rank, parameter});
}

uint64_t CheckerMemory::partial_content(int index, int source_node, int rank, int parameter) const {
  return content_of(Stands::kPartial, {index, source_node, rank, parameter});
}

uint64_t CheckerMemory::total_content(int index, int sources, int rank, int parameter) const {
  return content_of(Stands::kTotal, {index, sources, rank, parameter});
}

CheckerMemory::Place CheckerMemory::unsharded_place(int index, int rank, int parameter) const {
  const CheckedOperation& checked = operation(index);
  const int process = process_of(index, rank);
  const int slot = is_reduce(index) ? checked.gradient_slot : checked.slot;
  if (slot >= 0) {
    return {region(Kind::kSlot, process, checked.group, slot),
            checked.layout->slot_offset(parameter), 0};
  }
  const int64_t offset = bindings_[index].gradient_offsets[parameter];
  if (is_reduce(index)) return {region(Kind::kGradients, process, 0, checked.gradients), offset, 0};
  return {region(Kind::kOutputs, process, checked.group, checked.outputs), offset, 0};
}

int64_t CheckerMemory::valid_bytes(int index, int rank) const {
  const GroupLayout& layout = *operation(index).layout;
  int64_t bytes = 0;
  for (int p = 0; p < layout.size(); ++p)
    bytes += layout.valid_numel(p, rank) * bindings_[index].element_bytes[p];
  return bytes;
}

// The shards of the other nodes' ranks on this rail, once each.
int64_t CheckerMemory::wanted_rail_bytes(int index, int rank) const {
  int64_t bytes = 0;
  for (int other : operation(index).programs[rank]->rail_ranks)
    bytes += other == rank ? 0 : valid_bytes(index, other);
  return bytes;
}

// Each byte that others own (gather), or others' slices of what this rank owns (reduce), once.
int64_t CheckerMemory::wanted_arrivals(int index, int rank) const {
  const GroupLayout& layout = *operation(index).layout;
  const int64_t own_bytes = valid_bytes(index, rank);
  return is_reduce(index) ? own_bytes * (layout.ranks() - 1)
                          : bindings_[index].unsharded_bytes - own_bytes;
}

std::string CheckerMemory::check_amounts() const {
  for (size_t o = 0; o < amounts_.size(); ++o) {
    const bool node_reduce = is_node_reduce(static_cast<int>(o));
    if (node_reduce) {
      if (std::string error = check_node_reduce(static_cast<int>(o)); !error.empty()) return error;
    }
    const Binding& binding = bindings_[o];
    for (size_t rank = 0; rank < amounts_[o].size(); ++rank) {
      const Amount& amount = amounts_[o][rank];
      const std::string who =
          "operation " + std::to_string(o) + ", rank " + std::to_string(rank) + ": ";
      if (amount.result_bytes != binding.result_bytes) {
        return who + "wrote " + std::to_string(amount.result_bytes) +
               " bytes of its result, wanted " + std::to_string(binding.result_bytes);
      }
      if (const int64_t wanted = wanted_arrivals(static_cast<int>(o), static_cast<int>(rank));
          amount.arrived_bytes != wanted && !node_reduce) {
        return who + "other ranks brought " + std::to_string(amount.arrived_bytes) +
               " bytes, wanted " + std::to_string(wanted);
      }
      if (const int64_t wanted = wanted_rail_bytes(static_cast<int>(o), static_cast<int>(rank));
          amount.rail_bytes != wanted && !node_reduce) {
        return who + "the rail brought " + std::to_string(amount.rail_bytes) + " bytes, wanted " +
               std::to_string(wanted);
      }
      if (is_reduce(static_cast<int>(o)) && amount.gradient_bytes != binding.unsharded_bytes) {
        return who + "read " + std::to_string(amount.gradient_bytes) +
               " bytes of gradients, wanted " + std::to_string(binding.unsharded_bytes);
      }
    }
  }
  return "";
}

}  // namespace tide
