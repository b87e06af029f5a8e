// Where the steps of checked programs read and write: turns (operation, process, space, piece) into
// ranges of shadow memory, and knows what every range must hold. Internal to the checker.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "backend/plan/checker.h"
#include "backend/plan/shadow_memory.h"

namespace tide {

// The ranks that `peer` of a step stands for; none when the program knows no such rank in its node.
std::vector<int> targets_of(const Program& program, int peer);

class CheckerMemory {
 public:
  explicit CheckerMemory(const CheckedSequence& sequence);

  void name_threads(std::vector<std::string> names) { shadow_.name_threads(std::move(names)); }

  // Runs one copy, cast or accumulate of `rank`. Empty string, or what is wrong.
  std::string run(const Actor& actor, int operation, int rank, const Step& step);

  // Lands bytes [begin, end) of a put of `rank`, counted over its shards, pieces and rows in order.
  std::string land(const Actor& actor, int operation, int rank, const Step& step, int64_t begin,
                   int64_t end);
  // What a put must bring.
  int64_t put_bytes(int operation, int rank, const Step& step) const;

  // Steps of the script, on the memory of `rank`'s process.
  std::string use_gathered(const Actor& actor, int operation, int rank);
  std::string write_gradients(const Actor& actor, int operation, int rank);
  std::string move_gradients(const Actor& actor, int operation, int rank);
  std::string read_summed(const Actor& actor, int operation, int rank);
  std::string update_shards(const Actor& actor, int operation, int rank);

  // After everything: did every operation write and read exactly as many bytes as its result has?
  std::string check_amounts() const;

  uint64_t canonical() const { return shadow_.canonical(); }
  const std::vector<int64_t>& pushed_bytes() const { return pushed_bytes_; }
  const std::vector<int64_t>& rail_bytes() const { return rail_bytes_; }

 private:
  using Range = ShadowMemory::Range;
  enum class Kind : uint8_t {
    kShards,
    kSlot,
    kGradients,
    kStaging,
    kLanding,
    kOutputs,
    kPartial,
    kSeats,
    kBlocks,
    kTotals
  };
  using Key = std::tuple<Kind, int, int, int>;  // process, group, index

  // A rectangle of bytes of one region.
  struct Place {
    int region = -1;
    int64_t begin_bytes = 0;
    int64_t pitch_bytes = 0;
  };
  // What a step needs to find its places: one row run of one piece.
  struct Run {
    int operation = -1;
    const Program* program = nullptr;
    const Step* step = nullptr;
    const Piece* piece = nullptr;
    Block block;
  };

  // Where parameters lie in the memories of one operation, and what it must move; the same on all
  // ranks.
  struct Binding {
    std::vector<int64_t> element_bytes;  // in flight, by parameter; 0: does not take part
    std::vector<int64_t> shard_offsets;  // of resident shards
    std::vector<int64_t>
        gradient_offsets;  // of unsharded parameters outside slots: gradients, gathered outputs
    std::vector<int64_t> summed_offsets;  // of a reduce's shards
    int64_t shards_bytes = 0;
    int64_t gradients_bytes = 0;
    int64_t summed_bytes = 0;
    int64_t unsharded_bytes = 0;  // without alignment and padding
    int64_t result_bytes = 0;
    int shard_version = 0;  // updates of its shards before it was issued
  };

  static Binding bind(const CheckedOperation& operation);
  static bool passes(Kind kind);
  void number_shard_versions();
  int64_t find_granule() const;
  void make_regions();
  void preset_shards();

  // Calls visit(key, bytes) for every memory that `operation` may touch on `process`.
  template <typename Visit>
  void for_each_memory(int operation, int process, Visit visit) const;

  const CheckedOperation& operation(int index) const { return sequence_.operations[index]; }
  int process_of(int operation, int rank) const;
  int region(Kind kind, int process, int group, int index) const;
  bool leased(int index) const { return operation(index).slot >= 0 && is_reduce(index); }
  bool is_reduce(int index) const;

  Place place(const Run& run, Space space, int rank) const;
  Place unsharded_place(int operation, int rank,
                        int parameter) const;  // its first byte: slot, output or gradient
  std::string run_piece(const Actor& actor, Run run, int rank, const std::vector<int>& targets);
  std::string copy_block(const Actor& actor, const Run& run, int rank, int target_rank);
  std::string cast_block(const Actor& actor, const Run& run, int rank);
  std::string accumulate_block(const Actor& actor, const Run& run, int rank);
  // Reduce between nodes (checker_network.cc).
  std::string accumulate_partial(const Actor& actor, const Run& run, int rank);
  std::string combine_block(const Actor& actor, const Run& run, int rank);
  std::string zero_slices(const Actor& actor, int operation, int rank, const Step& step);
  std::string read_partial(const Actor& actor, const Run& run, Space space, int owner,
                           std::optional<uint64_t> content);
  std::string read_blocks(const Actor& actor, const Run& run, int rank);
  std::string read_seats(const Actor& actor, const Run& run, int rank);
  std::string check_node_reduce(int operation) const;
  Place partial_place(const Run& run, Space space, int process) const;
  int put_shard(int operation, int rank, const Step& step, int index) const;
  int64_t moved_element_bytes(const Run& run) const;  // of what the step moves
  std::string zero_padding(const Actor& actor, const Run& run, int rank);

  // What stands at the first byte of ... ; every further cell holds one more.
  uint64_t shard_content(int operation, int rank, int parameter,
                         int version) const;  // the resident shard
  uint64_t gathered_content(int operation, int rank,
                            int parameter) const;  // the shard in the communication dtype
  uint64_t gradient_content(int operation, int rank,
                            int parameter) const;                          // the unsharded gradient
  uint64_t summed_content(int operation, int rank, int parameter) const;   // the summed shard
  uint64_t padding_content(int operation, int rank, int parameter) const;  // the zeros behind it
  uint64_t partial_content(int operation, int source_node, int rank,
                           int parameter) const;  // a node's sum of the rank's shard
  uint64_t total_content(int operation, int sources, int rank,
                         int parameter) const;  // of the first sources' partial sums
  int64_t partial_element_bytes(int operation, int parameter) const {
    return std::max<int64_t>(4, bindings_[operation].element_bytes[parameter]);
  }
  bool is_node_reduce(int index) const {
    return is_reduce(index) && operation(index).programs.front()->nodes() > 1;
  }
  uint64_t cells(int64_t bytes) const { return static_cast<uint64_t>(bytes / granule_); }

  struct Amount {
    int64_t result_bytes = 0;    // written to slots, outputs or summed shards
    int64_t gradient_bytes = 0;  // read by pushes and sums
    int64_t arrived_bytes = 0;   // brought here by other ranks
    int64_t rail_bytes = 0;      // of these, over the rail
  };

  int64_t wanted_arrivals(int operation, int rank) const;
  int64_t wanted_rail_bytes(int operation, int rank) const;
  int64_t valid_bytes(int operation, int rank) const;  // of the rank's shard, without padding

  const CheckedSequence& sequence_;
  std::vector<Binding> bindings_;  // by operation
  int64_t granule_;
  ShadowMemory shadow_;
  std::map<Key, int> regions_;
  std::vector<std::vector<Amount>> amounts_;  // by operation and rank
  std::vector<int64_t> pushed_bytes_;
  std::vector<int64_t> rail_bytes_;
};

}  // namespace tide
