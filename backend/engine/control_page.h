// The words through which the ranks of a group meet, in one window: every rank reads all pages and
// writes
//
//   counters  into its peers' pages: the program's and one of the engine's, a cache line each
//   records   into its own page: what it calls, published before the call's first signal
//   tables    into its own page: the tensors of the list call or reduce that runs, one a direction
//   releases  into its own page: which allocations it has dropped
//   refusal   into its own page: the last call that it refused over wrong arguments, and why
//
// Over a fabric that enqueues, the program's counters lie in a second window, in memory that
// streams wait on and the processor never reads; everything else stays where it can.
//
// Ring of records: a call is overwritten kRecords calls later. A call may only be published once
// this rank's call kRecords earlier is done, and a call is only done here when every peer has
// compared it, so nobody misses one. Tables: a direction's calls run one after another, and the
// same argument leaves one table a direction enough.
//
// All words are atomics: a peer that is in another call may read them at any time. A record's
// sequence is taken away first and stored last; read() loads it before and after the fields, and
// publish() says which store meets which load, so a torn record is never taken for a whole one. A
// table's sequence is stored last (release) and loaded first (acquire) by has_table(): what is read
// behind it is whole while its call runs, and later good for messages only.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/plan/program.h"
#include "transports/fabric.h"

namespace tide {

enum class CallKind : uint8_t {
  kGather,
  kReduce,
  kGatherList,
  kReduceList,
  kAllocate,
  kAreas,
  kPlan
};
const char* call_kind_name(CallKind kind);
inline bool is_reduce(CallKind kind) {
  return kind == CallKind::kReduce || kind == CallKind::kReduceList;
}
inline bool is_list(CallKind kind) {
  return kind == CallKind::kGatherList || kind == CallKind::kReduceList;
}

// Counter after the program's, the same kind of word: "I am in this collective call of the calling
// thread".
inline constexpr int kMeetCounter = kCounterCount;
inline constexpr int kControlCounterCount = kCounterCount + 1;

inline constexpr int kRecords = 512;
inline constexpr int kTableTensors = 2048;
inline constexpr int kAllocations = 4096;
inline constexpr int kRefusalBytes = 1024;

// Why a rank cannot join a meeting (allocate, creation of areas); its record says so, and all ranks
// refuse.
enum class Refusal : uint8_t { kNone, kArenaLimit, kAllocations };

// What a rank calls; equal on all ranks but for `refusal` and `refused_before`.
struct CallRecord {
  uint64_t sequence = 0;
  CallKind kind = CallKind::kGather;
  int plan = -1;
  int slot = -1;
  CallKind cause = CallKind::kGather;  // creation of areas: the call that needs them
  Refusal refusal = Refusal::kNone;
  uint64_t program_hash = 0;
  uint64_t layout_hash = 0;  // lists: of the layout; reduces: of subset and dtypes
  uint64_t options = 0;      // packed: operation, output dtype, add, Slot-Reuse
  uint64_t scale_bits = 0;
  uint64_t tensors = 0;
  uint64_t bytes = 0;
  uint64_t refused_before = 0;  // calls of this sequence, by this rank; publish() fills it in
};

struct TensorDescriptor {
  int parameter = 0;
  DType dtype = DType::kBytes;
  int64_t shard_numel = 0;
  int64_t unsharded_numel = 0;
  int64_t rows = 1;

  bool operator==(const TensorDescriptor&) const = default;
};

// Where an output of a gather list lies: an allocation and an offset in it, or nowhere that peers
// can write (-1).
struct Posting {
  int64_t allocation = -1;
  int64_t offset = 0;
};

class ControlPage {
 public:
  static int64_t bytes(int ranks);
  static int64_t counter_bytes(int ranks);

  // `window` has bytes(ranks) bytes; kept. So is `counters` (counter_bytes) where the program's
  // counters have a window of their own.
  ControlPage(std::shared_ptr<Window> window, int rank, int ranks,
              std::shared_ptr<Window> counters = nullptr);

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  // Ranks of other nodes have no page here; to what is asked about them below the answers are:
  // nothing published, nothing refused, everything released.
  bool has_page(int rank) const { return pages_[rank] != nullptr; }

  // The word of `counter` at `owner` that `from` writes; not to be read where there is a window of
  // counters, kMeetCounter aside.
  uint32_t* word(int owner, int counter, int from) const;

  void publish(const CallRecord& record);
  enum class Found { kYes, kNotYet, kOverwritten };
  Found read(int rank, uint64_t sequence, CallRecord* record) const;
  // Calls that `rank` has published so far.
  uint64_t calls(int rank) const;

  // This rank has refused a call before it published anything. One thread at a time.
  void refuse(const std::string& reason);
  struct RefusedCall {
    uint64_t sequence = 0;   // that the call would have had
    uint64_t count = 0;      // refused calls of this sequence; 0: none
    Clock::time_point when;  // the host's clock, the same for all its processes
    std::string reason;      // at most kRefusalBytes of it
  };
  RefusedCall last_refusal(int rank) const;

  // The first kTableTensors of the tensors; `postings` empty: bounce.
  void publish_table(Direction direction, uint64_t sequence,
                     const std::vector<TensorDescriptor>& tensors,
                     const std::vector<Posting>& postings);
  // Whether the table of `sequence` is there; the reads below are of whatever table is there.
  bool has_table(int rank, Direction direction, uint64_t sequence) const;
  int table_size(int rank, Direction direction) const;
  bool table_is_posted(int rank, Direction direction) const;
  TensorDescriptor descriptor(int rank, Direction direction, int index) const;
  Posting posting(int rank, int index) const;

  // Allocation `id` (counted from 0 over the group's life) is used no more by this rank.
  void release(int64_t id);
  bool is_released(int rank, int64_t id) const;

 private:
  using Word = std::atomic<uint64_t>;
  Word* words(int rank, int64_t first) const;
  int64_t record_words(uint64_t sequence) const;
  // Calls of this sequence that this rank has refused.
  uint64_t own_refusals(uint64_t sequence) const;
  int64_t table_words(Direction direction) const;

  std::shared_ptr<Window> window_;
  std::shared_ptr<Window> counters_;
  int rank_;
  int ranks_;
  std::vector<char*> pages_;          // by rank
  std::vector<char*> counter_pages_;  // likewise; pages_ where counters have no window of their own
};

}  // namespace tide
