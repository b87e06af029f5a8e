// The in-process fabric: order of copies and signals, waits and their ends, votes about windows,
// news about peers.
#include "transports/memory/memory_fabric.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "tests/on_each.h"

namespace tide {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

Deadline soon() { return Clock::now() + seconds(20); }

WaitGuard guard_of(milliseconds timeout, const std::atomic<bool>* failed = nullptr) {
  WaitGuard guard;
  guard.timeout = timeout;
  guard.failed = failed;
  guard.what = "the test's word";
  return guard;
}

// All ranks' parts of one window.
std::vector<std::shared_ptr<Window>> windows_of(std::vector<std::unique_ptr<Fabric>>& fabrics,
                                                int64_t bytes) {
  std::vector<std::shared_ptr<Window>> windows(fabrics.size());
  on_each(static_cast<int>(fabrics.size()), [&](int rank) {
    auto made = fabrics[static_cast<size_t>(rank)]->create_window(bytes, soon());
    ASSERT_TRUE(made.is_ok()) << made.status().to_string();
    windows[static_cast<size_t>(rank)] = made.value();
  });
  return windows;
}

uint32_t* word_at(void* base, int64_t index) { return static_cast<uint32_t*>(base) + index * 16; }

TEST(MemoryFabric, WindowsAreZeroedAlignedAndShared) {
  auto fabrics = make_memory_fabrics(3);
  auto windows = windows_of(fabrics, 10000);
  for (int rank = 0; rank < 3; ++rank) {
    const auto& window = windows[static_cast<size_t>(rank)];
    EXPECT_EQ(window->bytes(), 10000);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(window->own()) % 4096, 0u);
    EXPECT_EQ(window->own(), window->peer(rank));
    const auto* bytes = static_cast<const char*>(window->own());
    EXPECT_EQ(std::count(bytes, bytes + 10000, 0), 10000);
  }
  std::memset(windows[0]->peer(2), 7, 10000);
  EXPECT_EQ(static_cast<const char*>(windows[2]->own())[9999], 7);
}

TEST(MemoryFabric, SignalComesAfterTheCopiesOfItsQueue) {
  constexpr int kRanks = 4;
  constexpr int kRounds = 3000;
  constexpr int64_t kBytes = 4096;
  auto fabrics = make_memory_fabrics(kRanks);
  // Layout: word 0..3 "arrived from", word 4..7 "read by", data of rank r at 4096 * (1 + r).
  auto windows = windows_of(fabrics, kBytes * (1 + kRanks));
  on_each(kRanks, [&](int rank) {
    Fabric& fabric = *fabrics[static_cast<size_t>(rank)];
    const Window& window = *windows[static_cast<size_t>(rank)];
    const int to = (rank + 1) % kRanks;
    const int from = (rank + kRanks - 1) % kRanks;
    std::vector<uint32_t> pattern(kBytes / 4);
    for (uint32_t round = 1; round <= kRounds; ++round) {
      std::fill(pattern.begin(), pattern.end(), round * 16 + static_cast<uint32_t>(rank));
      ASSERT_TRUE(
          fabric.wait(0, word_at(window.own(), 4 + to), round - 1, guard_of(seconds(20))).is_ok());
      const CopyBlock block{static_cast<char*>(window.peer(to)) + kBytes * (1 + rank),
                            pattern.data(),
                            1,
                            kBytes,
                            0,
                            0};
      ASSERT_TRUE(fabric.copy(0, &block, 1).is_ok());
      ASSERT_TRUE(fabric.signal(0, word_at(window.peer(to), rank), round).is_ok());
      ASSERT_TRUE(
          fabric.wait(1, word_at(window.own(), from), round, guard_of(seconds(20))).is_ok());
      const auto* data = reinterpret_cast<const uint32_t*>(static_cast<const char*>(window.own()) +
                                                           kBytes * (1 + from));
      for (int64_t i = 0; i < kBytes / 4; ++i)
        ASSERT_EQ(data[i], round * 16 + static_cast<uint32_t>(from));
      ASSERT_TRUE(fabric.signal(1, word_at(window.peer(from), 4 + rank), round).is_ok());
    }
  });
}

TEST(MemoryFabric, CountersCompareCyclically) {
  auto fabrics = make_memory_fabrics(1);
  auto windows = windows_of(fabrics, 4096);
  uint32_t* word = word_at(windows[0]->own(), 0);
  ASSERT_TRUE(fabrics[0]->signal(0, word, 2).is_ok());
  EXPECT_TRUE(fabrics[0]->wait(0, word, 0xfffffff0u, guard_of(milliseconds(1))).is_ok());
  EXPECT_EQ(fabrics[0]->wait(0, word, 3, guard_of(milliseconds(1))).kind(), ErrorKind::kTimeout);
}

TEST(MemoryFabric, WaitsEndByDeadlineFlagAndCheck) {
  auto fabrics = make_memory_fabrics(2);
  auto windows = windows_of(fabrics, 4096);
  Fabric& fabric = *fabrics[0];
  uint32_t* word = word_at(windows[0]->own(), 0);

  const Status late = fabric.wait(0, word, 5, guard_of(milliseconds(30)));
  EXPECT_EQ(late.kind(), ErrorKind::kTimeout);
  EXPECT_THAT(late.message(), HasSubstr("the test's word"));

  std::atomic<bool> failed{false};
  std::thread breaker([&] {
    std::this_thread::sleep_for(milliseconds(20));
    failed.store(true);
    fabric.wake_all();
  });
  EXPECT_EQ(fabric.wait(0, word, 5, guard_of(seconds(20), &failed)).kind(), ErrorKind::kPeerLost);
  breaker.join();

  WaitGuard guard = guard_of(milliseconds::max());
  guard.check = [] { return Status(ErrorKind::kInvalidUse, "asked to stop"); };
  EXPECT_EQ(fabric.wait(0, word, 5, guard).message(), "asked to stop");
}

TEST(MemoryFabric, WordsOutsideWindowsAreRefused) {
  auto fabrics = make_memory_fabrics(2);
  auto windows = windows_of(fabrics, 4096);
  uint32_t outside = 0;
  EXPECT_EQ(fabrics[0]->signal(0, &outside, 1).kind(), ErrorKind::kInternal);
  EXPECT_EQ(fabrics[0]->wait(0, &outside, 1, guard_of(milliseconds(1))).kind(),
            ErrorKind::kInternal);
  EXPECT_EQ(
      fabrics[0]->wait(0, word_at(windows[0]->peer(1), 0), 1, guard_of(milliseconds(1))).kind(),
      ErrorKind::kInternal);
  windows[0].reset();  // its words are no longer known to rank 0
  EXPECT_EQ(fabrics[0]->signal(0, word_at(windows[1]->own(), 0), 1).kind(), ErrorKind::kInternal);
}

TEST(MemoryFabric, OneRefusalRefusesTheWindowOnAll) {
  MemoryFabricOptions options;
  options.refuse_window = [](int rank, int64_t bytes) {
    return rank == 2 && bytes == 8192 ? Status(ErrorKind::kSystem, "no memory here") : Status::ok();
  };
  auto fabrics = make_memory_fabrics(4, options);
  on_each(4, [&](int rank) {
    Fabric& fabric = *fabrics[static_cast<size_t>(rank)];
    const auto refused = fabric.create_window(8192, soon());
    ASSERT_FALSE(refused.is_ok());
    EXPECT_EQ(refused.status().kind(), ErrorKind::kSystem);
    EXPECT_EQ(refused.status().message(), "rank 2: no memory here");
    EXPECT_TRUE(fabric.create_window(4096, soon()).is_ok());  // the fabric stays usable
  });
}

TEST(MemoryFabric, DifferentSizesAreRefused) {
  auto fabrics = make_memory_fabrics(2);
  on_each(2, [&](int rank) {
    const auto made = fabrics[static_cast<size_t>(rank)]->create_window(4096 * (1 + rank), soon());
    ASSERT_FALSE(made.is_ok());
    EXPECT_EQ(made.status().kind(), ErrorKind::kInvalidUse);
    EXPECT_THAT(made.status().message(), HasSubstr("4096"));
    EXPECT_THAT(made.status().message(), HasSubstr("8192"));
  });
}

TEST(MemoryFabric, AMissingRankIsATimeout) {
  auto fabrics = make_memory_fabrics(2);
  const auto made = fabrics[0]->create_window(4096, Clock::now() + milliseconds(30));
  ASSERT_FALSE(made.is_ok());
  EXPECT_EQ(made.status().kind(), ErrorKind::kTimeout);
  EXPECT_FALSE(fabrics[1]->create_window(4096, soon()).is_ok());  // the late rank learns it, too
}

struct Heard {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::pair<int, Status>> losses;

  void listen(Fabric& fabric) {
    fabric.on_peer_failure([this](int rank, const Status& reason) {
      std::lock_guard lock(mutex);
      losses.emplace_back(rank, reason);
      changed.notify_all();
    });
  }
  bool wait_for(size_t count) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, seconds(20), [&] { return losses.size() >= count; });
  }
};

TEST(MemoryFabric, FailureReachesEveryPeerOnce) {
  auto fabrics = make_memory_fabrics(3);
  Heard heard[3];
  for (size_t i = 0; i < 3; ++i) heard[i].listen(*fabrics[i]);
  fabrics[1]->fail({ErrorKind::kInvalidUse, "layer 7 differs"});
  fabrics[1]->fail({ErrorKind::kInvalidUse, "again"});
  ASSERT_TRUE(heard[0].wait_for(1));
  ASSERT_TRUE(heard[2].wait_for(1));
  fabrics[1]->close();
  EXPECT_EQ(heard[0].losses.size(), 1u);
  EXPECT_EQ(heard[1].losses.size(), 0u);
  EXPECT_EQ(heard[0].losses[0].first, 1);
  EXPECT_THAT(heard[0].losses[0].second.message(), HasSubstr("layer 7 differs"));
  EXPECT_EQ(fabrics[2]->peer_status(1).kind(), ErrorKind::kPeerLost);
}

TEST(MemoryFabric, AGoodbyeIsNoFailure) {
  auto fabrics = make_memory_fabrics(2);
  auto windows = windows_of(fabrics, 4096);
  Heard heard;
  heard.listen(*fabrics[0]);
  uint32_t* word = word_at(windows[0]->own(), 0);
  WaitGuard guard = guard_of(seconds(20));
  guard.check = [&] { return fabrics[0]->peer_status(1); };
  Status first;
  std::thread waiting([&] { first = fabrics[0]->wait(0, word, 1, guard); });
  ASSERT_TRUE(fabrics[1]->signal(0, word_at(windows[1]->peer(0), 0), 1).is_ok());
  fabrics[1]->close();
  waiting.join();
  EXPECT_TRUE(first.is_ok()) << first.to_string();  // signalled before the goodbye
  const Status second = fabrics[0]->wait(0, word, 2, guard);
  EXPECT_EQ(second.kind(), ErrorKind::kPeerLost);
  EXPECT_THAT(second.message(), HasSubstr("rank 1 has closed"));
  fabrics[0]->close();
  EXPECT_TRUE(heard.losses.empty());
}

TEST(MemoryFabric, ADeathIsHeardAndEndsCreateWindow) {
  auto fabrics = make_memory_fabrics(2);
  Heard heard;
  std::thread waiting([&] {
    const auto made = fabrics[0]->create_window(4096, soon());
    ASSERT_FALSE(made.is_ok());
    EXPECT_EQ(made.status().kind(), ErrorKind::kPeerLost);
  });
  break_memory_fabric(*fabrics[1]);
  waiting.join();
  heard.listen(*fabrics[0]);  // a listener that comes late hears it still
  ASSERT_TRUE(heard.wait_for(1));
  EXPECT_EQ(heard.losses[0].first, 1);
}

TEST(MemoryFabric, WindowsOutliveTheirFabric) {
  auto fabrics = make_memory_fabrics(2);
  auto windows = windows_of(fabrics, 4096);
  fabrics[0]->close();
  fabrics[0]->close();
  EXPECT_EQ(fabrics[0]->signal(0, word_at(windows[0]->own(), 0), 1).kind(), ErrorKind::kInvalidUse);
  fabrics.clear();
  std::memset(windows[0]->peer(1), 3, 4096);
  EXPECT_EQ(static_cast<const char*>(windows[1]->own())[4095], 3);
}

TEST(MemoryFabric, SixtyFourRanksMeet) {
  constexpr int kRanks = 64;
  auto fabrics = make_memory_fabrics(kRanks);
  auto windows = windows_of(fabrics, kRanks * 64);
  on_each(kRanks, [&](int rank) {
    Fabric& fabric = *fabrics[static_cast<size_t>(rank)];
    const Window& window = *windows[static_cast<size_t>(rank)];
    for (uint32_t round = 1; round <= 20; ++round) {  // a barrier: everybody signals everybody
      for (int peer = 0; peer < kRanks; ++peer) {
        ASSERT_TRUE(fabric.signal(0, word_at(window.peer(peer), rank), round).is_ok());
      }
      for (int peer = 0; peer < kRanks; ++peer) {
        ASSERT_TRUE(
            fabric.wait(0, word_at(window.own(), peer), round, guard_of(seconds(60))).is_ok());
      }
    }
  });
}

}  // namespace
}  // namespace tide
