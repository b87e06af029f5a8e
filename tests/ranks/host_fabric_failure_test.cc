// What the others see when a rank dies, stops, fails, leaves or is refused; and that nothing is
// left behind.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <random>

#include "tests/ranks/host_fabric_ranks.h"

namespace tide::test {
namespace {

using testing::HasSubstr;

// A wait as an engine does it: it ends when the listener has set the flag, or when its peer is
// gone.
Status wait_for_peer(Fabric& fabric, const Window& window, int peer, uint32_t value,
                     milliseconds timeout = seconds(60)) {
  WaitGuard guard = guard_of(timeout);
  guard.check = [&fabric, peer] { return fabric.peer_status(peer); };
  return fabric.wait(0, word_at(window.own(), peer), value, guard);
}

// Rank 1 hands itself to `end`; rank 0 hears of it and its wait ends, long before the wait's
// deadline.
void rank_1_ends(const std::function<void(Fabric&)>& end, const std::string& expected_reason) {
  FileStore store;
  Processes processes;
  const pid_t watching = processes.start("rank 0", [&] {
    auto fabric = connect(0, 2, store);
    Heard heard;
    heard.listen(*fabric);
    auto window = window_of(*fabric, 8192);
    EXPECT_TRUE(store.set("ready", "yes").is_ok());
    const Status status = wait_for_peer(*fabric, *window, 1, 1);
    EXPECT_EQ(status.kind(), ErrorKind::kPeerLost) << status.to_string();
    EXPECT_THAT(status.message(), HasSubstr(expected_reason));
    const auto losses = heard.wait_for(1);
    ASSERT_EQ(losses.size(), 1u);
    EXPECT_EQ(losses[0].first, 1);
    EXPECT_THAT(losses[0].second.message(), HasSubstr("rank 0 of group 'test': rank 1"));
    EXPECT_EQ(fabric->create_window(8192, within(seconds(60))).status().kind(),
              ErrorKind::kPeerLost);
    fabric->close();
    EXPECT_EQ(heard.losses().size(), 1u);
  });
  const pid_t ending = processes.start("rank 1", [&] {
    auto fabric = connect(1, 2, store);
    auto window = window_of(*fabric, 8192);
    EXPECT_TRUE(store.get("ready", within(seconds(60))).is_ok());
    end(*fabric);
    ::pause();
  });
  processes.expect_success(watching);
  processes.kill(ending, SIGKILL);
  processes.end_of(ending);
}

TEST(HostFabricFailure, AKilledRankIsHeard) {
  rank_1_ends([](Fabric&) { ::kill(::getpid(), SIGKILL); }, "ended");
}

TEST(HostFabricFailure, ARankThatExitsWithoutAGoodbyeIsHeard) {
  rank_1_ends([](Fabric&) { ::_exit(0); }, "ended");
}

TEST(HostFabricFailure, AReasonTravelsToThePeers) {
  rank_1_ends(
      [](Fabric& fabric) {
        fabric.fail({ErrorKind::kInvalidUse, "parameter 'w' has 7 rows, wanted 8"});
      },
      "rank 1 reported: invalid use: parameter 'w' has 7 rows, wanted 8");
}

TEST(HostFabricFailure, AFailureThenACloseIsStillAFailure) {
  rank_1_ends(
      [](Fabric& fabric) {
        fabric.fail({ErrorKind::kTimeout, "waited long enough"});
        fabric.close();
      },
      "waited long enough");
}

// A child that lives on: forked as data loaders do, and forked behind the back of the C library,
// where no handler ran and the rank's sockets are still open in the child.
void killed_with_living_child(const std::function<pid_t()>& make_child) {
  FileStore store;
  rank_1_ends(
      [&](Fabric&) {
        const pid_t child = make_child();
        if (child == 0) {
          ::pause();
          ::_exit(0);
        }
        EXPECT_TRUE(store.set("child", std::to_string(child)).is_ok());
        ::kill(::getpid(), SIGKILL);
      },
      "ended");
  const pid_t child = std::stoi(store.get("child", within(seconds(60))).value());
  ASSERT_GT(child, 1);
  EXPECT_EQ(::kill(child, 0), 0) << "the child should have lived through it";
  ::kill(child, SIGKILL);
}

TEST(HostFabricFailure, AKilledRankIsHeardThoughItsForkedChildLives) {
  killed_with_living_child([] { return ::fork(); });
}

TEST(HostFabricFailure, AKilledRankIsHeardThoughAChildHoldsItsSockets) {
  killed_with_living_child(
      [] { return static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0)); });
}

TEST(HostFabricFailure, AStoppedRankIsATimeoutAndGoesOnLater) {
  FileStore store;
  Processes processes;
  const pid_t waiting = processes.start("rank 0", [&] {
    auto fabric = connect(0, 2, store);
    Heard heard;
    heard.listen(*fabric);
    auto window = window_of(*fabric, 8192);
    EXPECT_TRUE(store.set("ready", "yes").is_ok());
    EXPECT_TRUE(store.get("stopped", within(seconds(60))).is_ok());
    const Status late = wait_for_peer(*fabric, *window, 1, 1, milliseconds(250));
    EXPECT_EQ(late.kind(), ErrorKind::kTimeout);
    EXPECT_THAT(late.message(), HasSubstr("wanted counter 1, got 0"));
    EXPECT_EQ(fabric->create_window(8192, within(milliseconds(250))).status().kind(),
              ErrorKind::kTimeout);
    EXPECT_TRUE(heard.losses().empty());
    EXPECT_TRUE(store.set("late", "yes").is_ok());
    EXPECT_TRUE(wait_for_peer(*fabric, *window, 1, 1).is_ok());
    fabric->fail(late);
    fabric->close();
  });
  const pid_t stopped = processes.start("rank 1", [&] {
    auto fabric = connect(1, 2, store);
    auto window = window_of(*fabric, 8192);
    EXPECT_TRUE(store.get("late", within(seconds(60))).is_ok());
    // Rank 0 gave this window up; here that is an error as well.
    EXPECT_FALSE(fabric->create_window(8192, within(seconds(60))).is_ok());
    EXPECT_TRUE(fabric->signal(0, word_at(window->peer(0), 1), 1).is_ok());
  });
  ASSERT_TRUE(store.get("ready", within(seconds(60))).is_ok());
  processes.kill(stopped, SIGSTOP);
  ASSERT_TRUE(store.set("stopped", "yes").is_ok());
  ASSERT_TRUE(store.get("late", within(seconds(60))).is_ok());
  processes.kill(stopped, SIGCONT);
  processes.expect_success(waiting);
  processes.expect_success(stopped);
}

TEST(HostFabricFailure, ACloseBesideAStoppedRankReturns) {
  FileStore store;
  Processes processes;
  const pid_t closing = processes.start("rank 0", [&] {
    auto fabric = connect(0, 2, store);
    EXPECT_TRUE(store.get("stopped", within(seconds(60))).is_ok());
    for (int i = 0; i < 1000; ++i)
      fabric->fail({ErrorKind::kTimeout, std::string(1500, 'x')});  // more than it buffers
    fabric->close();
  });
  const pid_t stopped = processes.start("rank 1", [&] {
    auto fabric = connect(1, 2, store);
    EXPECT_TRUE(store.set("ready", "yes").is_ok());
    ::pause();
  });
  ASSERT_TRUE(store.get("ready", within(seconds(60))).is_ok());
  processes.kill(stopped, SIGSTOP);
  ASSERT_TRUE(store.set("stopped", "yes").is_ok());
  processes.expect_success(closing);
  processes.kill(stopped, SIGKILL);
  processes.end_of(stopped);
}

TEST(HostFabricFailure, AGoodbyeIsNoFailure) {
  on_ranks(3, [](int rank, KeyValueStore& store) {
    auto fabric = connect(rank, 3, store);
    Heard heard;
    heard.listen(*fabric);
    auto window = window_of(*fabric, 8192);
    if (rank == 2) {
      for (int peer : {0, 1})
        EXPECT_TRUE(fabric->signal(0, word_at(window->peer(peer), 2), 1).is_ok());
      fabric->close();
      return;
    }
    const Status gone = wait_for_peer(*fabric, *window, 2, 2);  // a signal that rank 2 never sends
    EXPECT_EQ(gone.kind(), ErrorKind::kPeerLost);
    EXPECT_THAT(gone.message(), HasSubstr("rank 2 has closed the group"));
    EXPECT_TRUE(wait_for_peer(*fabric, *window, 2, 1).is_ok());  // its last one counts
    EXPECT_TRUE(fabric->peer_status(1 - rank).is_ok());
    EXPECT_TRUE(fabric->signal(0, word_at(window->peer(1 - rank), rank), 1).is_ok());
    EXPECT_TRUE(wait_for_peer(*fabric, *window, 1 - rank, 1).is_ok());
    EXPECT_TRUE(heard.losses().empty());
  });
}

TEST(HostFabricFailure, ARankThatNeverComesIsNamed) {
  FileStore store;
  ASSERT_TRUE(store.set("fabric/test/member/2", "tide-nobody " + node_identity()).is_ok());
  Processes processes;
  for (int rank : {0, 1}) {
    processes.start("rank", [&, rank] {
      auto fabric = connect_host_fabric(
          {rank, 3, "test", within(milliseconds(500 + 1000 * rank)), "", {}}, store);
      ASSERT_FALSE(fabric.is_ok());
      if (rank == 0) {
        EXPECT_EQ(fabric.status().kind(), ErrorKind::kTimeout) << fabric.status().to_string();
        EXPECT_THAT(fabric.status().message(), HasSubstr("ranks 2 did not connect"));
      } else {  // it had more time, and sees that rank 0 gives up
        EXPECT_EQ(fabric.status().kind(), ErrorKind::kPeerLost) << fabric.status().to_string();
        EXPECT_THAT(fabric.status().message(), HasSubstr("ranks 2"));
      }
    });
  }
  processes.expect_all_succeed();
}

// One rank refuses a window for different reasons; all learn the same reason, keep no descriptor,
// and go on.
void one_rank_refuses(const std::function<void()>& restrict, const std::function<void()>& relax,
                      int64_t bytes, const std::string& expected_reason) {
  on_ranks(3, [&](int rank, KeyValueStore& store) {
    HostFabricOptions options;
    if (!restrict) {
      options.refuse_window = [rank](int64_t wanted) {
        return rank == 1 && wanted == 1 << 20 ? Status(ErrorKind::kUnsupported, "not today")
                                              : Status::ok();
      };
    }
    auto fabric = connect(rank, 3, store, options);
    auto window = window_of(*fabric, 8192);
    barrier(*fabric, *window, 1);
    const size_t before = open_descriptors();
    if (rank == 1 && restrict) restrict();
    barrier(*fabric, *window, 2);
    const auto refused = fabric->create_window(bytes, within(seconds(60)));
    if (rank == 1 && relax) relax();
    ASSERT_FALSE(refused.is_ok());
    EXPECT_THAT(refused.status().message(), HasSubstr(expected_reason));
    if (rank != 1) {
      EXPECT_THAT(refused.status().message(), HasSubstr("rank 1: "));
    }
    barrier(*fabric, *window, 3);  // no other window is begun while descriptors are counted
    EXPECT_EQ(open_descriptors(), before);
    barrier(*fabric, *window, 4);
    auto next = window_of(*fabric, bytes == 1 << 20 ? 4096 : bytes);
    barrier(*fabric, *window, 5);
    EXPECT_EQ(open_descriptors(), before);
    barrier(*fabric, *window, 6);  // nobody leaves before
  });
}

TEST(HostFabricFailure, ARefusalByChoice) {
  one_rank_refuses(nullptr, nullptr, 1 << 20, "rank 1: not today");
}

TEST(HostFabricFailure, ARefusalByTheLimitOfFileSizes) {
  one_rank_refuses(
      [] {
        const rlimit limit = {65536, RLIM_INFINITY};
        EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
      },
      [] {
        const rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
        EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
      },
      1 << 21, "limit of file sizes");
}

std::vector<int> taken;  // descriptors that fill every number below the limit

void leave_descriptors(size_t free) {
  rlimit limit = {};
  EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = 200;
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  for (int fd = ::open("/dev/null", O_RDONLY); fd >= 0; fd = ::open("/dev/null", O_RDONLY))
    taken.push_back(fd);
  EXPECT_GT(taken.size(), free);
  for (; free > 0; --free) {
    ::close(taken.back());
    taken.pop_back();
  }
}

void allow_many_descriptors() {
  for (int fd : taken) ::close(fd);
  taken.clear();
  rlimit limit = {};
  EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = limit.rlim_max;
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST(HostFabricFailure, ARefusalForWantOfADescriptor) {
  one_rank_refuses([] { leave_descriptors(0); }, allow_many_descriptors, 1 << 21, "ulimit -n");
}

TEST(HostFabricFailure, ARefusalForWantOfAPeersDescriptor) {
  one_rank_refuses([] { leave_descriptors(1); }, allow_many_descriptors, 1 << 21, "ulimit -n");
}

TEST(HostFabricFailure, SizesThatDiffer) {
  on_ranks(2, [](int rank, KeyValueStore& store) {
    auto fabric = connect(rank, 2, store);
    const auto refused = fabric->create_window(4096 * (1 + rank), within(seconds(60)));
    EXPECT_EQ(refused.status().kind(), ErrorKind::kInvalidUse);
    EXPECT_EQ(refused.status().message(),
              "rank 1: wants a window of 8192 bytes where rank 0 wants 4096");
    EXPECT_EQ(fabric->create_window(0, within(seconds(60))).status().kind(),
              ErrorKind::kInvalidUse);
    // Memory that no machine has.
    EXPECT_EQ(fabric->create_window(int64_t{1} << 60, within(seconds(60))).status().kind(),
              ErrorKind::kSystem);
    EXPECT_NE(window_of(*fabric, 4096), nullptr);
  });
}

TEST(HostFabricFailure, NothingStaysOpenOrMapped) {
  on_ranks(2, [](int rank, KeyValueStore& store) {
    auto windows_mapped = [] {
      std::ifstream maps("/proc/self/maps");
      int count = 0;
      for (std::string line; std::getline(maps, line);)
        count += line.find("tide-window") != std::string::npos;
      return count;
    };
    const size_t before = open_descriptors();
    for (int round = 0; round < 5; ++round) {
      HostFabricOptions options;
      options.group = "round " + std::to_string(round);
      auto fabric = connect(rank, 2, store, options);
      auto window = window_of(*fabric, 1 << 20);
      EXPECT_GT(windows_mapped(), 0);
      barrier(*fabric, *window, 1);
      fabric.reset();
      EXPECT_EQ(open_descriptors(), before);
      window.reset();
      EXPECT_EQ(windows_mapped(), 0);
    }
  });
}

TEST(HostFabricFailure, AForkedChildHasNeitherCallsNorMemoryNorDescriptors) {
  on_ranks(2, [](int rank, KeyValueStore& store) {
    const size_t before = open_descriptors();
    auto fabric = connect(rank, 2, store);
    auto window = window_of(*fabric, 8192);
    barrier(*fabric, *window, 1);
    Processes processes;
    processes.expect_success(processes.start("child", [&] {
      EXPECT_EQ(open_descriptors(), before);
      unsigned char resident;
      EXPECT_EQ(::mincore(window->own(), 4096, &resident), -1)
          << "the window is mapped in the child";
      uint32_t* word = word_at(window->own(), 0);
      for (const Status& status : {fabric->signal(0, word, 1), fabric->wait(0, word, 1, guard_of()),
                                   fabric->copy(0, nullptr, 0),
                                   fabric->create_window(4096, within(seconds(1))).status()}) {
        EXPECT_EQ(status.kind(), ErrorKind::kInvalidUse);
        EXPECT_THAT(status.message(), HasSubstr("forked child"));
      }
      fabric->on_peer_failure([](int, const Status&) {});
      fabric->fail({ErrorKind::kInternal, "from the child"});
      fabric->close();
      fabric.reset();
      window.reset();
      ::_exit(HasFailure() ? 1 : 0);  // what a fabric leaves behind in a forked child is no leak
    }));
    barrier(*fabric, *window, 2);  // the parents have noticed nothing
    EXPECT_TRUE(fabric->peer_status(1 - rank).is_ok());
    barrier(*fabric, *window, 3);
  });
}

// Four ranks in a loop of windows, copies and barriers; one of them is killed at some moment,
// connecting included. The others end with an error that names it, or that it caused.
TEST(HostFabricFailure, RandomKills) {
  constexpr int kRanks = 4;
  std::mt19937 random(11);
  for (int round = 0; round < 40; ++round) {
    FileStore store;
    Processes processes;
    std::vector<pid_t> ranks;
    const int victim = static_cast<int>(random() % kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.push_back(processes.start("rank " + std::to_string(rank), [&, rank] {
        auto made = connect_host_fabric({rank, kRanks, "test", within(seconds(3)), "", {}}, store);
        if (!made.is_ok()) return;  // the victim never came
        Fabric& fabric = *made.value();
        std::atomic<bool> failed{false};
        fabric.on_peer_failure([&](int, const Status&) {
          failed = true;
          fabric.wake_all();
        });
        Status status;
        for (uint32_t epoch = 1; status.is_ok(); ++epoch) {
          auto window = fabric.create_window(1 << 16, within(seconds(60)));
          status = window.status();
          for (int peer = 0; peer < kRanks && status.is_ok(); ++peer) {
            (void)fabric.signal(0, word_at(window.value()->peer(peer), rank), epoch);
          }
          WaitGuard guard = guard_of();
          guard.failed = &failed;
          for (int peer = 0; peer < kRanks && status.is_ok(); ++peer) {
            status = fabric.wait(0, word_at(window.value()->own(), peer), epoch, guard);
          }
        }
        EXPECT_EQ(status.kind(), ErrorKind::kPeerLost) << status.to_string();
        fabric.fail(status);
        made.value()->close();
      }));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 40'000));
    processes.kill(ranks[static_cast<size_t>(victim)], SIGKILL);
    processes.end_of(ranks[static_cast<size_t>(victim)]);
    processes.expect_all_succeed(seconds(30));
    if (HasFailure()) break;
  }
}

}  // namespace
}  // namespace tide::test
