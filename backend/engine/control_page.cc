#include "backend/engine/control_page.h"

#include <algorithm>
#include <cstring>

namespace tide {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kRecordWords = 16;
constexpr int64_t kHeaderWords = 8;  // sequence + 1, tensors, posted
constexpr int64_t kDescriptorWords = 4;
constexpr int64_t kPostingWords = 2;
constexpr int64_t kTableWords = kHeaderWords + kTableTensors * (kDescriptorWords + kPostingWords);

// Words behind the counters: calls published, records, two tables, releases, the
// last refusal.
constexpr int64_t kCallsWord = 0;
constexpr int64_t kFirstRecord = 8;
constexpr int64_t kFirstTable = kFirstRecord + kRecords * kRecordWords;
constexpr int64_t kFirstRelease = kFirstTable + 2 * kTableWords;
constexpr int64_t kFirstRefusal = kFirstRelease + kAllocations;  // count, call, time, bytes, text
constexpr int64_t kAllWords = kFirstRefusal + 4 + kRefusalBytes / 8;

void store(std::atomic<uint64_t>& word, uint64_t value) {
  word.store(value, std::memory_order_relaxed);
}
uint64_t load(const std::atomic<uint64_t>& word) { return word.load(std::memory_order_relaxed); }

}  // namespace

const char* call_kind_name(CallKind kind) {
  switch (kind) {
    case CallKind::kGather:
      return "gather";
    case CallKind::kReduce:
      return "reduce";
    case CallKind::kGatherList:
      return "gather_list";
    case CallKind::kReduceList:
      return "reduce_list";
    case CallKind::kAllocate:
      return "allocate";
    case CallKind::kAreas:
      return "making of areas";
    case CallKind::kPlan:
      return "plan";
  }
  return "call";
}

int64_t ControlPage::counter_bytes(int ranks) { return kControlCounterCount * ranks * kLine; }

int64_t ControlPage::bytes(int ranks) {
  return counter_bytes(ranks) + kAllWords * static_cast<int64_t>(sizeof(Word));
}

ControlPage::ControlPage(std::shared_ptr<Window> window, int rank, int ranks,
                         std::shared_ptr<Window> counters)
    : window_(std::move(window)), counters_(std::move(counters)), rank_(rank), ranks_(ranks) {
  static_assert(sizeof(Word) == 8 && Word::is_always_lock_free,
                "words are shared between processes");
  for (int r = 0; r < ranks; ++r) {
    pages_.push_back(static_cast<char*>(window_->peer(r)));
    counter_pages_.push_back(counters_ ? static_cast<char*>(counters_->peer(r)) : pages_.back());
  }
}

uint32_t* ControlPage::word(int owner, int counter, int from) const {
  const std::vector<char*>& pages = counter == kMeetCounter ? pages_ : counter_pages_;
  return reinterpret_cast<uint32_t*>(pages[owner] +
                                     (static_cast<int64_t>(counter) * ranks_ + from) * kLine);
}

ControlPage::Word* ControlPage::words(int rank, int64_t first) const {
  return reinterpret_cast<Word*>(pages_[rank] + counter_bytes(ranks_)) + first;
}

int64_t ControlPage::record_words(uint64_t sequence) const {
  return kFirstRecord + static_cast<int64_t>(sequence % kRecords) * kRecordWords;
}

int64_t ControlPage::table_words(Direction direction) const {
  return kFirstTable + (direction == Direction::kGather ? 0 : kTableWords);
}

void ControlPage::publish(const CallRecord& record) {
  Word* words = this->words(rank_, record_words(record.sequence));
  words[0].store(0, std::memory_order_relaxed);
  // Pairs with the acquire loads of words[1..] in read(): who sees a new field also sees that the
  // sequence is gone.
  words[1].store(static_cast<uint64_t>(record.kind) | static_cast<uint64_t>(record.refusal) << 8 |
                     static_cast<uint64_t>(record.cause) << 16,
                 std::memory_order_release);
  words[2].store(static_cast<uint64_t>(static_cast<int64_t>(record.plan)),
                 std::memory_order_release);
  words[3].store(static_cast<uint64_t>(static_cast<int64_t>(record.slot)),
                 std::memory_order_release);
  words[4].store(record.program_hash, std::memory_order_release);
  words[5].store(record.layout_hash, std::memory_order_release);
  words[6].store(record.options, std::memory_order_release);
  words[7].store(record.scale_bits, std::memory_order_release);
  words[8].store(record.tensors, std::memory_order_release);
  words[9].store(record.bytes, std::memory_order_release);
  words[10].store(own_refusals(record.sequence), std::memory_order_release);
  words[0].store(record.sequence + 1, std::memory_order_release);
  this->words(rank_, kCallsWord)->store(record.sequence + 1, std::memory_order_release);
}

ControlPage::Found ControlPage::read(int rank, uint64_t sequence, CallRecord* record) const {
  if (!has_page(rank)) return Found::kNotYet;
  const Word* words = this->words(rank, record_words(sequence));
  const uint64_t before = words[0].load(std::memory_order_acquire);
  if (before != sequence + 1) {
    return calls(rank) > sequence + 1 ? Found::kOverwritten : Found::kNotYet;
  }
  uint64_t values[11];
  for (int i = 1; i < 11; ++i) values[i] = words[i].load(std::memory_order_acquire);
  if (words[0].load(std::memory_order_relaxed) != before) return Found::kOverwritten;
  record->sequence = sequence;
  record->kind = static_cast<CallKind>(values[1] & 255);
  record->cause = static_cast<CallKind>(values[1] >> 16 & 255);
  record->refusal = static_cast<Refusal>(values[1] >> 8 & 255);
  record->plan = static_cast<int>(static_cast<int64_t>(values[2]));
  record->slot = static_cast<int>(static_cast<int64_t>(values[3]));
  record->program_hash = values[4];
  record->layout_hash = values[5];
  record->options = values[6];
  record->scale_bits = values[7];
  record->tensors = values[8];
  record->bytes = values[9];
  record->refused_before = values[10];
  return Found::kYes;
}

uint64_t ControlPage::calls(int rank) const {
  if (!has_page(rank)) return 0;
  return words(rank, kCallsWord)->load(std::memory_order_acquire);
}

void ControlPage::refuse(const std::string& reason) {
  const uint64_t sequence = calls(rank_);
  const uint64_t before = own_refusals(sequence);
  Word* words = this->words(rank_, kFirstRefusal);
  words[0].store(0, std::memory_order_relaxed);
  const size_t bytes = std::min<size_t>(reason.size(), kRefusalBytes);
  store(words[1], sequence);
  store(words[2], static_cast<uint64_t>(Clock::now().time_since_epoch().count()));
  store(words[3], bytes);
  for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
    uint64_t piece = 0;
    std::memcpy(&piece, reason.data() + at, std::min(sizeof(piece), bytes - at));
    store(words[4 + at / sizeof(piece)], piece);
  }
  // Other side: last_refusal(). Who reads two refusals mixed has a torn sentence, no more.
  words[0].store(before + 1, std::memory_order_release);
}

uint64_t ControlPage::own_refusals(uint64_t sequence) const {
  const Word* words = this->words(rank_, kFirstRefusal);
  return load(words[1]) == sequence ? load(words[0]) : 0;
}

ControlPage::RefusedCall ControlPage::last_refusal(int rank) const {
  if (!has_page(rank)) return {};
  RefusedCall refused;
  const Word* words = this->words(rank, kFirstRefusal);
  refused.count = words[0].load(std::memory_order_acquire);
  refused.sequence = load(words[1]);
  refused.when = Clock::time_point(Clock::duration(static_cast<int64_t>(load(words[2]))));
  refused.reason.resize(std::min<uint64_t>(load(words[3]), kRefusalBytes));
  for (size_t at = 0; at < refused.reason.size(); at += sizeof(uint64_t)) {
    const uint64_t piece = load(words[4 + at / sizeof(piece)]);
    std::memcpy(refused.reason.data() + at, &piece,
                std::min(sizeof(piece), refused.reason.size() - at));
  }
  return refused;
}

void ControlPage::publish_table(Direction direction, uint64_t sequence,
                                const std::vector<TensorDescriptor>& tensors,
                                const std::vector<Posting>& postings) {
  Word* header = words(rank_, table_words(direction));
  header[0].store(0, std::memory_order_relaxed);
  const size_t count = std::min<size_t>(tensors.size(), kTableTensors);
  header[1].store(count, std::memory_order_release);
  header[2].store(postings.empty() ? 0 : 1, std::memory_order_release);
  Word* entry = header + kHeaderWords;
  for (size_t i = 0; i < count; ++i, entry += kDescriptorWords) {
    store(entry[0], static_cast<uint64_t>(tensors[i].parameter) << 8 |
                        static_cast<uint64_t>(tensors[i].dtype));
    store(entry[1], static_cast<uint64_t>(tensors[i].shard_numel));
    store(entry[2], static_cast<uint64_t>(tensors[i].unsharded_numel));
    store(entry[3], static_cast<uint64_t>(tensors[i].rows));
  }
  entry = header + kHeaderWords + kTableTensors * kDescriptorWords;
  for (size_t i = 0; i < postings.size() && i < count; ++i, entry += kPostingWords) {
    store(entry[0], static_cast<uint64_t>(postings[i].allocation));
    store(entry[1], static_cast<uint64_t>(postings[i].offset));
  }
  header[0].store(sequence + 1, std::memory_order_release);
}

bool ControlPage::has_table(int rank, Direction direction, uint64_t sequence) const {
  return words(rank, table_words(direction))->load(std::memory_order_acquire) == sequence + 1;
}

int ControlPage::table_size(int rank, Direction direction) const {
  const uint64_t size = load(words(rank, table_words(direction))[1]);
  return static_cast<int>(std::min<uint64_t>(size, kTableTensors));
}

bool ControlPage::table_is_posted(int rank, Direction direction) const {
  return load(words(rank, table_words(direction))[2]) != 0;
}

TensorDescriptor ControlPage::descriptor(int rank, Direction direction, int index) const {
  const Word* entry = words(rank, table_words(direction)) + kHeaderWords + index * kDescriptorWords;
  TensorDescriptor descriptor;
  descriptor.parameter = static_cast<int>(load(entry[0]) >> 8);
  descriptor.dtype = static_cast<DType>(load(entry[0]) & 255);
  descriptor.shard_numel = static_cast<int64_t>(load(entry[1]));
  descriptor.unsharded_numel = static_cast<int64_t>(load(entry[2]));
  descriptor.rows = static_cast<int64_t>(load(entry[3]));
  return descriptor;
}

Posting ControlPage::posting(int rank, int index) const {
  const Word* entry = words(rank, table_words(Direction::kGather)) + kHeaderWords +
                      kTableTensors * kDescriptorWords + index * kPostingWords;
  return {static_cast<int64_t>(load(entry[0])), static_cast<int64_t>(load(entry[1]))};
}

void ControlPage::release(int64_t id) {
  words(rank_, kFirstRelease + id % kAllocations)
      ->store(static_cast<uint64_t>(id / kAllocations) + 1, std::memory_order_release);
}

bool ControlPage::is_released(int rank, int64_t id) const {
  if (!has_page(rank)) return true;
  return words(rank, kFirstRelease + id % kAllocations)->load(std::memory_order_acquire) >=
         static_cast<uint64_t>(id / kAllocations) + 1;
}

}  // namespace tide
