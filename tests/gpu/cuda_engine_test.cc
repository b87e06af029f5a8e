// The engine on a GPU: ranks are processes that share GPU 0. Where there is none, the same over a
// driver in ordinary memory. The parent never touches CUDA, so that its children may.
#include "backend/engine/group.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/ranks/engine_numbers.h"
#include "tests/ranks/host_fabric_ranks.h"
#include "tests/unit/cuda_driver_fake.h"
#include "transports/cuda/cuda_fabric.h"

namespace tide::testing {
namespace {

using cuda::DevicePointer;
using test::on_ranks;
using test::within;

bool has_gpu() { return ::access("/dev/nvidiactl", F_OK) == 0; }

// Bytes that the rank's streams read and write.
class Bytes {
 public:
  explicit Bytes(const std::vector<uint8_t>& from) : size_(from.size()) {
    if (has_gpu()) {
      device_ = std::make_unique<cuda::DeviceBytes>(size_);
      device_->write(from.data());
    } else {
      host_ = from;
      host_.reserve(1);
    }
  }
  void* get() { return device_ ? static_cast<void*>(device_->get()) : host_.data(); }
  std::vector<uint8_t> read() { return read(get(), size_); }
  static std::vector<uint8_t> read(const void* from, size_t size) {
    std::vector<uint8_t> bytes(size);
    if (size == 0) return bytes;
    if (has_gpu()) {
      const auto at = reinterpret_cast<DevicePointer>(from);
      TIDE_EXPECT_CUDA(cuda::TestCalls::get().to_host(bytes.data(), at, size));
    } else {
      std::memcpy(bytes.data(), from, size);
    }
    return bytes;
  }

 private:
  size_t size_;
  std::unique_ptr<cuda::DeviceBytes> device_;
  std::vector<uint8_t> host_;
};

std::vector<void*> addresses(std::vector<Bytes>& all) {
  std::vector<void*> result;
  for (Bytes& bytes : all) result.push_back(bytes.get());
  return result;
}
std::vector<const void*> sources(std::vector<Bytes>& all) {
  std::vector<const void*> result;
  for (Bytes& bytes : all) result.push_back(bytes.get());
  return result;
}

std::vector<Bytes> on_device(const std::vector<std::vector<uint8_t>>& arrays) {
  std::vector<Bytes> result;
  for (const auto& array : arrays) result.emplace_back(array);
  return result;
}

// `body(rank, group)` in one process a rank.
void run_processes(int ranks, const std::function<void(int, Group&)>& body) {
  on_ranks(ranks, [&](int rank, KeyValueStore& store) {
    std::unique_ptr<cuda::FakeDriver> fake;
    CudaFabricOptions options;
    options.host.rank = rank;
    options.host.size = ranks;
    options.host.group = "test";
    options.host.deadline = within(std::chrono::seconds(60));
    if (has_gpu()) {
      options.api = cuda::driver();
      options.images = cuda::kernel_images();
      ASSERT_TRUE(options.api.is_ok()) << options.api.status().to_string();
    } else {
      fake = std::make_unique<cuda::FakeDriver>();
      fake->devices = 1;
      options.api = fake->api(rank);
      options.images = cuda::FakeDriver::images();
    }
    cuda::Context context = nullptr;
    options.api.value().primary_context_retain(&context, 0);
    options.api.value().context_set_current(context);
    auto fabric = connect_cuda_fabric(options, store);
    ASSERT_TRUE(fabric.is_ok()) << fabric.status().to_string();
    GroupOptions group_options{.name = "test", .timeout = std::chrono::seconds(30)};
    group_options.staging_slice_bytes = 64 << 10;  // several chunks
    auto group = Group::create(group_options, std::move(fabric.value()),
                               std::shared_ptr<KeyValueStore>(&store, [](KeyValueStore*) {}));
    ASSERT_TRUE(group.is_ok()) << group.status().to_string();
    body(rank, *group.value());
    group.value()->close();
    group.value().reset();
  });
}

class CudaEngine : public ::testing::TestWithParam<int> {};

TEST_P(CudaEngine, GathersAndReducesAreExact) {
  const int ranks = GetParam();
  run_processes(ranks, [ranks](int rank, Group& group) {
    std::mt19937 random(5 + ranks);
    std::vector<PlanRequest> requests(3);
    for (int g = 0; g < 3; ++g) {
      requests[g].name = "layers." + std::to_string(g);
      requests[g].parameters = random_parameters(random, ranks, 6, {DType::kBFloat16}, 40'000);
      requests[g].may_lease = g != 1;
    }
    auto answers = group.plan(requests, 1);
    TIDE_ASSERT_OK(answers.status());
    for (int round = 0; round < 6; ++round) {
      for (int g = 0; g < 3; ++g) {
        const GroupLayout layout(requests[g].parameters, ranks);
        auto shards = on_device(make_shards(layout, rank));
        auto started = group.gather({g, sources(shards)});
        TIDE_ASSERT_OK(started.status());
        TIDE_ASSERT_OK(started.value().operation->wait());
        for (int p = 0; p < layout.size(); ++p) {
          const auto bytes = static_cast<size_t>(layout.parameter(p).unsharded_numel * 2);
          EXPECT_EQ(wrong_bytes(layout, p, Bytes::read(started.value().places[p], bytes).data()), 0)
              << "group " << g << " parameter " << p << " round " << round;
        }
        TIDE_ASSERT_OK(group.vacate(g));
        const std::vector<DType> dtypes(static_cast<size_t>(layout.size()), DType::kBFloat16);
        auto gradients = on_device(make_gradients(layout, rank, dtypes, round));
        std::vector<std::vector<uint8_t>> before;
        ReduceCall call;
        call.plan = g;
        call.options.scale = 1.0 / ranks;
        call.slot_reuse = round == 3;
        for (int p = 0; p < layout.size(); ++p) {
          before.emplace_back(static_cast<size_t>(layout.parameter(p).shard_numel * 4), 0);
          call.parameters.push_back(p);
        }
        auto outputs = on_device(before);
        call.gradient_dtypes = dtypes;
        call.gradients = sources(gradients);
        call.outputs = addresses(outputs);
        auto operation = group.reduce(call);
        TIDE_ASSERT_OK(operation.status());
        TIDE_ASSERT_OK(operation.value()->wait());
        for (int p = 0; p < layout.size(); ++p) {
          EXPECT_EQ(outputs[p].read(),
                    expected_shard(layout, p, rank, DType::kBFloat16, DType::kFloat32, call.options,
                                   before[p], round))
              << "group " << g << " parameter " << p << " round " << round;
        }
      }
    }
    EXPECT_TRUE(group.error().is_ok()) << group.error().to_string();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaEngine, ::testing::Values(1, 2, 4, 8));

}  // namespace
}  // namespace tide::testing
