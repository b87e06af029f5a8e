// The rail and its groups against a device that does its worst: order, refusals, capabilities, and
// what is left behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "tests/network/fake_ucx.h"
#include "tests/network/stores.h"
#include "tests/network/threads.h"
#include "transports/ucx/configuration.h"
#include "transports/ucx/message.h"
#include "transports/ucx/rail.h"
#include "transports/ucx/ucx_network.h"

namespace tide {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::guard_of;
using ::testing::HasSubstr;
using testing::soon;

// Nodes as threads on the fake device, each with a rail of its own.
struct Group {
  explicit Group(int nodes, const FakeUcxBehaviour& behaviour = {})
      : networks(static_cast<size_t>(nodes)), status(static_cast<size_t>(nodes)) {
    const UcxApi* api = fake_ucx(behaviour);
    const auto store = std::make_shared<MemoryStore>();
    each([&](int node) {
      UcxRailOptions options;
      options.device = "mlx5_0:1";
      options.rdma = true;
      options.chunk_bytes = 1000;
      options.window_bytes = 20'000;
      auto rail = UcxRail::open(options, api);
      UcxGroupOptions group;
      group.name = "fake";
      group.node = node;
      group.nodes = nodes;
      group.store = store;
      if (!rail.is_ok()) group.refusal = rail.status().message();
      auto connected = connect_ucx_group(rail.is_ok() ? rail.value() : nullptr, group, soon());
      status[static_cast<size_t>(node)] = connected.status();
      if (connected.is_ok()) networks[static_cast<size_t>(node)] = std::move(connected.value());
    });
  }
  ~Group() { close(); }
  void close() {
    each([&](int node) {
      if (networks[static_cast<size_t>(node)]) closed[node] = at(node).close(soon());
      networks[static_cast<size_t>(node)].reset();
    });
  }
  Network& at(int node) { return *networks[static_cast<size_t>(node)]; }
  template <class Body>
  void each(Body body) {
    on_each(static_cast<int>(networks.size()), body);
  }

  std::vector<std::unique_ptr<Network>> networks;
  std::vector<Status> status;
  Status closed[8];
};

TEST(UcxFake, NoEventComesBeforeItsBytes) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    constexpr int kNodes = 3;
    constexpr int64_t kBytes = 60'000;
    FakeUcxBehaviour behaviour;
    behaviour.seed = seed;
    Group group(kNodes, behaviour);
    group.each([&](int node) {
      ASSERT_TRUE(group.status[static_cast<size_t>(node)].is_ok())
          << group.status[static_cast<size_t>(node)].to_string();
      Network& network = group.at(node);
      std::vector<char> memory(kNodes * kBytes, 0);
      ASSERT_TRUE(network.add_region(1, {memory.data(), kNodes * kBytes}, soon()).is_ok());
      std::vector<char> source(kBytes);
      for (uint64_t operation = 1; operation <= 10; ++operation) {
        ASSERT_TRUE(network.begin(operation, 1, "op").is_ok());
        std::fill(source.begin(), source.end(),
                  static_cast<char>(operation * 10 + static_cast<uint64_t>(node)));
        for (int peer = 0; peer < kNodes; ++peer) {
          if (peer == node) continue;
          const Put put{peer,      operation, 0, 0, 1, {{source.data(), node * kBytes, kBytes}},
                        kBytes / 3};
          ASSERT_TRUE(network.put(put).is_ok());
        }
        for (int peer = 0; peer < kNodes; ++peer) {
          if (peer == node) continue;
          const char* area = memory.data() + peer * kBytes;
          const char wanted = static_cast<char>(operation * 10 + static_cast<uint64_t>(peer));
          ASSERT_TRUE(
              network.wait(peer, {EventKind::kHead, operation, 0, 0}, kBytes / 3, guard_of())
                  .is_ok());
          ASSERT_EQ(std::count(area, area + kBytes / 3, wanted), kBytes / 3)
              << "head, seed " << seed;
          ASSERT_TRUE(network.wait(peer, {EventKind::kArrival, operation, 0, 0}, kBytes, guard_of())
                          .is_ok());
          ASSERT_EQ(std::count(area, area + kBytes, wanted), kBytes) << "seed " << seed;
        }
        ASSERT_TRUE(network.quiesce(soon()).is_ok());
        network.end(operation);
      }
    });
    group.close();
    for (int node = 0; node < kNodes; ++node) EXPECT_TRUE(group.closed[node].is_ok());
    EXPECT_EQ(fake_ucx_live_objects(), 0);
  }
}

TEST(UcxFake, AsksForOneRailWithoutCopies) {
  Group group(2);
  ASSERT_TRUE(group.status[0].is_ok()) << group.status[0].to_string();
  const auto settings = fake_ucx_settings();
  EXPECT_EQ(settings.at("NET_DEVICES"), "mlx5_0:1");
  EXPECT_EQ(settings.at("RNDV_THRESH"), "inf");
  EXPECT_EQ(settings.at("PROTO_EMULATION_ENABLE"), "n");
  EXPECT_EQ(settings.at("MAX_RMA_RAILS"), "1");
  EXPECT_EQ(settings.at("TLS").rfind("rc", 0), 0u);
  EXPECT_EQ(settings.count("TCP_KEEPIDLE"), 0u);
  EXPECT_EQ(group.at(0).capabilities().transport, "rc_mlx5+ud_mlx5");
}

TEST(UcxFake, AKeyThatIsNotKnownIsANoteUnlessItIsNeeded) {
  FakeUcxBehaviour behaviour;
  behaviour.unknown_keys = {"RC_TIMEOUT"};
  {
    Group group(2, behaviour);
    ASSERT_TRUE(group.status[0].is_ok()) << group.status[0].to_string();
    EXPECT_THAT(group.at(0).capabilities().notes,
                ::testing::Contains(HasSubstr("does not know UCX_RC_TIMEOUT")));
  }
  behaviour.unknown_keys = {"RNDV_THRESH"};
  const Group refused(2, behaviour);
  EXPECT_THAT(refused.status[1].message(),
              HasSubstr("refused UCX_RNDV_THRESH=inf for device mlx5_0:1"));
}

TEST(UcxFake, AnotherTransportThanAskedForIsRefused) {
  FakeUcxBehaviour behaviour;
  behaviour.lanes = {{"rc_mlx5", "mlx5_0:1"}, {"tcp", "eth0"}};
  Group group(2, behaviour);
  for (const Status& status : group.status) {
    ASSERT_FALSE(status.is_ok());
    EXPECT_THAT(status.message(),
                HasSubstr("UCX connects over tcp on eth0, asked for was rc on mlx5_0:1"));
  }
  group.close();
  EXPECT_EQ(fake_ucx_live_objects(), 0);
}

TEST(UcxFake, APutThatWouldBeEmulatedKeepsTheGroupDown) {
  FakeUcxBehaviour behaviour;
  behaviour.put = UCS_ERR_UNSUPPORTED;
  Group group(2, behaviour);
  for (const Status& status : group.status) {
    ASSERT_FALSE(status.is_ok());
    EXPECT_THAT(status.message(), HasSubstr("Operation is not supported"));
  }
  group.close();
  EXPECT_EQ(fake_ucx_live_objects(), 0);
}

TEST(UcxFake, TcpNeedsAVersionThatCannotEmulate) {
  FakeUcxBehaviour behaviour;
  behaviour.minor = 20;
  UcxRailOptions options;
  options.device = "rail0";
  const auto refused = UcxRail::open(options, fake_ucx(behaviour));
  ASSERT_FALSE(refused.is_ok());
  EXPECT_THAT(refused.status().message(), HasSubstr("tcp rails need UCX 1.21 or newer"));
  options.rdma = true;
  EXPECT_TRUE(UcxRail::open(options, fake_ucx(behaviour)).is_ok());
  behaviour.minor = 21;
  options.rdma = false;
  EXPECT_TRUE(UcxRail::open(options, fake_ucx(behaviour)).is_ok());
}

TEST(UcxFake, WrongBytesInTheSelfTestKeepTheGroupDown) {
  FakeUcxBehaviour behaviour;
  behaviour.corrupts = true;
  const Group group(2, behaviour);
  for (const Status& status : group.status)
    EXPECT_THAT(status.message(), HasSubstr("arrived with wrong bytes"));
}

TEST(UcxFake, ARegistrationThatFailsIsSaidByAll) {
  FakeUcxBehaviour behaviour;
  behaviour.map = UCS_ERR_NO_MEMORY;
  const Group group(3, behaviour);
  for (const Status& status : group.status) {
    EXPECT_EQ(status.message(), group.status[0].message());
    EXPECT_THAT(status.message(),
                HasSubstr("node 0: system error: node 0 of group 'fake': registering"));
  }
}

TEST(UcxFake, GpuMemoryOnlyWhereUcxKnowsIt) {
  std::vector<char> memory(4096);
  const MemoryBlock block{memory.data(), 4096, MemoryKind::kCuda};
  std::vector<Status> added(2);
  {
    Group without(2);
    EXPECT_FALSE(without.at(0).capabilities().cuda_memory);
    without.each([&](int node) {
      added[static_cast<size_t>(node)] = without.at(node).add_region(1, block, soon());
    });
    EXPECT_THAT(added[0].message(), HasSubstr("cannot register GPU memory for mlx5_0:1; stage it"));
  }
  FakeUcxBehaviour behaviour;
  behaviour.knows_cuda = true;
  {
    Group with(2, behaviour);
    EXPECT_TRUE(with.at(0).capabilities().cuda_memory);
    with.each([&](int node) {
      added[static_cast<size_t>(node)] = with.at(node).add_region(1, block, soon());
    });
    EXPECT_TRUE(added[0].is_ok() && added[1].is_ok()) << added[0].to_string();
  }
  Group blind(2, behaviour);  // the group before it is closed
  fake_ucx_change([](FakeUcxBehaviour& now) { now.takes_cuda_for_host = true; });
  blind.each([&](int node) {
    added[static_cast<size_t>(node)] = blind.at(node).add_region(1, block, soon());
  });
  EXPECT_THAT(added[1].message(), HasSubstr("takes this memory for another kind than it is"));
}

TEST(UcxFake, ABrokenConnectionNamesThePeerAndTheCause) {
  Group group(3);
  std::atomic<int> heard{0};
  group.at(0).on_failure([&](int node, const Status&) { heard = heard.load() * 10 + node + 1; });
  for (int node = 0; node < 3; ++node) ASSERT_TRUE(group.at(node).begin(1, 1, "op").is_ok());
  fake_ucx_break(2, UCS_ERR_CONNECTION_RESET);  // workers come up in any order: it is some node
  Status waited[3];
  group.each([&](int node) {
    waited[node] =
        group.at(node).wait((node + 1) % 3, {EventKind::kArrival, 1, 0, 0}, 1, guard_of());
  });
  int named = 0;
  for (const Status& status : waited) {
    EXPECT_EQ(status.kind(), ErrorKind::kPeerLost);
    named += status.message().find("over mlx5_0:1 failed: Connection reset by remote peer") !=
                     std::string::npos
                 ? 1
                 : 0;
  }
  EXPECT_GE(named, 1) << "the others may hear of it from the first";
  group.close();
  EXPECT_EQ(fake_ucx_live_objects(), 0);
}

TEST(UcxFake, WhatDoesNotEndIsSaidWhenClosing) {
  Group group(2);
  std::vector<char> memory(8192);
  group.each([&](int node) {
    ASSERT_TRUE(group.at(node).add_region(1, {memory.data() + 4096 * node, 4096}, soon()).is_ok());
    ASSERT_TRUE(group.at(node).begin(1, 1, "op").is_ok());
  });
  fake_ucx_change([](FakeUcxBehaviour& now) { now.requests_hang = true; });
  ASSERT_TRUE(group.at(0).put({1, 1, 0, 0, 1, {{memory.data(), 0, 4096}}, 0}).is_ok());
  EXPECT_EQ(group.at(0).drain(1, guard_of(milliseconds(100))).kind(), ErrorKind::kTimeout);
  group.at(0).fail({ErrorKind::kTimeout, "the put hangs"});
  group.close();
  EXPECT_THAT(group.closed[0].message(),
              HasSubstr("memory that peers may write must not be used again"));
}

TEST(UcxFake, StrangersAreDroppedAndBrokenMessagesBreakTheGroup) {
  Group group(2);
  Message message;
  message.epoch = 12345;
  const auto raw = [](const Message& each, size_t bytes = sizeof(Message)) {
    return std::string(reinterpret_cast<const char*>(&each), bytes);
  };
  fake_ucx_inject("hello, who is there?", "");
  fake_ucx_inject("", std::string(5000, 'x'));
  fake_ucx_inject(raw(message), "");
  fake_ucx_inject(raw(message, 12), "");
  for (int node = 0; node < 2; ++node) {
    auto& network = static_cast<UcxNetwork&>(group.at(node));
    while (network.foreign_messages() < 4) std::this_thread::yield();
    EXPECT_TRUE(network.error().is_ok());
  }
}

TEST(Messages, AreJudgedByTheirBytes) {
  Message sent;
  sent.epoch = 77;
  sent.from_node = 1;
  sent.kind = static_cast<uint8_t>(MessageKind::kHeartbeat);
  const auto judge = [](const Message& message, size_t bytes, std::string* reason) {
    Message read;
    return read_message(&message, bytes, 77, 2, read, *reason);
  };
  std::string reason;
  EXPECT_EQ(judge(sent, 48, &reason), MessageVerdict::kOurs);
  EXPECT_EQ(judge(sent, 47, &reason), MessageVerdict::kBroken);
  EXPECT_THAT(reason, HasSubstr("truncated message: 47 bytes, wanted 48"));
  EXPECT_EQ(judge(sent, 15, &reason), MessageVerdict::kForeign);
  EXPECT_EQ(judge(sent, 0, &reason), MessageVerdict::kForeign);
  const auto changed = [&](auto change) {
    Message message = sent;
    change(message);
    return judge(message, 48, &reason);
  };
  EXPECT_EQ(changed([](Message& message) { message.magic = 1; }), MessageVerdict::kForeign);
  EXPECT_EQ(changed([](Message& message) { message.epoch = 78; }), MessageVerdict::kForeign);
  EXPECT_EQ(changed([](Message& message) { message.version = 2; }), MessageVerdict::kBroken);
  EXPECT_THAT(reason, HasSubstr("version 2, this node speaks version 1"));
  EXPECT_EQ(changed([](Message& message) { message.kind = 9; }), MessageVerdict::kBroken);
  EXPECT_EQ(changed([](Message& message) { message.from_node = 2; }), MessageVerdict::kBroken);
  EXPECT_EQ(changed([](Message& message) { message.from_node = -1; }), MessageVerdict::kBroken);
  EXPECT_EQ(changed([](Message& message) { message.amount = -5; }), MessageVerdict::kBroken);
}

TEST(Hellos, SurviveTheStoreAndAreCompared) {
  Hello hello;
  hello.protocol = 1;
  hello.transport = "tcp";
  hello.device = "rail0";
  hello.host = "host0";
  hello.nodes = 2;
  hello.ucx = "1.22.0";
  hello.epoch = ~uint64_t{0};
  hello.scratch_base = 1ull << 47;
  hello.scratch_key = std::string("\0k\ney 3\n", 8);
  hello.address = std::string("\n\0\xff", 3);
  const std::string text = write_hello(hello);
  const Hello read = read_hello(text).value();
  EXPECT_EQ(write_hello(read), text);
  EXPECT_EQ(read.epoch, hello.epoch);
  EXPECT_EQ(read.address, hello.address);
  for (size_t bytes = 0; bytes < text.size(); ++bytes)
    EXPECT_FALSE(read_hello(text.substr(0, bytes)).is_ok()) << bytes;
  EXPECT_FALSE(read_hello("something else that somebody stored").is_ok());

  EXPECT_TRUE(judge_hellos("g", {hello, hello}).is_ok());
  const auto judged = [&](auto change) {
    Hello other = hello;
    other.host = "host1";
    change(other);
    return judge_hellos("g", {hello, other}).message();
  };
  EXPECT_THAT(judged([](Hello& other) { other.protocol = 2; }),
              HasSubstr("node 1 (host1) speaks version 2, node 0 (host0) 1"));
  EXPECT_THAT(judged([](Hello& other) { other.ucx = "1.21.0"; }),
              HasSubstr("has UCX 1.21.0, node 0 (host0) 1.22.0"));
  EXPECT_EQ(judged([](Hello& other) { other.ucx = "1.22.1"; }), "");
  EXPECT_THAT(judged([](Hello& other) { other.transport = "rdma"; }),
              HasSubstr("uses rdma on rail0"));
  EXPECT_THAT(judged([](Hello& other) { other.nodes = 3; }), HasSubstr("counts 3 nodes"));
  EXPECT_THAT(judged([](Hello& other) { other.refusal = "no"; }), HasSubstr("node 1 (host1): no"));
}

TEST(Configuration, TheEnvironmentIsFollowedAndNamed) {
  const auto none = [](const char*) -> const char* { return nullptr; };
  const auto value_of = [](const UcxConfiguration& configuration,
                           const std::string& key) -> std::string {
    for (const UcxSetting& setting : configuration.settings) {
      if (setting.key == key) return setting.value;
    }
    return "unset";
  };
  const UcxConfiguration old = make_ucx_configuration("rail1", false, ucx_version(1, 16), none);
  EXPECT_EQ(value_of(old, "NET_DEVICES"), "rail1");
  EXPECT_EQ(value_of(old, "TLS"), "tcp,self");
  EXPECT_EQ(value_of(old, "PROTO_EMULATION_ENABLE"), "unset");
  EXPECT_EQ(value_of(old, "TCP_USER_TIMEOUT"), "unset");
  const UcxConfiguration theirs = make_ucx_configuration(
      "rail1", false, ucx_version(1, 22), [](const char* name) -> const char* {
        return std::string(name) == "UCX_TLS"           ? "all"
               : std::string(name) == "UCX_RNDV_THRESH" ? "8k"
                                                        : nullptr;
      });
  EXPECT_EQ(value_of(theirs, "TLS"), "unset");
  EXPECT_EQ(value_of(theirs, "RNDV_THRESH"), "inf");
  EXPECT_THAT(theirs.notes,
              ::testing::UnorderedElementsAre(HasSubstr("UCX_TLS=all is followed"),
                                              HasSubstr("UCX_RNDV_THRESH=8k is not followed")));
}

TEST(UcxApi, OldIncompleteAndDoubledLibrariesAreRefused) {
  FakeUcxBehaviour behaviour;
  behaviour.minor = 15;
  EXPECT_THAT(check_ucx(*fake_ucx(behaviour)).message(), HasSubstr("too old: tide needs 1.16"));
  UcxApi incomplete = *fake_ucx();
  EXPECT_TRUE(check_ucx(incomplete).is_ok());
  incomplete.put_nbx = nullptr;
  EXPECT_THAT(check_ucx(incomplete).message(), HasSubstr("lacks functions of UCX 1.16"));

  const std::string maps =
      "7f00-7f01 r--p 00000000 fe:00 12 /opt/ucx/lib/libucs.so.0.0.0\n"
      "7f01-7f02 r-xp 00000000 fe:00 12 /opt/ucx/lib/libucs.so.0.0.0\n"
      "7f03-7f04 r--p 00000000 fe:00 13 /opt/ucx/lib/libucs_signal.so.0.0.0\n"
      "7f05-7f06 rw-p 00000000 00:00 0\n"
      "7f07-7f08 r-xp 00000000 fe:00 14 /home/a b/nixl.libs/libucs-1a2b3c.so.0.0.0\n";
  EXPECT_THAT(ucx_copies(maps, "libucs"),
              ::testing::ElementsAre("/opt/ucx/lib/libucs.so.0.0.0",
                                     "/home/a b/nixl.libs/libucs-1a2b3c.so.0.0.0"));
  EXPECT_THAT(ucx_copies(maps, "libucp"), ::testing::IsEmpty());
}

TEST(TransferQueue, KeepsTheWindowTheHeadAndTheTurns) {
  TransferQueue queue(10, 4);
  const char data[64] = {};
  const auto transfer = [&](std::vector<Segment> segments, int64_t head) {
    auto made = std::make_shared<Transfer>();
    made->put.segments = std::move(segments);
    made->put.head_bytes = head;
    for (const Segment& segment : made->put.segments) made->total_bytes += segment.bytes;
    return made;
  };
  queue.add(5, transfer({{data, 100, 3}, {data + 3, 200, 0}, {data + 3, 300, 10}}, 5));
  queue.add(9, transfer({{data + 20, 0, 9}}, 0));
  struct Posted {
    int flow;
    int64_t to, bytes;
    bool head, all;
    bool operator==(const Posted&) const = default;
  };
  std::vector<Posted> posted;
  std::map<int, int64_t> moved;
  std::deque<std::pair<int, int64_t>> outstanding;
  for (int step = 0; step < 100 && (queue.waits() || !outstanding.empty()); ++step) {
    int flow = 0;
    Chunk chunk;
    while (queue.next(&flow, &chunk)) {
      EXPECT_LE(queue.outstanding_bytes(), 10);
      posted.push_back({flow, chunk.to_offset, chunk.bytes, chunk.ends_head, chunk.ends_all});
      outstanding.emplace_back(flow, chunk.bytes);
      moved[flow] += chunk.bytes;
    }
    if (outstanding.empty()) continue;
    queue.landed(outstanding.front().first, outstanding.front().second);
    outstanding.pop_front();
  }
  EXPECT_EQ(moved[5], 13);
  EXPECT_EQ(moved[9], 9);
  std::vector<Posted> of_five;
  for (const Posted& each : posted) {
    if (each.flow == 5) of_five.push_back(each);
  }
  // Three bytes of the first segment, two more complete the head, then the rest in chunks of four.
  const std::vector<Posted> wanted = {{5, 100, 3, false, false},
                                      {5, 300, 2, true, false},
                                      {5, 302, 4, false, false},
                                      {5, 306, 4, false, true}};
  EXPECT_EQ(of_five, wanted);
  EXPECT_NE(posted[0].flow, posted[1].flow) << "flows take turns";
  EXPECT_EQ(queue.outstanding_bytes(), 0);
}

TEST(TransferQueue, AStuckFlowLeavesRoomForOthers) {
  TransferQueue queue(8, 2);
  const char data[64] = {};
  const auto add = [&](int flow) {
    auto made = std::make_shared<Transfer>();
    made->put.segments = {{data, 0, 40}};
    made->total_bytes = 40;
    queue.add(flow, made);
  };
  add(1);
  int flow = 0;
  Chunk chunk;
  while (queue.next(&flow, &chunk)) continue;
  EXPECT_EQ(queue.outstanding_bytes(),
            8);  // alone, it has the whole window, and now nothing of it lands
  add(2);
  queue.landed(1, 2);
  ASSERT_TRUE(queue.next(&flow, &chunk));
  EXPECT_EQ(flow, 2) << "the flow beyond its share waits";
  queue.drop(1);
  queue.landed(2, 2);
  ASSERT_TRUE(queue.next(&flow, &chunk));
  EXPECT_EQ(flow, 2);
}

}  // namespace
}  // namespace tide
