// NCCL 2439 and 2092, rocm-systems 11174, aws-ofi-nccl 149: a flag that says "the payload is there"
// comes by another path than the payload, and is seen first. Here the flag is a message behind the
// flush of the put (transports/network.h, "What a put promises"); the device below lands puts late
// and in any order and lets messages overtake everything.
#include <gtest/gtest.h>

#include "tests/network/fake_ucx.h"
#include "tests/network/stores.h"
#include "tests/network/threads.h"
#include "transports/ucx/rail.h"
#include "transports/ucx/ucx.h"

namespace tide {
namespace {

constexpr int kRegion = 1;
constexpr int64_t kBytes = 4096;
constexpr uint64_t kRounds = 200;

std::unique_ptr<Network> connect(const UcxApi* api, int node,
                                 const std::shared_ptr<KeyValueStore>& store) {
  UcxRailOptions rail;
  rail.device = "mlx5_0:1";
  rail.rdma = true;
  rail.chunk_bytes = 256;  // many chunks a put, so that their order counts
  auto opened = UcxRail::open(rail, api);
  UcxGroupOptions group;
  group.name = "replay";
  group.node = node;
  group.nodes = 2;
  group.store = store;
  if (!opened.is_ok()) group.refusal = opened.status().message();
  auto connected =
      connect_ucx_group(opened.is_ok() ? opened.value() : nullptr, group, testing::soon());
  EXPECT_TRUE(connected.is_ok()) << connected.status().to_string();
  return connected.is_ok() ? std::move(connected.value()) : nullptr;
}

TEST(Nccl2439, PayloadIsThereWhenItsFlagIs) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    FakeUcxBehaviour behaviour;
    behaviour.seed = seed;
    const UcxApi* api = fake_ucx(behaviour);
    const auto store = std::make_shared<MemoryStore>();
    std::vector<unsigned char> memory(2 * kBytes, 0);
    on_each(2, [&](int node) {
      const auto network = connect(api, node, store);
      ASSERT_NE(network, nullptr);
      unsigned char* const own = memory.data() + node * kBytes;
      ASSERT_TRUE(network->add_region(kRegion, {own, kBytes}, testing::soon()).is_ok());
      std::vector<unsigned char> payload(kBytes);
      for (uint64_t round = 1; round <= kRounds; ++round) {
        ASSERT_TRUE(network->begin(round, 1, "put and flag").is_ok());
        const bool sends = static_cast<int>(round % 2) == node;
        if (sends) {
          for (int64_t i = 0; i < kBytes; ++i) payload[i] = testing::byte_at(node, round, i);
          const Put put{1 - node, round, 0, 0, kRegion, {{payload.data(), 0, kBytes}}, 0};
          ASSERT_TRUE(network->put(put).is_ok());
          ASSERT_TRUE(network->drain(round, testing::guard_of()).is_ok());
        } else {
          const Event flag{EventKind::kArrival, round, 0, 0};
          ASSERT_TRUE(network->wait(1 - node, flag, kBytes, testing::guard_of()).is_ok());
          for (int64_t i = 0; i < kBytes; ++i)
            ASSERT_EQ(own[i], testing::byte_at(1 - node, round, i)) << "byte " << i;
        }
        network->end(round);
      }
      ASSERT_TRUE(network->close(testing::soon()).is_ok());
    });
  }
}

}  // namespace
}  // namespace tide
