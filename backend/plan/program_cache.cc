#include "backend/plan/program_cache.h"

#include <utility>

#include "backend/layout/hash.h"

namespace tide {
namespace {

uint64_t hash_of(const GatherOptions& options) {
  uint64_t hash = hash_combine(kHashSeed, static_cast<uint64_t>(options.destination));
  hash = hash_combine(hash, (options.bounced ? 1 : 0) + (options.to_all ? 2 : 0));
  return hash_combine(hash, static_cast<uint64_t>(options.landing_slice_bytes));
}

uint64_t hash_of(const std::vector<int>& subset, const std::vector<DType>& dtypes, uint64_t hash) {
  for (int parameter : subset) hash = hash_combine(hash, static_cast<uint64_t>(parameter));
  for (DType dtype : dtypes) hash = hash_combine(hash, static_cast<uint64_t>(dtype));
  return hash;
}

uint64_t hash_of(const ReduceOptions& options) {
  uint64_t hash = hash_combine(kHashSeed, static_cast<uint64_t>(options.areas));
  hash = hash_combine(hash, static_cast<uint64_t>(options.staging_slice_bytes));
  hash = hash_combine(hash, static_cast<uint64_t>(options.sums));
  return hash_of(options.subset, options.dtypes, hash);
}

uint64_t hash_of(const NodeGatherOptions& options) {
  uint64_t hash = hash_combine(kHashSeed, static_cast<uint64_t>(options.schedule));
  hash = hash_combine(hash, static_cast<uint64_t>(options.pacing));
  hash = hash_combine(hash, options.to_all ? 1 : 0);
  hash = hash_combine(hash, static_cast<uint64_t>(options.head_bytes));
  hash = hash_combine(hash, static_cast<uint64_t>(options.part_bytes));
  return hash_combine(hash, static_cast<uint64_t>(options.landing_slice_bytes));
}

uint64_t hash_of(const NodeReduceOptions& options) {
  uint64_t hash = hash_combine(kHashSeed, static_cast<uint64_t>(options.segment_bytes));
  hash = hash_combine(hash, (options.read_add ? 1 : 0) + (options.behind_read_adds ? 2 : 0));
  return hash_of(options.subset, options.dtypes, hash);
}

}  // namespace

size_t ProgramCache::KeyHash::operator()(const Key& key) const {
  const uint64_t options_hash =
      std::visit([](const auto& options) { return hash_of(options); }, key.options);
  return static_cast<size_t>(hash_combine(key.layout_hash, options_hash + key.options.index()));
}

std::shared_ptr<const Program> ProgramCache::gather(const GroupLayout& layout,
                                                    const GatherOptions& options) {
  Key key{layout.hash(), options};
  if (std::shared_ptr<const Program> program = find(key)) return program;
  return keep(std::move(key), plan_gather(layout, rank_, options));
}

std::shared_ptr<const Program> ProgramCache::reduce(const GroupLayout& layout,
                                                    const ReduceOptions& options) {
  Key key{layout.hash(), options};
  if (std::shared_ptr<const Program> program = find(key)) return program;
  return keep(std::move(key), plan_reduce(layout, rank_, options));
}

std::shared_ptr<const Program> ProgramCache::node_gather(const GroupLayout& layout,
                                                         const NodeGatherOptions& options) {
  Key key{layout.hash(), options};
  if (std::shared_ptr<const Program> program = find(key)) return program;
  return keep(std::move(key), plan_node_gather(layout, *topology_, rank_, options));
}

std::shared_ptr<const Program> ProgramCache::node_reduce(const GroupLayout& layout,
                                                         const NodeReduceOptions& options) {
  Key key{layout.hash(), options};
  if (std::shared_ptr<const Program> program = find(key)) return program;
  return keep(std::move(key), plan_node_reduce(layout, *topology_, rank_, options));
}

std::shared_ptr<const Program> ProgramCache::find(const Key& key) {
  const auto found = index_.find(key);
  if (found == index_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, found->second);
  return found->second->program;
}

std::shared_ptr<const Program> ProgramCache::keep(Key key, Program program) {
  ++planned_;
  entries_.push_front({key, std::make_shared<const Program>(std::move(program))});
  index_.emplace(std::move(key), entries_.begin());
  std::shared_ptr<const Program> kept = entries_.front().program;
  if (entries_.size() > capacity_) {
    index_.erase(entries_.back().key);
    entries_.pop_back();
  }
  return kept;
}

}  // namespace tide
