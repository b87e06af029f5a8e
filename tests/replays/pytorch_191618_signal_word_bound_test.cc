// pytorch 191618: the bound of a signal pad was off by the square of the ranks, so the first word
// behind the pad passed for a channel.
//
// Right: every word through which ranks meet lies inside the page that was asked for, words of
// different purposes never share a line, and what is beyond the last one is refused or never
// written. Shown on pages with guards around them.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <set>

#include "backend/engine/control_page.h"

namespace tide {
namespace {

constexpr int64_t kGuard = 4096;
constexpr char kPattern = 0x5a;

class GuardedWindow : public Window {
 public:
  GuardedWindow(int64_t bytes, int ranks) : bytes_(bytes) {
    for (int r = 0; r < ranks; ++r) {
      pages_.emplace_back(static_cast<size_t>(bytes + 2 * kGuard) / 8);
      std::memset(pages_.back().data(), kPattern, static_cast<size_t>(bytes + 2 * kGuard));
      std::memset(peer(r), 0, static_cast<size_t>(bytes));
    }
  }
  int64_t bytes() const override { return bytes_; }
  void* own() const override { return peer(0); }
  void* peer(int rank) const override {
    return const_cast<char*>(
               reinterpret_cast<const char*>(pages_[static_cast<size_t>(rank)].data())) +
           kGuard;
  }
  bool guards_are_whole() const {
    for (size_t r = 0; r < pages_.size(); ++r) {
      const char* begin = static_cast<const char*>(peer(static_cast<int>(r)));
      for (int64_t i = 1; i <= kGuard; ++i) {
        if (begin[-i] != kPattern || begin[bytes_ + i - 1] != kPattern) return false;
      }
    }
    return true;
  }

 private:
  int64_t bytes_;
  std::vector<std::vector<uint64_t>> pages_;
};

TEST(Pytorch191618, WordsLieInsideThePageOnLinesOfTheirOwn) {
  for (int ranks : {1, 2, 3, 8, 64}) {
    auto window = std::make_shared<GuardedWindow>(ControlPage::bytes(ranks), ranks);
    const ControlPage page(window, 0, ranks);
    for (int owner = 0; owner < ranks; ++owner) {
      std::set<int64_t> lines;
      for (int counter = 0; counter < kControlCounterCount; ++counter) {
        for (int from = 0; from < ranks; ++from) {
          const int64_t offset = reinterpret_cast<char*>(page.word(owner, counter, from)) -
                                 static_cast<char*>(window->peer(owner));
          EXPECT_GE(offset, 0);
          EXPECT_LE(offset + 4, window->bytes());
          EXPECT_EQ(offset % 4, 0);
          EXPECT_TRUE(lines.insert(offset / 64).second)
              << "counter " << counter << " from " << from;
        }
      }
    }
  }
}

TEST(Pytorch191618, TheFullestPageTouchesNeitherGuardsNorCounters) {
  for (int ranks : {1, 2, 3, 8}) {
    auto window = std::make_shared<GuardedWindow>(ControlPage::bytes(ranks), ranks);
    ControlPage page(window, 0, ranks);
    for (uint64_t sequence = 0; sequence < 2 * kRecords; ++sequence) {
      CallRecord record;
      record.sequence = sequence;
      record.program_hash = record.layout_hash = record.options = record.scale_bits = ~uint64_t{0};
      record.tensors = record.bytes = ~uint64_t{0};
      page.publish(record);
    }
    // More tensors than a table has room for.
    const TensorDescriptor descriptor{7, DType::kFloat32, 11, 13, 1};
    const std::vector<TensorDescriptor> tensors(kTableTensors + 100, descriptor);
    const std::vector<Posting> postings(kTableTensors + 100, Posting{5, 6});
    page.publish_table(Direction::kGather, 1, tensors, postings);
    page.publish_table(Direction::kReduce, 2, tensors, {});
    for (int64_t id = 0; id < kAllocations; ++id) page.release(id);
    EXPECT_TRUE(window->guards_are_whole());
    for (int counter = 0; counter < kControlCounterCount; ++counter) {
      for (int from = 0; from < ranks; ++from) EXPECT_EQ(*page.word(0, counter, from), 0u);
    }
    // And the other way round: counters at their largest change nothing that was published.
    for (int counter = 0; counter < kControlCounterCount; ++counter) {
      for (int from = 0; from < ranks; ++from) *page.word(0, counter, from) = ~0u;
    }
    EXPECT_TRUE(page.has_table(0, Direction::kGather, 1));
    EXPECT_TRUE(page.has_table(0, Direction::kReduce, 2));
    EXPECT_EQ(page.descriptor(0, Direction::kGather, kTableTensors - 1), descriptor);
    EXPECT_EQ(page.descriptor(0, Direction::kReduce, kTableTensors - 1), descriptor);
    EXPECT_EQ(page.posting(0, kTableTensors - 1).offset, 6);
    CallRecord record;
    EXPECT_EQ(page.read(0, 2 * kRecords - 1, &record), ControlPage::Found::kYes);
    EXPECT_EQ(record.bytes, ~uint64_t{0});
    EXPECT_TRUE(page.is_released(0, kAllocations - 1));
    EXPECT_TRUE(window->guards_are_whole());
  }
}

}  // namespace
}  // namespace tide
