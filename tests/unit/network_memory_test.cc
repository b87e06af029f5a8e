// The in-process network: bytes before counts, heads before the rest, order of nothing else, votes,
// barriers, and what survivors hear.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <thread>

#include "tests/network/threads.h"
#include "transports/memory/memory_network.h"

namespace tide {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::guard_of;
using ::testing::HasSubstr;
using testing::soon;

constexpr int kRegion = 3;

struct Nodes {
  explicit Nodes(int nodes, const MemoryNetworkOptions& options = {}, int64_t bytes = 1 << 16)
      : networks(make_memory_networks(nodes, options)), memory(static_cast<size_t>(nodes)) {
    for (auto& area : memory) area.resize(static_cast<size_t>(bytes), 0);
    each([&](int node) {
      const Status added =
          at(node).add_region(kRegion, {memory[static_cast<size_t>(node)].data(), bytes}, soon());
      EXPECT_TRUE(added.is_ok()) << added.to_string();
    });
  }
  Network& at(int node) { return *networks[static_cast<size_t>(node)]; }
  template <class Body>
  void each(Body body) {
    on_each(static_cast<int>(networks.size()), body);
  }
  void begin_all(uint64_t operation, uint64_t hash = 7) {
    for (auto& network : networks)
      ASSERT_TRUE(network->begin(operation, hash, "the test's operation").is_ok());
  }

  std::vector<std::unique_ptr<Network>> networks;
  std::vector<std::vector<unsigned char>> memory;
};

// What node `from` sends in operation `operation`, byte by byte.
std::vector<unsigned char> pattern(int from, uint64_t operation, int64_t bytes) {
  std::vector<unsigned char> data(static_cast<size_t>(bytes));
  for (size_t i = 0; i < data.size(); ++i)
    data[i] = testing::byte_at(from, operation, static_cast<int64_t>(i));
  return data;
}

TEST(MemoryNetwork, BytesLieThereWhenTheyAreCounted) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    MemoryNetworkOptions options;
    options.fate = random_delays(seed, microseconds(300));
    constexpr int kNodes = 4;
    constexpr int64_t kBytes = 4000;
    Nodes nodes(kNodes, options, kNodes * kBytes);
    nodes.each([&](int node) {
      Network& network = nodes.at(node);
      for (uint64_t operation = 1; operation <= 25; ++operation) {
        ASSERT_TRUE(network.begin(operation, operation * 99, "gather").is_ok());
        const auto data = pattern(node, operation, kBytes);
        for (int peer = 0; peer < kNodes; ++peer) {
          if (peer == node) continue;
          Put put;
          put.node = peer;
          put.operation = operation;
          put.region = kRegion;
          put.part = static_cast<uint16_t>(node);
          put.segments = {{data.data(), node * kBytes, 1500},
                          {data.data() + 1500, node * kBytes + 1500, kBytes - 1500}};
          put.head_bytes = 2000;
          ASSERT_TRUE(network.put(put).is_ok());
        }
        for (int peer = 0; peer < kNodes; ++peer) {
          if (peer == node) continue;
          const auto part = static_cast<uint16_t>(peer);
          const auto wanted = pattern(peer, operation, kBytes);
          const unsigned char* got = nodes.memory[static_cast<size_t>(node)].data() + peer * kBytes;
          ASSERT_TRUE(
              network.wait(peer, {EventKind::kHead, operation, 0, part}, 2000, guard_of()).is_ok());
          ASSERT_EQ(std::memcmp(got, wanted.data(), 2000), 0) << "head, operation " << operation;
          ASSERT_TRUE(
              network.wait(peer, {EventKind::kArrival, operation, 0, part}, kBytes, guard_of())
                  .is_ok());
          ASSERT_EQ(std::memcmp(got, wanted.data(), kBytes), 0) << "operation " << operation;
        }
        ASSERT_TRUE(network.drain(operation, guard_of()).is_ok());
        ASSERT_TRUE(network.quiesce(soon())
                        .is_ok());  // or a peer would overwrite what this node still compares
        network.end(operation);
      }
      EXPECT_TRUE(network.close(soon()).is_ok());
    });
  }
}

TEST(MemoryNetwork, IndependentMessagesOvertake) {
  MemoryNetworkOptions options;
  options.fate = [](const MemoryMessage& message) {
    return MemoryFate{
        message.event.kind == EventKind::kArrival ? milliseconds(300) : milliseconds(0), false};
  };
  Nodes nodes(2, options);
  nodes.begin_all(1);
  const auto data = pattern(0, 1, 100);
  Put put;
  put.node = 1;
  put.operation = 1;
  put.region = kRegion;
  put.segments = {{data.data(), 0, 100}};
  ASSERT_TRUE(nodes.at(0).put(put).is_ok());
  ASSERT_TRUE(nodes.at(0).signal(1, {EventKind::kConfirm, 1, 0, 0}).is_ok());
  ASSERT_TRUE(nodes.at(1).wait(0, {EventKind::kConfirm, 1, 0, 0}, 1, guard_of()).is_ok());
  EXPECT_EQ(nodes.at(1).count(0, {EventKind::kArrival, 1, 0, 0}), 0);
  EXPECT_EQ(nodes.memory[1][0], 0);
  ASSERT_TRUE(nodes.at(1).wait(0, {EventKind::kArrival, 1, 0, 0}, 100, guard_of()).is_ok());
  EXPECT_EQ(std::memcmp(nodes.memory[1].data(), data.data(), 100), 0);
}

TEST(MemoryNetwork, CountsAddUpAndEarlyEventsAreKept) {
  Nodes nodes(2);
  ASSERT_TRUE(nodes.at(0).begin(1, 5, "first").is_ok());
  const Event grant{EventKind::kGrant, 1, 2, 3};
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(nodes.at(0).signal(1, grant, 10).is_ok());
  ASSERT_TRUE(nodes.at(0).drain(1, guard_of()).is_ok());
  EXPECT_EQ(nodes.at(1).count(0, grant), 40);
  ASSERT_TRUE(nodes.at(1).begin(1, 5, "first").is_ok());
  EXPECT_TRUE(nodes.at(1).wait(0, grant, 40, guard_of()).is_ok());
  EXPECT_EQ(nodes.at(1).count(0, {EventKind::kGrant, 1, 2, 4}), 0);
  nodes.at(1).end(1);
  EXPECT_EQ(nodes.at(1).count(0, grant), 0);
  ASSERT_TRUE(nodes.at(0).signal(1, grant, 1).is_ok());  // late: dropped, no harm
  ASSERT_TRUE(nodes.at(0).drain(1, guard_of()).is_ok());
  EXPECT_EQ(nodes.at(1).count(0, grant), 0);
  EXPECT_TRUE(nodes.at(1).error().is_ok());
}

TEST(MemoryNetwork, ADifferentProgramBreaksBothSidesByName) {
  for (const bool late_begin : {false, true}) {
    Nodes nodes(2);
    if (!late_begin) {
      ASSERT_TRUE(nodes.at(1).begin(1, 0xb, "gather of layers.4").is_ok());
    }
    ASSERT_TRUE(nodes.at(0).begin(1, 0xa, "gather of layers.3").is_ok());
    const Event confirm{EventKind::kConfirm, 1, 0, 0};
    ASSERT_TRUE(nodes.at(0).signal(1, confirm).is_ok());
    if (late_begin) {
      ASSERT_TRUE(nodes.at(0).drain(1, guard_of()).is_ok());
      const Status begun = nodes.at(1).begin(1, 0xb, "gather of layers.4");
      EXPECT_EQ(begun.kind(), ErrorKind::kInvalidUse);
    }
    ASSERT_FALSE(nodes.at(0).wait(1, confirm, 1, guard_of()).is_ok());
    const Status here = nodes.at(1).error();
    EXPECT_EQ(here.kind(), ErrorKind::kInvalidUse);
    EXPECT_THAT(here.message(), HasSubstr("gather of layers.4"));
    EXPECT_THAT(here.message(), HasSubstr("node 0 runs program 000000000000000a"));
    const Status there = nodes.at(0).wait(1, {EventKind::kConfirm, 1, 0, 0}, 1, guard_of());
    EXPECT_EQ(there.kind(), ErrorKind::kPeerLost);
    EXPECT_THAT(there.message(), HasSubstr("gather of layers.4"));
  }
}

TEST(MemoryNetwork, DroppedBytesEndInATimeoutThatSaysWhatIsMissing) {
  MemoryNetworkOptions options;
  options.fate = [](const MemoryMessage& message) {
    return MemoryFate{microseconds(0), message.event.kind == EventKind::kArrival};
  };
  Nodes nodes(2, options);
  nodes.begin_all(1);
  const auto data = pattern(0, 1, 500);
  Put put;
  put.node = 1;
  put.operation = 1;
  put.round = 2;
  put.region = kRegion;
  put.segments = {{data.data(), 0, 500}};
  put.head_bytes = 100;
  ASSERT_TRUE(nodes.at(0).put(put).is_ok());
  ASSERT_TRUE(nodes.at(1).wait(0, {EventKind::kHead, 1, 2, 0}, 100, guard_of()).is_ok());
  EXPECT_EQ(nodes.memory[1][99], data[99]);
  EXPECT_EQ(nodes.memory[1][100], 0);
  const Status waited =
      nodes.at(1).wait(0, {EventKind::kArrival, 1, 2, 0}, 500, guard_of(milliseconds(60)));
  EXPECT_EQ(waited.kind(), ErrorKind::kTimeout);
  EXPECT_THAT(waited.message(), HasSubstr("node 1 of group 'memory': waited 60 ms"));
  EXPECT_THAT(waited.message(),
              HasSubstr("operation 1, round 2, part 0 from node 0): wanted 500, got 0"));
  const Status drained = nodes.at(0).drain(1, guard_of(milliseconds(60)));
  EXPECT_EQ(drained.kind(), ErrorKind::kTimeout);
  EXPECT_THAT(drained.message(), HasSubstr("1 posts of operation 1"));
}

TEST(MemoryNetwork, TheSourceIsReadUntilTheDrain) {
  MemoryNetworkOptions options;
  options.fate = [](const MemoryMessage&) { return MemoryFate{milliseconds(30), false}; };
  Nodes nodes(2, options);
  nodes.begin_all(1);
  std::vector<unsigned char> data(64, 1);
  Put put;
  put.node = 1;
  put.operation = 1;
  put.region = kRegion;
  put.segments = {{data.data(), 0, 64}};
  ASSERT_TRUE(nodes.at(0).put(put).is_ok());
  ASSERT_TRUE(nodes.at(0).drain(1, guard_of()).is_ok());
  std::fill(data.begin(), data.end(), 2);
  EXPECT_EQ(nodes.at(1).count(0, {EventKind::kArrival, 1, 0, 0}), 64);
  EXPECT_EQ(nodes.memory[1][63], 1);
}

TEST(MemoryNetwork, ADeathReachesWaitsListenersAndLaterCalls) {
  Nodes nodes(3);
  std::atomic<int> heard{0};
  nodes.at(0).on_failure([&](int node, const Status& reason) {
    EXPECT_EQ(node, 2);
    EXPECT_THAT(reason.message(), HasSubstr("node 2 died"));
    ++heard;
  });
  nodes.begin_all(1);
  std::thread killer([&] { break_memory_network(nodes.at(2)); });
  const Status waited = nodes.at(0).wait(1, {EventKind::kArrival, 1, 0, 0}, 1, guard_of());
  killer.join();
  EXPECT_EQ(waited.kind(), ErrorKind::kPeerLost);
  EXPECT_THAT(waited.message(), HasSubstr("node 2 died"));
  EXPECT_FALSE(nodes.at(0).peer_status(2).is_ok());
  EXPECT_TRUE(nodes.at(0).peer_status(1).is_ok());
  EXPECT_EQ(nodes.at(0).signal(1, {EventKind::kGrant, 1, 0, 0}).message(), waited.message());
  EXPECT_FALSE(nodes.at(2).begin(2, 1, "after death").is_ok());
  EXPECT_TRUE(nodes.at(0).close(soon()).is_ok());
  EXPECT_EQ(heard, 1);
}

TEST(MemoryNetwork, FailReachesPeersWithItsReason) {
  Nodes nodes(3);
  nodes.begin_all(1);
  nodes.at(1).fail({ErrorKind::kTimeout, "gather 1 waited too long"});
  const Status waited = nodes.at(2).wait(0, {EventKind::kArrival, 1, 0, 0}, 1, guard_of());
  EXPECT_EQ(waited.kind(), ErrorKind::kPeerLost);
  EXPECT_THAT(waited.message(),
              HasSubstr("node 2 of group 'memory': node 1 reported: timeout: gather 1 waited"));
  EXPECT_EQ(nodes.at(1).error().kind(), ErrorKind::kTimeout);
}

TEST(MemoryNetwork, NothingLandsAfterCloseOfABrokenNetwork) {
  MemoryNetworkOptions options;
  options.fate = [](const MemoryMessage&) { return MemoryFate{milliseconds(100), false}; };
  Nodes nodes(2, options);
  nodes.begin_all(1);
  const std::vector<unsigned char> data(1000, 9);
  Put put;
  put.node = 1;
  put.operation = 1;
  put.region = kRegion;
  put.segments = {{data.data(), 0, 1000}};
  ASSERT_TRUE(nodes.at(0).put(put).is_ok());
  nodes.at(1).fail({ErrorKind::kInternal, "on purpose"});
  EXPECT_TRUE(nodes.at(1).close(soon()).is_ok());
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_EQ(std::count(nodes.memory[1].begin(), nodes.memory[1].end(), 9), 0);
}

TEST(MemoryNetwork, RegionsAreVoted) {
  MemoryNetworkOptions options;
  options.refuse_region = [](int node, const MemoryBlock&) {
    return node == 1 ? Status(ErrorKind::kSystem, "out of memory keys") : Status::ok();
  };
  auto networks = make_memory_networks(2, options);
  std::vector<char> memory(100);
  std::vector<Status> answers(2);
  std::thread other([&] { answers[1] = networks[1]->add_region(1, {memory.data(), 100}, soon()); });
  answers[0] = networks[0]->add_region(1, {memory.data(), 100}, soon());
  other.join();
  EXPECT_EQ(answers[0].message(), answers[1].message());
  EXPECT_EQ(answers[0].message(), "node 1: out of memory keys");

  auto uneven = make_memory_networks(2);
  std::thread larger([&] { answers[1] = uneven[1]->add_region(1, {memory.data(), 100}, soon()); });
  answers[0] = uneven[0]->add_region(1, {memory.data(), 50}, soon());
  larger.join();
  EXPECT_EQ(answers[0].kind(), ErrorKind::kInvalidUse);
  EXPECT_EQ(answers[0].message(), answers[1].message());

  auto alone = make_memory_networks(2);
  const Status late =
      alone[0]->add_region(1, {memory.data(), 100}, Clock::now() + milliseconds(40));
  EXPECT_EQ(late.kind(), ErrorKind::kTimeout);
  EXPECT_THAT(late.message(), HasSubstr("1 of 2 nodes came"));
}

TEST(MemoryNetwork, WrongPutsAreRefusedBeforeAnyByteMoves) {
  Nodes nodes(2, {}, 1000);
  nodes.begin_all(1);
  const std::vector<char> data(2000);
  Put put;
  put.node = 1;
  put.operation = 1;
  put.region = kRegion;
  put.segments = {{data.data(), 0, 500}, {data.data(), 900, 101}};
  EXPECT_THAT(nodes.at(0).put(put).message(),
              HasSubstr("101 bytes to offset 900 of region 3 with 1000 bytes"));
  put.segments = {{data.data(), -1, 1}};
  EXPECT_FALSE(nodes.at(0).put(put).is_ok());
  put.segments = {{data.data(), INT64_MAX, 1}};
  EXPECT_FALSE(nodes.at(0).put(put).is_ok());
  put.segments = {{data.data(), 0, 1}};
  put.region = 4;
  EXPECT_FALSE(nodes.at(0).put(put).is_ok());
  put.region = kRegion;
  put.node = 0;
  EXPECT_FALSE(nodes.at(0).put(put).is_ok());
  put.node = 1;
  put.operation = 2;
  EXPECT_FALSE(nodes.at(0).put(put).is_ok());
  EXPECT_TRUE(nodes.at(0).error().is_ok());
  EXPECT_EQ(std::count(nodes.memory[1].begin(), nodes.memory[1].end(), 0), 1000);
}

TEST(MemoryNetwork, GoodbyeEndsAWaitButIsNoFailure) {
  Nodes nodes(2);
  nodes.begin_all(1);
  std::atomic<bool> heard{false};
  nodes.at(0).on_failure([&](int, const Status&) { heard = true; });
  std::thread leaver(
      [&] { EXPECT_TRUE(nodes.at(1).close(Clock::now() + milliseconds(50)).is_ok()); });
  const Status waited = nodes.at(0).wait(1, {EventKind::kArrival, 1, 0, 0}, 1, guard_of());
  leaver.join();
  EXPECT_EQ(waited.kind(), ErrorKind::kPeerLost);
  EXPECT_THAT(waited.message(), HasSubstr("node 1 has finished and left"));
  EXPECT_TRUE(nodes.at(0).error().is_ok());
  EXPECT_TRUE(nodes.at(0).close(soon()).is_ok());
  EXPECT_FALSE(heard);
}

TEST(MemoryNetwork, QuiesceMeansThatNothingIsUnderWay) {
  MemoryNetworkOptions options;
  options.fate = random_delays(11, microseconds(2000));
  Nodes nodes(3, options, 300);
  nodes.each([&](int node) {
    Network& network = nodes.at(node);
    ASSERT_TRUE(network.begin(1, 1, "scatter").is_ok());
    const std::vector<unsigned char> data(100, static_cast<unsigned char>(node + 1));
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == node) continue;
      Put put;
      put.node = peer;
      put.operation = 1;
      put.region = kRegion;
      put.segments = {{data.data(), 100 * node, 100}};
      ASSERT_TRUE(network.put(put).is_ok());
    }
    ASSERT_TRUE(network.quiesce(soon()).is_ok());
    const auto& memory = nodes.memory[static_cast<size_t>(node)];
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == node) continue;
      EXPECT_EQ(memory[static_cast<size_t>(100 * peer + 99)], peer + 1);
    }
    EXPECT_TRUE(network.remove_region(kRegion, soon()).is_ok());
  });
}

TEST(MemoryNetwork, AGuardEndsAWait) {
  Nodes nodes(2);
  nodes.begin_all(1);
  std::atomic<bool> failed{true};
  WaitGuard flagged = guard_of();
  flagged.failed = &failed;
  EXPECT_EQ(nodes.at(0).wait(1, {EventKind::kGrant, 1, 0, 0}, 1, flagged).kind(),
            ErrorKind::kPeerLost);
  WaitGuard checking = guard_of();
  checking.check = [] { return Status(ErrorKind::kSystem, "the store says so"); };
  EXPECT_EQ(nodes.at(0).wait(1, {EventKind::kGrant, 1, 0, 0}, 1, checking).message(),
            "the store says so");
}

}  // namespace
}  // namespace tide
