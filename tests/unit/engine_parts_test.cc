// The engine's small parts: slot order, control page, failure, completion thread, vote.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <mutex>
#include <thread>

#include "backend/engine/agreement.h"
#include "backend/engine/completion_thread.h"
#include "backend/engine/control_page.h"
#include "backend/engine/failure.h"
#include "backend/engine/slot_ring.h"
#include "backend/engine/vote.h"

namespace tide {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

TEST(SlotRing, TheSlotVacatedLongestAgoGoesOutFirst) {
  SlotRing ring;
  EXPECT_EQ(ring.take(), -1);
  for (int slot : {0, 1, 2}) ring.put(slot);
  EXPECT_EQ(ring.take(), 0);
  EXPECT_EQ(ring.take(), 1);
  ring.put(1);
  ring.put(0);
  EXPECT_EQ(ring.take(), 2);  // not the lowest free one
  EXPECT_EQ(ring.take(), 1);
  ring.put(2);
  ring.touch(0);  // staging again: behind slot 2 now
  EXPECT_EQ(ring.size(), 2);
  EXPECT_EQ(ring.take(), 2);
  EXPECT_TRUE(ring.contains(0));
  ring.remove(0);
  EXPECT_EQ(ring.take(), -1);
}

// Ranks' parts as plain memory.
class PlainWindow : public Window {
 public:
  PlainWindow(int ranks, int rank, int64_t bytes)
      : pages_(std::make_shared<std::vector<std::vector<uint64_t>>>(
            static_cast<size_t>(ranks), std::vector<uint64_t>(static_cast<size_t>(bytes / 8 + 1)))),
        rank_(rank),
        bytes_(bytes) {}
  PlainWindow(const PlainWindow& of, int rank)
      : pages_(of.pages_), rank_(rank), bytes_(of.bytes_) {}
  int64_t bytes() const override { return bytes_; }
  void* own() const override { return peer(rank_); }
  void* peer(int rank) const override { return (*pages_)[static_cast<size_t>(rank)].data(); }

 private:
  std::shared_ptr<std::vector<std::vector<uint64_t>>> pages_;
  int rank_;
  int64_t bytes_;
};

struct TwoPages {
  std::shared_ptr<PlainWindow> first = std::make_shared<PlainWindow>(2, 0, ControlPage::bytes(2));
  std::shared_ptr<ControlPage> a = std::make_shared<ControlPage>(first, 0, 2);
  std::shared_ptr<ControlPage> b =
      std::make_shared<ControlPage>(std::make_shared<PlainWindow>(*first, 1), 1, 2);
};

TEST(ControlPage, WordsOfCountersShareNoCacheLine) {
  TwoPages pages;
  std::vector<uintptr_t> lines;
  for (int counter = 0; counter < kControlCounterCount; ++counter) {
    for (int from = 0; from < 2; ++from) {
      EXPECT_EQ(pages.a->word(1, counter, from), pages.b->word(1, counter, from));
      lines.push_back(reinterpret_cast<uintptr_t>(pages.a->word(0, counter, from)) / 64);
    }
  }
  std::sort(lines.begin(), lines.end());
  EXPECT_EQ(std::unique(lines.begin(), lines.end()), lines.end());
}

CallRecord record_of(uint64_t sequence) {
  CallRecord record;
  record.sequence = sequence;
  record.kind = CallKind::kReduce;
  record.cause = CallKind::kReduceList;
  record.refusal = Refusal::kArenaLimit;
  record.plan = 3;
  record.slot = -1;
  record.program_hash = sequence * 3;
  record.layout_hash = sequence * 5;
  record.options = sequence * 7;
  record.scale_bits = sequence * 11;
  record.tensors = sequence * 13;
  record.bytes = sequence * 17;
  return record;
}

TEST(ControlPage, RecordsComeThroughWholeAndAreOverwrittenInARing) {
  TwoPages pages;
  CallRecord read;
  EXPECT_EQ(pages.b->read(0, 0, &read), ControlPage::Found::kNotYet);
  pages.a->publish(record_of(0));
  ASSERT_EQ(pages.b->read(0, 0, &read), ControlPage::Found::kYes);
  EXPECT_EQ(read.kind, CallKind::kReduce);
  EXPECT_EQ(read.cause, CallKind::kReduceList);
  EXPECT_EQ(read.refusal, Refusal::kArenaLimit);
  EXPECT_EQ(read.plan, 3);
  EXPECT_EQ(read.slot, -1);
  for (uint64_t sequence = 1; sequence <= kRecords; ++sequence)
    pages.a->publish(record_of(sequence));
  EXPECT_EQ(pages.b->read(0, 0, &read), ControlPage::Found::kOverwritten);
  ASSERT_EQ(pages.b->read(0, kRecords, &read), ControlPage::Found::kYes);
  EXPECT_EQ(read.bytes, kRecords * 17u);
  EXPECT_EQ(pages.b->calls(0), kRecords + 1u);
}

// Another thread publishes without end; what is read as whole must be whole.
TEST(ControlPage, ATornRecordIsNeverTakenForAWholeOne) {
  TwoPages pages;
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t sequence = 0; !stop; ++sequence) pages.a->publish(record_of(sequence));
  });
  int whole = 0;
  for (int i = 0; whole < 20'000; ++i) {
    const uint64_t calls = pages.b->calls(0);
    if (calls == 0) continue;
    CallRecord read;
    const uint64_t sequence =
        calls - 1 - (i % 2 == 0 ? 0 : std::min<uint64_t>(calls - 1, kRecords - 1));
    if (pages.b->read(0, sequence, &read) != ControlPage::Found::kYes) continue;
    ++whole;
    ASSERT_EQ(read.program_hash, sequence * 3);
    ASSERT_EQ(read.bytes, sequence * 17);
  }
  stop = true;
  writer.join();
  EXPECT_GT(whole, 0);
}

TEST(ControlPage, TablesHoldTheFirstTensors) {
  TwoPages pages;
  std::vector<TensorDescriptor> tensors(kTableTensors + 5);
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i] = {static_cast<int>(i), DType::kInt64, static_cast<int64_t>(i) << 33, 7, 3};
  }
  pages.a->publish_table(Direction::kGather, 9, tensors, {{4, int64_t{1} << 40}});
  EXPECT_TRUE(pages.b->has_table(0, Direction::kGather, 9));
  EXPECT_FALSE(pages.b->has_table(0, Direction::kReduce, 9));
  EXPECT_FALSE(pages.b->has_table(0, Direction::kGather, 8));
  EXPECT_EQ(pages.b->table_size(0, Direction::kGather), kTableTensors);
  EXPECT_TRUE(pages.b->table_is_posted(0, Direction::kGather));
  EXPECT_EQ(pages.b->descriptor(0, Direction::kGather, kTableTensors - 1),
            tensors[kTableTensors - 1]);
  EXPECT_EQ(pages.b->posting(0, 0).allocation, 4);
  EXPECT_EQ(pages.b->posting(0, 0).offset, int64_t{1} << 40);
  pages.a->publish_table(Direction::kGather, 10, tensors, {});
  EXPECT_FALSE(pages.b->table_is_posted(0, Direction::kGather));
}

TEST(ControlPage, ReleasesAreCountedByGeneration) {
  TwoPages pages;
  EXPECT_FALSE(pages.b->is_released(0, 5));
  pages.a->release(5);
  EXPECT_TRUE(pages.b->is_released(0, 5));
  EXPECT_FALSE(pages.b->is_released(0, 5 + kAllocations));
  pages.a->release(5 + kAllocations);
  EXPECT_TRUE(pages.b->is_released(0, 5 + kAllocations));
}

TEST(Agreement, EqualOrNotYetIsFineAndADifferenceIsNamed) {
  TwoPages pages;
  Agreement agreement(pages.a, "dp");
  agreement.add_plan(0, "layers.3");
  CallRecord own = record_of(4);
  own.kind = CallKind::kGather;
  own.plan = 0;
  EXPECT_TRUE(agreement.compare(own, 1, false, nullptr).status.is_ok());
  EXPECT_THAT(agreement.compare(own, 1, true, nullptr).status.message(),
              HasSubstr("has made 0 calls"));
  pages.b->publish(own);
  EXPECT_TRUE(agreement.compare(own, 1, true, nullptr).status.is_ok());
  CallRecord other = own;
  other.kind = CallKind::kReduce;
  pages.b->publish(other);
  const Status status = agreement.compare(own, 1, false, nullptr).status;
  EXPECT_EQ(status.kind(), ErrorKind::kInvalidUse);
  EXPECT_THAT(status.message(),
              HasSubstr("group 'dp', rank 0: ranks disagree about call 4: rank 1 is in reduce of "
                        "'layers.3', this rank in gather of 'layers.3'"));
}

TEST(Failure, TheFirstErrorStays) {
  Failure failure;
  EXPECT_TRUE(failure.status().is_ok());
  EXPECT_TRUE(failure.set(Status(ErrorKind::kTimeout, "first")));
  EXPECT_FALSE(failure.set(Status(ErrorKind::kPeerLost, "second")));
  EXPECT_EQ(failure.status().message(), "first");
  EXPECT_TRUE(failure.flag()->load());
}

TEST(CompletionThread, RunsInOrderDrainsAtStopAndMayBeStoppedByItself) {
  std::vector<int> order;
  {
    CompletionThread thread;
    for (int i = 0; i < 100; ++i) thread.post([&order, i] { order.push_back(i); });
    thread.stop();
    ASSERT_EQ(order.size(), 100u);
    for (int i = 0; i < 100; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
    thread.post([&order] { order.push_back(-1); });  // after the end: on the caller
    EXPECT_EQ(order.back(), -1);
  }
  auto thread = std::make_shared<CompletionThread>();
  std::atomic<bool> dropped{false};
  std::weak_ptr<CompletionThread> watched = thread;
  thread->post([thread, &dropped]() mutable {
    thread.reset();
    dropped = true;
  });
  thread.reset();
  while (!dropped || !watched.expired()) std::this_thread::sleep_for(1ms);
}

class MapStore : public KeyValueStore {
 public:
  Status set(const std::string& key, const std::string& value) override {
    values[key] = value;
    return Status::ok();
  }
  Result<std::string> get(const std::string& key, Deadline) override {
    if (values.count(key) == 0) return Status(ErrorKind::kTimeout, "no key " + key);
    return values[key];
  }
  void remove(const std::string& key) override { values.erase(key); }
  std::map<std::string, std::string> values;
};

TEST(Vote, BringsEveryBallotAndNamesTheMissingRank) {
  auto store = std::make_shared<MapStore>();
  Vote first(store, 0, 2);
  Vote second(store, 1, 2);
  const auto fine = [](int) { return Status::ok(); };
  const auto missing = first.exchange("a", Clock::now() - 1s, fine);
  EXPECT_EQ(missing.status().kind(), ErrorKind::kTimeout);
  EXPECT_THAT(missing.status().message(), HasSubstr("rank 1"));
  const auto both = second.exchange("b", Clock::now() + 1s, fine);
  ASSERT_TRUE(both.is_ok());
  EXPECT_EQ(both.value(), (std::vector<std::string>{"a", "b"}));
  const auto stopped = second.exchange("c", Clock::now() + 100s, [](int rank) {
    return Status(ErrorKind::kPeerLost, "rank " + std::to_string(rank) + " is gone");
  });
  EXPECT_EQ(stopped.status().message(), "rank 0 is gone");
}

// A ballot may be read until its reader has sent the next one.
TEST(Vote, LeavesTheBallotsOfTheLastVoteAlone) {
  class LockedStore : public MapStore {
   public:
    Status set(const std::string& key, const std::string& value) override {
      std::lock_guard<std::mutex> lock(mutex);
      return MapStore::set(key, value);
    }
    Result<std::string> get(const std::string& key, Deadline deadline) override {
      while (Clock::now() < deadline) {
        std::lock_guard<std::mutex> lock(mutex);
        if (values.count(key) > 0) return values[key];
      }
      return Status(ErrorKind::kTimeout, "no key " + key);
    }
    void remove(const std::string& key) override {
      std::lock_guard<std::mutex> lock(mutex);
      values.erase(key);
    }
    std::mutex mutex;
  };
  auto store = std::make_shared<LockedStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&store, rank] {
      Vote vote(store, rank, 3);
      for (int number = 0; number < 50; ++number) {
        const std::string ballot = std::to_string(number) + "/";
        const auto ballots = vote.exchange(ballot + std::to_string(rank), Clock::now() + 30s,
                                           [](int) { return Status::ok(); });
        ASSERT_TRUE(ballots.is_ok()) << ballots.status().to_string();
        EXPECT_EQ(ballots.value(),
                  (std::vector<std::string>{ballot + "0", ballot + "1", ballot + "2"}));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store->values.size(), 3U);
}

}  // namespace
}  // namespace tide
