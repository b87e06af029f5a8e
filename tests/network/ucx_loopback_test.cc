// The network over real UCX, tcp on the loopback interface; nodes are threads with a rail each.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <thread>

#include "tests/network/stores.h"
#include "tests/network/threads.h"
#include "transports/ucx/ucx_network.h"

namespace tide {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::byte_at;
using testing::guard_of;
using ::testing::HasSubstr;
using testing::soon;

constexpr int kRegion = 1;

UcxRailOptions rail_options() {
  UcxRailOptions options;
  options.device = "lo";
  const char* library = std::getenv("TIDE_TEST_UCX_LIBRARY");
  if (library != nullptr) options.library_candidates = {library};
  return options;
}

class UcxLoopback : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto rail = open_ucx_rail(rail_options());
    if (!rail.is_ok()) GTEST_SKIP() << rail.status().message();
  }

  struct Group {
    explicit Group(int nodes, const UcxRailOptions& rail = rail_options(),
                   const std::function<void(int, UcxGroupOptions&)>& change = {})
        : networks(static_cast<size_t>(nodes)), status(static_cast<size_t>(nodes)) {
      const auto store = std::make_shared<MemoryStore>();
      each([&](int node) {
        auto opened = open_ucx_rail(rail);
        ASSERT_TRUE(opened.is_ok()) << opened.status().to_string();
        UcxGroupOptions options;
        options.name = "test";
        options.node = node;
        options.nodes = static_cast<int>(networks.size());
        options.store = store;
        if (change) change(node, options);
        auto connected = connect_ucx_group(opened.value(), options, soon());
        status[static_cast<size_t>(node)] = connected.status();
        if (connected.is_ok()) networks[static_cast<size_t>(node)] = std::move(connected.value());
      });
    }
    ~Group() { close(); }
    void close() {
      each([&](int node) {
        if (!networks[static_cast<size_t>(node)]) return;
        EXPECT_TRUE(at(node).close(soon()).is_ok());
      });
    }
    Network& at(int node) { return *networks[static_cast<size_t>(node)]; }
    template <class Body>
    void each(Body body) {
      on_each(static_cast<int>(networks.size()), body);
    }
    bool up() const {
      for (const Status& each : status) EXPECT_TRUE(each.is_ok()) << each.to_string();
      for (const auto& network : networks) {
        if (!network) return false;
      }
      return true;
    }

    std::vector<std::unique_ptr<Network>> networks;
    std::vector<Status> status;
  };
};

TEST_F(UcxLoopback, SaysWhatItUses) {
  Group group(2);
  ASSERT_TRUE(group.up());
  const NetworkCapabilities& capabilities = group.at(0).capabilities();
  EXPECT_EQ(capabilities.kind, "ucx");
  EXPECT_EQ(capabilities.transport, "tcp");
  EXPECT_EQ(capabilities.device, "lo");
  EXPECT_THAT(capabilities.version, HasSubstr("UCX 1."));
  EXPECT_FALSE(capabilities.cuda_memory);
}

TEST_F(UcxLoopback, EveryByteOfAnAllToAllIsRightWhenCounted) {
  for (const int nodes : {2, 3, 5}) {
    UcxRailOptions rail = rail_options();
    rail.chunk_bytes = 10'007;  // odd cuts
    rail.window_bytes = 50'000;
    Group group(nodes, rail);
    ASSERT_TRUE(group.up());
    constexpr int64_t kBytes = 200'001;
    group.each([&](int node) {
      Network& network = group.at(node);
      std::vector<unsigned char> memory(static_cast<size_t>(nodes * kBytes));
      std::vector<unsigned char> source(kBytes);
      ASSERT_TRUE(network.add_region(kRegion, {memory.data(), nodes * kBytes}, soon()).is_ok());
      ASSERT_TRUE(network.add_source({source.data(), kBytes}).is_ok());
      for (uint64_t operation = 1; operation <= 6; ++operation) {
        ASSERT_TRUE(network.begin(operation, operation * 3, "all to all").is_ok());
        for (int64_t i = 0; i < kBytes; ++i)
          source[static_cast<size_t>(i)] = byte_at(node, operation, i);
        for (int peer = 0; peer < nodes; ++peer) {
          if (peer == node) continue;
          Put put;
          put.node = peer;
          put.operation = operation;
          put.round = 4;
          put.region = kRegion;
          put.segments = {{source.data(), node * kBytes, 1},
                          {source.data() + 1, node * kBytes + 1, 0},
                          {source.data() + 1, node * kBytes + 1, 99'999},
                          {source.data() + 100'000, node * kBytes + 100'000, kBytes - 100'000}};
          put.head_bytes = 60'000;
          ASSERT_TRUE(network.put(put).is_ok());
        }
        for (int peer = 0; peer < nodes; ++peer) {
          if (peer == node) continue;
          const auto wrong = [&](int64_t bytes) {
            for (int64_t i = 0; i < bytes; ++i) {
              if (memory[static_cast<size_t>(peer * kBytes + i)] != byte_at(peer, operation, i))
                return i;
            }
            return int64_t{-1};
          };
          Status waited =
              network.wait(peer, {EventKind::kHead, operation, 4, 0}, 60'000, guard_of());
          ASSERT_TRUE(waited.is_ok()) << waited.to_string();
          ASSERT_EQ(wrong(60'000), -1);
          waited = network.wait(peer, {EventKind::kArrival, operation, 4, 0}, kBytes, guard_of());
          ASSERT_TRUE(waited.is_ok()) << waited.to_string();
          ASSERT_EQ(wrong(kBytes), -1);
        }
        ASSERT_TRUE(network.quiesce(soon()).is_ok());
        network.end(operation);
      }
      ASSERT_TRUE(network.remove_region(kRegion, soon()).is_ok());
      EXPECT_FALSE(
          network.put({(node + 1) % nodes, 7, 0, 0, kRegion, {{source.data(), 0, 1}}, 0}).is_ok());
    });
  }
}

TEST_F(UcxLoopback, TwoGroupsShareARail) {
  const auto rail = open_ucx_rail(rail_options()).value();
  const auto other = open_ucx_rail(rail_options()).value();
  for (int life = 0; life < 3; ++life) {
    std::vector<std::shared_ptr<MemoryStore>> stores = {std::make_shared<MemoryStore>(),
                                                        std::make_shared<MemoryStore>()};
    std::vector<std::unique_ptr<Network>> networks(4);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        UcxGroupOptions options;
        options.name = i < 2 ? "first" : "second";
        options.node = i % 2;
        options.nodes = 2;
        options.store = stores[static_cast<size_t>(i / 2)];
        auto connected = connect_ucx_group(i % 2 == 0 ? rail : other, options, soon());
        ASSERT_TRUE(connected.is_ok()) << connected.status().to_string();
        networks[static_cast<size_t>(i)] = std::move(connected.value());
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (auto& network : networks) ASSERT_TRUE(network && network->begin(1, 1, "op").is_ok());
    // The first group breaks, the second goes on.
    networks[0]->fail({ErrorKind::kTimeout, "on purpose"});
    const Status heard = networks[1]->wait(0, {EventKind::kGrant, 1, 0, 0}, 1, guard_of());
    EXPECT_EQ(heard.kind(), ErrorKind::kPeerLost);
    EXPECT_THAT(heard.message(),
                HasSubstr("node 1 of group 'first': node 0 reported: timeout: on purpose"));
    EXPECT_TRUE(networks[0]->close(soon()).is_ok());
    EXPECT_TRUE(networks[1]->close(soon()).is_ok());
    ASSERT_TRUE(networks[2]->signal(1, {EventKind::kGrant, 1, 0, 0}, 5).is_ok());
    EXPECT_TRUE(networks[3]->wait(0, {EventKind::kGrant, 1, 0, 0}, 5, guard_of()).is_ok());
    std::thread closer([&] { EXPECT_TRUE(networks[2]->close(soon()).is_ok()); });
    EXPECT_TRUE(networks[3]->close(soon()).is_ok());
    closer.join();
    EXPECT_EQ(networks[3]->error().kind(), ErrorKind::kInvalidUse)
        << networks[3]->error().to_string();
  }
}

TEST_F(UcxLoopback, NothingLandsAfterTheCloseOfABrokenGroup) {
  UcxRailOptions rail = rail_options();
  Group group(2, rail);
  ASSERT_TRUE(group.up());
  constexpr int64_t kBytes = 64 << 20;
  std::vector<unsigned char> memory(kBytes);
  std::vector<unsigned char> source(kBytes, 7);
  group.each([&](int node) {
    unsigned char* base = node == 1 ? memory.data() : source.data();
    ASSERT_TRUE(group.at(node).add_region(kRegion, {base, kBytes}, soon()).is_ok());
    ASSERT_TRUE(group.at(node).begin(1, 1, "big put").is_ok());
  });
  Put put;
  put.node = 1;
  put.operation = 1;
  put.region = kRegion;
  put.segments = {{source.data(), 0, kBytes}};
  put.head_bytes = 1 << 20;
  ASSERT_TRUE(group.at(0).put(put).is_ok());
  ASSERT_TRUE(group.at(1).wait(0, {EventKind::kHead, 1, 0, 0}, 1 << 20, guard_of()).is_ok());
  group.at(1).fail({ErrorKind::kInternal, "on purpose, while the tail flies"});
  ASSERT_TRUE(group.at(1).close(soon()).is_ok());
  EXPECT_EQ(group.at(1).count(0, {EventKind::kArrival, 1, 0, 0}), 0)
      << "the tail was over before the failure";
  std::fill(memory.begin(), memory.end(), 99);
  const Status sender = group.at(0).drain(1, guard_of());
  EXPECT_THAT(sender.message(), HasSubstr("while the tail flies"));
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_EQ(std::count(memory.begin(), memory.end(), 99), kBytes);
}

TEST_F(UcxLoopback, NodesThatCannotFormAGroupSayWhyOnEveryNode) {
  Group uneven(3, rail_options(),
               [](int node, UcxGroupOptions& options) { options.rail = node == 2 ? 1 : 0; });
  for (const Status& status : uneven.status) {
    EXPECT_EQ(status.kind(), ErrorKind::kInvalidUse);
    EXPECT_THAT(status.message(), HasSubstr("node 2"));
    EXPECT_THAT(status.message(), HasSubstr("brings rail 1 (lo)"));
    EXPECT_EQ(status.message(), uneven.status[0].message());
  }
  Group refused(2, rail_options(), [](int node, UcxGroupOptions& options) {
    if (node == 1) options.refusal = "no NIC near GPU 3";
  });
  for (const Status& status : refused.status) {
    EXPECT_EQ(status.kind(), ErrorKind::kUnsupported);
    EXPECT_EQ(status.message(), "group 'test': node 1: no NIC near GPU 3");
  }
}

TEST_F(UcxLoopback, AMissingNodeIsATimeoutThatNamesIt) {
  UcxGroupOptions options;
  options.name = "alone";
  options.nodes = 2;
  options.store = std::make_shared<MemoryStore>();
  const auto connected = connect_ucx_group(open_ucx_rail(rail_options()).value(), options,
                                           Clock::now() + milliseconds(100));
  EXPECT_EQ(connected.status().kind(), ErrorKind::kTimeout);
  EXPECT_THAT(connected.status().message(), HasSubstr("node 1 did not come to connect"));
}

TEST_F(UcxLoopback, AVetoAboutARegionLeavesTheGroupWhole) {
  Group group(2);
  ASSERT_TRUE(group.up());
  std::vector<unsigned char> memory(4096);
  std::vector<Status> answers(2);
  group.each([&](int node) {
    answers[static_cast<size_t>(node)] =
        group.at(node).add_region(1, {memory.data(), node == 0 ? 4096 : 100}, soon());
  });
  for (const Status& answer : answers) EXPECT_THAT(answer.message(), HasSubstr("4096"));
  group.each([&](int node) {
    answers[static_cast<size_t>(node)] = group.at(node).add_region(
        1, {memory.data(), 4096, node == 0 ? MemoryKind::kHost : MemoryKind::kCuda}, soon());
  });
  EXPECT_EQ(answers[0].message(), answers[1].message());
  EXPECT_THAT(answers[0].message(), HasSubstr("node 1: unsupported"));
  group.each([&](int node) {
    std::vector<unsigned char> own(4096);
    EXPECT_TRUE(group.at(node).add_region(1, {own.data(), 4096}, soon()).is_ok());
    EXPECT_TRUE(group.at(node).remove_region(1, soon()).is_ok());
  });
}

TEST_F(UcxLoopback, ADeviceThatIsNotThereIsRefusedByName) {
  UcxRailOptions options = rail_options();
  options.device = "nosuch7";
  const auto rail = open_ucx_rail(options);
  ASSERT_FALSE(rail.is_ok());
  EXPECT_THAT(rail.status().message(), HasSubstr("nosuch7"));
  EXPECT_EQ(rail.status().kind(), ErrorKind::kUnsupported);
}

TEST_F(UcxLoopback, DifferentProgramsAreNamedOnBothSides) {
  Group group(2);
  ASSERT_TRUE(group.up());
  ASSERT_TRUE(group.at(0).begin(1, 0xa, "gather of layers.3").is_ok());
  ASSERT_TRUE(group.at(1).begin(1, 0xb, "gather of layers.4").is_ok());
  ASSERT_TRUE(group.at(0).signal(1, {EventKind::kConfirm, 1, 0, 0}, 1).is_ok());
  const Status here = group.at(1).wait(0, {EventKind::kConfirm, 1, 0, 0}, 1, guard_of());
  EXPECT_THAT(
      here.message(),
      HasSubstr("'gather of layers.4' with program 000000000000000b here, and node 0 runs"));
  const Status there = group.at(0).wait(1, {EventKind::kConfirm, 1, 0, 0}, 1, guard_of());
  EXPECT_THAT(there.message(), HasSubstr("node 1 reported: "));
}

// Sends to the worker of node `node`, whose hello lies in the store, as a stranger with the address
// could.
void intrude(MemoryStore& store, int node, const std::vector<std::string>& headers) {
  const Hello hello =
      read_hello(store.get("hello/" + std::to_string(node), soon()).value()).value();
  const auto rail = open_ucx_rail(rail_options()).value();
  const UcxApi& api = rail->api();
  const Status sent = rail->run([&] {
    ucp_worker_params_t worker_parameters = {};
    ucp_worker_h worker = nullptr;
    EXPECT_EQ(api.worker_create(rail->context(), &worker_parameters, &worker), UCS_OK);
    ucp_ep_params_t parameters = {};
    parameters.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
    parameters.address = reinterpret_cast<const ucp_address_t*>(hello.address.data());
    ucp_ep_h endpoint = nullptr;
    EXPECT_EQ(api.ep_create(worker, &parameters, &endpoint), UCS_OK);
    int open = 0;
    ucp_request_param_t request = {};
    request.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    request.user_data = &open;
    request.cb.send = [](void* done, ucs_status_t, void* counter) {
      --*static_cast<int*>(counter);
      load_ucx({}).value()->request_free(done);
    };
    for (const std::string& header : headers) {
      open += UCS_PTR_IS_PTR(api.am_send_nbx(endpoint, kMessageId, header.data(), header.size(),
                                             "x", 1, &request))
                  ? 1
                  : 0;
    }
    open += UCS_PTR_IS_PTR(api.ep_flush_nbx(endpoint, &request)) ? 1 : 0;
    for (const Deadline until = soon(); open > 0 && Clock::now() < until;)
      api.worker_progress(worker);
    EXPECT_EQ(open, 0);
    for (int i = 0; i < 100; ++i) api.worker_progress(worker);
    api.worker_destroy(worker);
    return Status::ok();
  });
  EXPECT_TRUE(sent.is_ok());
}

std::string bytes_of(const Message& message, size_t bytes = sizeof(Message)) {
  return {reinterpret_cast<const char*>(&message), bytes};
}

TEST_F(UcxLoopback, StrangersDoNoHarmAndTruncatedMessagesAreNamed) {
  const auto store = std::make_shared<MemoryStore>();
  Group group(2, rail_options(), [&](int, UcxGroupOptions& options) { options.store = store; });
  ASSERT_TRUE(group.up());
  Message message;
  message.epoch = 1;
  intrude(*store, 1, {"hello?", bytes_of(message), bytes_of(message, 9), std::string(1000, 'z')});
  auto& network = static_cast<UcxNetwork&>(group.at(1));
  for (const Deadline until = soon(); network.foreign_messages() < 4 && Clock::now() < until;)
    std::this_thread::yield();
  EXPECT_EQ(network.foreign_messages(), 4u);
  EXPECT_TRUE(network.error().is_ok()) << network.error().to_string();

  message.epoch = read_hello(store->get("hello/0", soon()).value()).value().epoch;
  intrude(*store, 1, {bytes_of(message, 40)});
  const Status broken = group.at(0).wait(1, {EventKind::kGrant, 0, 9, 9}, 1, guard_of());
  EXPECT_THAT(broken.message(), HasSubstr("node 1 reported: "));
  EXPECT_THAT(network.error().message(),
              HasSubstr("received a truncated message: 40 bytes, wanted 48"));
}

TEST_F(UcxLoopback, AMessageOfAnotherVersionIsNamed) {
  const auto store = std::make_shared<MemoryStore>();
  Group group(2, rail_options(), [&](int, UcxGroupOptions& options) { options.store = store; });
  ASSERT_TRUE(group.up());
  Message message;
  message.epoch = read_hello(store->get("hello/0", soon()).value()).value().epoch;
  message.version = kMessageVersion + 1;
  intrude(*store, 0, {bytes_of(message)});
  const Status broken = group.at(0).wait(1, {EventKind::kGrant, 0, 9, 9}, 1, guard_of());
  EXPECT_THAT(broken.message(),
              HasSubstr("version 2, this node speaks version 1; run the same tide on all nodes"));
}

// A node that says in its hello what another tide would.
class AnotherTide : public KeyValueStore {
 public:
  explicit AnotherTide(std::shared_ptr<KeyValueStore> store) : store_(std::move(store)) {}
  Status set(const std::string& key, const std::string& value) override {
    auto hello = read_hello(value);
    if (!hello.is_ok()) return store_->set(key, value);
    hello.value().protocol = kMessageVersion + 1;
    return store_->set(key, write_hello(hello.value()));
  }
  Result<std::string> get(const std::string& key, Deadline deadline) override {
    return store_->get(key, deadline);
  }

 private:
  std::shared_ptr<KeyValueStore> store_;
};

TEST_F(UcxLoopback, AnotherVersionOfTideIsRefusedOnEveryNode) {
  const Group group(2, rail_options(), [](int node, UcxGroupOptions& options) {
    if (node == 1) options.store = std::make_shared<AnotherTide>(options.store);
  });
  for (const Status& status : group.status) {
    EXPECT_EQ(status.kind(), ErrorKind::kInvalidUse);
    EXPECT_THAT(status.message(), HasSubstr("speaks version 2, node 0"));
  }
}

TEST_F(UcxLoopback, AForkedChildIsToldNotHung) {
  Group group(2);
  ASSERT_TRUE(group.up());
  const pid_t child = fork();
  if (child == 0) {
    const Status begun = group.at(0).begin(1, 1, "in the child");
    _exit(begun.message().find("called in a forked child") != std::string::npos ? 42 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 42);
}

}  // namespace
}  // namespace tide
