// vLLM 25070: two ranks with different CUDA_VISIBLE_DEVICES both called their GPU device 0, and
// were taken for one GPU.
//
// Right: a GPU is known by its UUID. Two cards behind one index are asked for peer access; one card
// behind two indices needs none. The driver is one in ordinary memory; each rank sees its own list
// of cards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/network/stores.h"
#include "tests/unit/cuda_driver_fake.h"
#include "transports/cuda/cuda_fabric.h"

namespace tide {
namespace {

using testing::HasSubstr;

// A rank's view: the cards it sees, in its order, and which of them it uses.
struct View {
  std::vector<int> cards;
  int index = 0;
};

class Vllm25070 : public testing::Test {
 protected:
  // Whether the two ranks' cards reach each other is what the driver says of two different cards.
  std::vector<Status> connect(const std::vector<View>& views, bool cards_reach_each_other) {
    std::vector<Status> answers(views.size(), Status::ok());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < views.size(); ++rank) {
      threads.emplace_back([&, rank] {
        const View& view = views[rank];
        cuda::DriverApi api = driver_.api(static_cast<int>(rank));
        api.device_count = [&view](int* count) {
          *count = static_cast<int>(view.cards.size());
          return cuda::kSuccess;
        };
        api.device_uuid = [&view](cuda::Uuid* uuid, cuda::Device device) {
          *uuid = {};
          uuid->bytes[0] = static_cast<unsigned char>(view.cards[static_cast<size_t>(device)] + 1);
          return cuda::kSuccess;
        };
        api.can_access_peer = [&, cards_reach_each_other](int* answer, cuda::Device, cuda::Device) {
          *answer = cards_reach_each_other ? 1 : 0;
          return cuda::kSuccess;
        };
        CudaFabricOptions options;
        options.host.rank = static_cast<int>(rank);
        options.host.size = static_cast<int>(views.size());
        options.host.group = "test";
        options.host.deadline = Clock::now() + std::chrono::seconds(30);
        options.device = view.index;
        options.api = api;
        options.images = cuda::FakeDriver::images();
        auto made = connect_cuda_fabric(options, store_);
        answers[rank] = made.status();
        if (made) made.value()->close();
      });
    }
    for (std::thread& thread : threads) thread.join();
    return answers;
  }

  cuda::FakeDriver driver_;
  MemoryStore store_;
};

TEST_F(Vllm25070, TwoCardsBehindOneIndexAreTwo) {
  for (const Status& answer : connect({{{0, 1}, 0}, {{1, 0}, 0}}, false)) {
    EXPECT_THAT(answer.to_string(), HasSubstr("no peer access"));
  }
}

TEST_F(Vllm25070, TwoCardsBehindOneIndexThatReachEachOtherAreServed) {
  for (const Status& answer : connect({{{0, 1}, 0}, {{1, 0}, 0}}, true)) {
    EXPECT_TRUE(answer.is_ok()) << answer.to_string();
  }
}

TEST_F(Vllm25070, OneCardBehindTwoIndicesIsOne) {
  for (const Status& answer : connect({{{0, 1}, 0}, {{1, 0}, 1}}, false)) {
    EXPECT_TRUE(answer.is_ok()) << answer.to_string();
  }
}

}  // namespace
}  // namespace tide
