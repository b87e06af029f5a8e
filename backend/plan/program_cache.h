// The programs that one group has used lately, so that a step of training plans nothing anew.
//
// A key names everything a program depends on (the rank and the number of ranks apart, which are
// fixed in a group): the layout by its hash, the options field by field. Least recently used goes.
// One thread at a time; the programs handed out stay valid after they left the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>
#include <variant>

#include "backend/plan/gather_plan.h"
#include "backend/plan/node_gather_plan.h"
#include "backend/plan/node_reduce_plan.h"
#include "backend/plan/reduce_plan.h"

namespace tide {

inline constexpr size_t kProgramsKept = 64;

class ProgramCache {
 public:
  // `topology` (kept, may be null): of a group that spans nodes.
  explicit ProgramCache(int rank, size_t capacity = kProgramsKept,
                        const Topology* topology = nullptr)
      : rank_(rank), topology_(topology), capacity_(capacity) {}

  std::shared_ptr<const Program> gather(const GroupLayout& layout, const GatherOptions& options);
  std::shared_ptr<const Program> reduce(const GroupLayout& layout, const ReduceOptions& options);
  // With a topology of at least two nodes.
  std::shared_ptr<const Program> node_gather(const GroupLayout& layout,
                                             const NodeGatherOptions& options);
  std::shared_ptr<const Program> node_reduce(const GroupLayout& layout,
                                             const NodeReduceOptions& options);

  size_t size() const { return entries_.size(); }
  uint64_t planned() const { return planned_; }  // how often a program was made since creation

 private:
  struct Key {
    uint64_t layout_hash = 0;
    std::variant<GatherOptions, ReduceOptions, NodeGatherOptions, NodeReduceOptions> options;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const;
  };
  struct Entry {
    Key key;
    std::shared_ptr<const Program> program;
  };

  // The entry of `key`, moved to the front; nullptr when there is none.
  std::shared_ptr<const Program> find(const Key& key);
  std::shared_ptr<const Program> keep(Key key, Program program);

  int rank_;
  const Topology* topology_;
  size_t capacity_;
  uint64_t planned_ = 0;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<Key, std::list<Entry>::iterator, KeyHash> index_;
};

}  // namespace tide
