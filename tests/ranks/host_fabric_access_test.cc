// Who may open a window: processes of the same user that know the group's token, as long as the
// group is being made.
#include <gmock/gmock.h>

#include "tests/ranks/host_fabric_ranks.h"
#include "transports/host/message.h"

namespace tide::test {
namespace {

using testing::HasSubstr;

// Connects to rank 0's socket and says hello as rank 1; returns what it got for an answer.
Received intrude(KeyValueStore& store, const std::string& token, uid_t user) {
  const std::string member = store.get("fabric/test/member/0", within(seconds(60))).value();
  if (user != ::geteuid()) {
    EXPECT_EQ(::setuid(user), 0);
  }
  auto socket = connect_privately(member.substr(0, member.find(' ')));
  EXPECT_TRUE(socket.is_ok()) << socket.status().to_string();
  Message hello;
  hello.kind = MessageKind::kHello;
  hello.rank = 1;
  hello.size = 2;
  hello.token = token;
  (void)send_message(socket.value().get(), hello);  // it may be dropped already
  const Deadline deadline = within(seconds(60));
  Message answer;
  Received received = Received::kNothing;
  while (received == Received::kNothing && Clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(1));
    received = receive_message(socket.value().get(), answer);
  }
  return received;
}

// Rank 1's view of the store: it has published its own name, and reads others' only after the
// intruder has tried.
class LateStore : public KeyValueStore {
 public:
  explicit LateStore(KeyValueStore& store) : store_(store) {}
  Status set(const std::string& key, const std::string& value) override {
    return store_.set(key, value);
  }
  Result<std::string> get(const std::string& key, Deadline deadline) override {
    TIDE_RETURN_IF_ERROR(store_.get("the intruder has tried", deadline).status());
    return store_.get(key, deadline);
  }

 private:
  KeyValueStore& store_;
};

// Rank 0 waits for rank 1 while a stranger tries; then rank 1 connects, and both work.
void group_with_intruder(const std::function<void(KeyValueStore&)>& intruder) {
  FileStore store;
  Processes processes;
  for (int rank = 0; rank < 2; ++rank) {
    processes.start("rank " + std::to_string(rank), [&, rank] {
      LateStore late(store);
      auto fabric = connect(rank, 2, rank == 1 ? static_cast<KeyValueStore&>(late) : store);
      ASSERT_NE(fabric, nullptr);
      auto window = window_of(*fabric, 8192);
      barrier(*fabric, *window, 1);
    });
  }
  processes.expect_success(processes.start("intruder", [&] { intruder(store); }));
  ASSERT_TRUE(store.set("the intruder has tried", "yes").is_ok());
  processes.expect_all_succeed();
}

TEST(HostFabricAccess, AConnectionWithoutTheTokenIsDropped) {
  group_with_intruder([](KeyValueStore& store) {
    EXPECT_EQ(intrude(store, "0123456789abcdef0123456789abcdef", ::geteuid()), Received::kEnd);
    EXPECT_EQ(intrude(store, "", ::geteuid()), Received::kEnd);
  });
}

TEST(HostFabricAccess, AConnectionThatTalksNonsenseIsDropped) {
  group_with_intruder([](KeyValueStore& store) {
    const std::string member = store.get("fabric/test/member/0", within(seconds(60))).value();
    auto socket = connect_privately(member.substr(0, member.find(' ')));
    ASSERT_TRUE(socket.is_ok());
    ASSERT_GT(::write(socket.value().get(), "GET / HTTP/1.0", 14), 0);
    Message answer;
    Received received = Received::kNothing;
    while (received == Received::kNothing) received = receive_message(socket.value().get(), answer);
    EXPECT_EQ(received, Received::kEnd);
    auto silent =
        connect_privately(member.substr(0, member.find(' ')));  // says nothing, holds nobody up
    EXPECT_TRUE(silent.is_ok());
  });
}

TEST(HostFabricAccess, AnotherUserIsDroppedEvenWithTheToken) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  group_with_intruder([](KeyValueStore& store) {
    const std::string token = store.get("fabric/test/token", within(seconds(60))).value();
    EXPECT_EQ(intrude(store, token, 65534), Received::kEnd);
  });
}

TEST(HostFabricAccess, ARankOfAnotherUserIsRefusedWithBothUsers) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  FileStore store;
  Processes processes;
  for (int rank = 0; rank < 2; ++rank) {
    processes.start("rank", [&, rank] {
      if (rank == 1) {
        ASSERT_EQ(::setuid(65534), 0);
      }
      auto fabric = connect_host_fabric({rank, 2, "test", within(seconds(3)), "", {}}, store);
      ASSERT_FALSE(fabric.is_ok());
      EXPECT_EQ(fabric.status().kind(), rank == 1 ? ErrorKind::kInvalidUse : ErrorKind::kTimeout);
      if (rank == 1) {
        EXPECT_THAT(fabric.status().message(), HasSubstr("65534"));
      }
    });
  }
  processes.expect_all_succeed();
}

TEST(HostFabricAccess, NobodyListensOnceTheGroupIsMade) {
  on_ranks(2, [](int rank, KeyValueStore& store) {
    auto fabric = connect(rank, 2, store);
    auto window = window_of(*fabric, 8192);
    barrier(*fabric, *window, 1);
    for (int peer = 0; peer < 2; ++peer) {
      const std::string member =
          store.get("fabric/test/member/" + std::to_string(peer), within(seconds(1))).value();
      EXPECT_FALSE(connect_privately(member.substr(0, member.find(' '))).is_ok());
    }
    barrier(*fabric, *window, 2);
  });
}

TEST(HostFabricAccess, RanksOnDifferentNodesAreToldSo) {
  on_ranks(3, [](int rank, KeyValueStore& store) {
    HostFabricOptions options{rank, 3, "test", within(seconds(60)), rank == 2 ? "there" : "here",
                              {}};
    auto fabric = connect_host_fabric(options, store);
    ASSERT_FALSE(fabric.is_ok());
    EXPECT_EQ(fabric.status().kind(), ErrorKind::kUnsupported);
    EXPECT_EQ(fabric.status().message(),
              "group 'test': rank 2 is on node there, rank 0 on node here; shared memory needs all "
              "ranks on one");
  });
}

TEST(HostFabricAccess, OneProcessIsOnItsOwnNode) {
  EXPECT_EQ(node_identity(), node_identity());
  EXPECT_GT(node_identity().size(), 36u);
}

}  // namespace
}  // namespace tide::test
