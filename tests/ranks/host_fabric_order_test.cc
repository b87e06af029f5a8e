// Copies, signals and waits between processes: order, many rounds, large windows, sleepers.
#include <sys/resource.h>

#include <cstring>
#include <latch>

#include "tests/ranks/host_fabric_ranks.h"

namespace tide::test {
namespace {

TEST(HostFabricOrder, WindowsAreZeroedAlignedAndShared) {
  on_ranks(3, [](int rank, KeyValueStore& store) {
    auto fabric = connect(rank, 3, store);
    EXPECT_EQ(fabric->capabilities().kind, "host");
    EXPECT_TRUE(fabric->capabilities().blocking);
    auto window = window_of(*fabric, 10000);
    auto sync = window_of(*fabric, 8192);
    EXPECT_EQ(window->bytes(), 10000);
    EXPECT_EQ(window->own(), window->peer(rank));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(window->own()) % 4096, 0u);
    const auto* bytes = static_cast<const char*>(window->own());
    for (int i = 0; i < 10000; ++i) ASSERT_EQ(bytes[i], 0);
    barrier(*fabric, *sync, 1);
    for (int peer = 0; peer < 3; ++peer)
      static_cast<char*>(window->peer(peer))[9000 + rank] = static_cast<char>(40 + rank);
    barrier(*fabric, *sync, 2);
    for (int peer = 0; peer < 3; ++peer) EXPECT_EQ(bytes[9000 + peer], 40 + peer);
    fabric->close();
    EXPECT_EQ(bytes[9000], 40);  // the window outlives the fabric's end
  });
}

// Each rank writes a pattern into its right neighbour's memory and signals; the neighbour reads all
// of it, and signals that it may be overwritten. Sizes change every round and cross the streamed
// path's limit now and then.
TEST(HostFabricOrder, PatternAndFlagForAHundredThousandRounds) {
  constexpr int kRanks = 2;
  constexpr uint32_t kRounds = 100'000;
  constexpr int64_t kMostBytes = 512 << 10;
  on_ranks(kRanks, [](int rank, KeyValueStore& store) {
    auto fabric = connect(rank, kRanks, store);
    auto window = window_of(*fabric, kMostBytes + 8192);
    const int peer = 1 - rank;
    std::vector<uint32_t> pattern(kMostBytes / 4);
    for (uint32_t round = 1; round <= kRounds; ++round) {
      const int64_t numel = round % 1000 == 0 ? kMostBytes / 4 : 1 + (round * 37) % 256;
      std::fill_n(pattern.begin(), numel, round * 2 + static_cast<uint32_t>(rank));
      ASSERT_TRUE(fabric->wait(0, word_at(window->own(), 1), round - 1, guard_of()).is_ok());
      const CopyBlock block{
          static_cast<char*>(window->peer(peer)) + 8192, pattern.data(), 1, numel * 4, 0, 0};
      ASSERT_TRUE(fabric->copy(0, &block, 1).is_ok());
      ASSERT_TRUE(fabric->signal(0, word_at(window->peer(peer), 0), round).is_ok());
      ASSERT_TRUE(fabric->wait(1, word_at(window->own(), 0), round, guard_of()).is_ok());
      const auto* data =
          reinterpret_cast<const uint32_t*>(static_cast<const char*>(window->own()) + 8192);
      for (int64_t i = 0; i < numel; ++i)
        ASSERT_EQ(data[i], round * 2 + static_cast<uint32_t>(peer)) << round;
      ASSERT_TRUE(fabric->signal(1, word_at(window->peer(peer), 1), round).is_ok());
    }
    barrier(*fabric, *window, 1);
  });
}

TEST(HostFabricOrder, EightRanksEachWithTwoQueues) {
  constexpr int kRanks = 8;
  constexpr uint32_t kRounds = 500;
  on_ranks(kRanks, [](int rank, KeyValueStore& store) {
    auto fabric = connect(rank, kRanks, store);
    auto window = window_of(*fabric, 64 * 1024);
    auto all_to_all = [&](int queue, int64_t first_word) {
      for (uint32_t round = 1; round <= kRounds; ++round) {
        for (int peer = 0; peer < kRanks; ++peer) {
          ASSERT_TRUE(
              fabric->signal(queue, word_at(window->peer(peer), first_word + rank), round).is_ok());
        }
        for (int peer = 0; peer < kRanks; ++peer) {
          const Status status =
              fabric->wait(queue, word_at(window->own(), first_word + peer), round, guard_of());
          ASSERT_TRUE(status.is_ok()) << status.to_string();
        }
      }
    };
    std::thread other([&] { all_to_all(1, 300); });
    all_to_all(0, 200);
    other.join();
    barrier(*fabric, *window, 1);
  });
}

// Ranks as threads of one process over real sockets and windows: a thread sanitizer sees all of
// them.
TEST(HostFabricOrder, RanksAsThreadsOfOneProcess) {
  constexpr int kRanks = 6;
  FileStore store;
  std::latch windows_made(kRanks);  // rank 3 must not fail while another still makes its last one
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&store, &windows_made, rank] {
      auto fabric = connect(rank, kRanks, store);
      ASSERT_NE(fabric, nullptr);
      std::atomic<int> heard{0};
      fabric->on_peer_failure([&](int peer, const Status&) {
        EXPECT_EQ(peer, 3);
        ++heard;
      });
      auto window = window_of(*fabric, 1 << 16);
      for (uint32_t epoch = 1; epoch <= 20; ++epoch) {
        barrier(*fabric, *window, epoch);
        auto other = window_of(*fabric, 4096 * static_cast<int64_t>(epoch));
        EXPECT_NE(other, nullptr);
      }
      windows_made.count_down();
      if (rank == 3) {
        windows_made.wait();
        fabric->fail({ErrorKind::kInternal, "enough"});
      } else {
        WaitGuard guard = guard_of();
        guard.check = [&] { return fabric->peer_status(3); };
        EXPECT_EQ(fabric->wait(0, word_at(window->own(), 0), 1, guard).kind(),
                  ErrorKind::kPeerLost);
      }
      fabric->close();
      EXPECT_EQ(heard.load(), rank == 3 ? 0 : 1);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(HostFabricOrder, MoreThanTwoGigabytesInOneWindow) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP()
      << "a sanitizer's shadow of such a window needs more memory than a build machine has";
#endif
  constexpr int64_t kBytes = (int64_t{2} << 30) + (1 << 20);
  on_ranks(2, [](int rank, KeyValueStore& store) {
    auto fabric = connect(rank, 2, store);
    auto sync = window_of(*fabric, 8192);
    auto window = window_of(*fabric, kBytes);
    if (rank == 0) {
      auto* own = static_cast<char*>(window->own());
      for (int64_t at = 0; at < kBytes; at += 1 << 20) own[at + 5] = static_cast<char>(at >> 20);
      const CopyBlock block{window->peer(1), own, 1, kBytes, 0, 0};
      EXPECT_TRUE(fabric->copy(0, &block, 1).is_ok());
    }
    barrier(*fabric, *sync, 1);
    const auto* own = static_cast<const char*>(window->own());
    for (int64_t at = 0; at < kBytes; at += 1 << 20)
      ASSERT_EQ(own[at + 5], static_cast<char>(at >> 20));
    barrier(*fabric, *sync, 2);
  });
}

// A sleeping wait takes next to no processor time: far below the time it waits, whatever else the
// machine does.
TEST(HostFabricOrder, AWaitingRankSleeps) {
  on_ranks(2, [](int rank, KeyValueStore& store) {
    auto fabric = connect(rank, 2, store);
    auto window = window_of(*fabric, 8192);
    if (rank == 0) {
      std::this_thread::sleep_for(milliseconds(600));
      EXPECT_TRUE(fabric->signal(0, word_at(window->peer(1), 0), 1).is_ok());
    } else {
      rusage before = {};
      rusage after = {};
      ::getrusage(RUSAGE_SELF, &before);
      EXPECT_TRUE(fabric->wait(0, word_at(window->own(), 0), 1, guard_of()).is_ok());
      ::getrusage(RUSAGE_SELF, &after);
      EXPECT_LT(after.ru_nvcsw - before.ru_nvcsw, 200);  // slept in slices, not in a loop of yields
    }
    barrier(*fabric, *window, 1);
  });
}

}  // namespace
}  // namespace tide::test
