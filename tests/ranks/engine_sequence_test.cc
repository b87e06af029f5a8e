// Sequences of calls as FSDP2 makes them, and random ones: slots go round, nothing is written
// before it is free.
#include "tests/ranks/engine_numbers.h"

namespace tide::testing {
namespace {

constexpr int kGroups = 4;

struct Layer {
  PlanRequest request;
  std::shared_ptr<GroupLayout> layout;
  std::vector<std::vector<uint8_t>> shards;
  GatherStarted started;
  std::vector<std::vector<uint8_t>> gradients;
  std::vector<std::vector<float>> outputs;
  std::shared_ptr<Operation> reduction;
};

std::vector<Layer> make_layers(int rank, int ranks, bool may_lease, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Layer> layers(kGroups);
  for (int g = 0; g < kGroups; ++g) {
    Layer& layer = layers[g];
    layer.request.name = "layers." + std::to_string(g);
    layer.request.parameters = random_parameters(random, ranks, 3 + g, {DType::kBFloat16}, 2000);
    layer.request.may_lease = may_lease;
    layer.request.stays_unsharded = g == 0;
    layer.layout = std::make_shared<GroupLayout>(layer.request.parameters, ranks);
    layer.shards = make_shards(*layer.layout, rank);
    for (int p = 0; p < layer.layout->size(); ++p) {
      layer.outputs.emplace_back(static_cast<size_t>(layer.layout->parameter(p).shard_numel));
    }
  }
  return layers;
}

void plan_layers(Group& group, const std::vector<Layer>& layers, int prefetch_depth) {
  std::vector<PlanRequest> requests;
  for (const Layer& layer : layers) requests.push_back(layer.request);
  auto answers = group.plan(requests, prefetch_depth);
  TIDE_ASSERT_OK(answers.status());
  for (const PlanAnswer& answer : answers.value()) ASSERT_TRUE(answer.accepted) << answer.reason;
}

void gather(Group& group, std::vector<Layer>& layers, int g) {
  auto started = group.gather({g, pointers(layers[g].shards)});
  TIDE_ASSERT_OK(started.status());
  layers[g].started = std::move(started.value());
}

// Waits, looks at every byte, and looks again after a while in which other ranks may run ahead.
void use(std::vector<Layer>& layers, int g) {
  TIDE_ASSERT_OK(layers[g].started.operation->wait());
  for (int look = 0; look < 2; ++look) {
    for (int p = 0; p < layers[g].layout->size(); ++p) {
      ASSERT_EQ(wrong_bytes(*layers[g].layout, p, layers[g].started.places[p]), 0)
          << "group " << g << " parameter " << p;
    }
    std::this_thread::yield();
  }
}

void vacate(Group& group, std::vector<Layer>& layers, int g) {
  layers[g].started = {};
  TIDE_ASSERT_OK(group.vacate(g));
}

void reduce(Group& group, std::vector<Layer>& layers, int g, int rank, int round, bool slot_reuse) {
  Layer& layer = layers[g];
  const std::vector<DType> dtypes(static_cast<size_t>(layer.layout->size()), DType::kBFloat16);
  layer.gradients = make_gradients(*layer.layout, rank, dtypes, round);
  ReduceCall call;
  call.plan = g;
  call.slot_reuse = slot_reuse;
  for (int p = 0; p < layer.layout->size(); ++p) {
    call.parameters.push_back(p);
    call.gradient_dtypes.push_back(DType::kBFloat16);
    call.gradients.push_back(layer.gradients[p].data());
    call.outputs.push_back(layer.outputs[p].data());
  }
  auto operation = group.reduce(call);
  TIDE_ASSERT_OK(operation.status());
  layer.reduction = operation.value();
}

void finish_reduce(std::vector<Layer>& layers, int g, int rank, int round) {
  Layer& layer = layers[g];
  TIDE_ASSERT_OK(layer.reduction->wait_read());
  for (auto& gradient : layer.gradients) std::fill(gradient.begin(), gradient.end(), 0xff);
  TIDE_ASSERT_OK(layer.reduction->wait());
  for (int p = 0; p < layer.layout->size(); ++p) {
    const std::vector<uint8_t> before(layer.outputs[p].size() * 4);
    const auto expected = expected_shard(*layer.layout, p, rank, DType::kBFloat16, DType::kFloat32,
                                         {}, before, round);
    if (expected.empty()) continue;
    ASSERT_EQ(std::memcmp(expected.data(), layer.outputs[p].data(), expected.size()), 0)
        << "group " << g << " " << p;
  }
}

void training_step(Group& group, std::vector<Layer>& layers, int rank, int round, int prefetch,
                   bool slot_reuse) {
  for (int g = 0; g <= prefetch && g < kGroups; ++g) gather(group, layers, g);
  for (int g = 0; g < kGroups; ++g) {
    use(layers, g);
    if (g > 0) vacate(group, layers, g);  // group 0 stays unsharded
    if (g + prefetch + 1 < kGroups) gather(group, layers, g + prefetch + 1);
  }
  for (int g = kGroups - 1; g >= kGroups - 1 - prefetch && g > 0; --g) gather(group, layers, g);
  for (int g = kGroups - 1; g >= 0; --g) {
    use(layers, g);
    if (g + 1 < kGroups) finish_reduce(layers, g + 1, rank, round);
    vacate(group, layers, g);
    reduce(group, layers, g, rank, round, slot_reuse);
    if (g - prefetch - 1 > 0) gather(group, layers, g - prefetch - 1);
  }
  finish_reduce(layers, 0, rank, round);
}

TEST(EngineSequence, TrainingStepsWithPrefetchAndBothModes) {
  for (const int ranks : {2, 3, 4}) {
    for (const int prefetch : {0, 1, 2}) {
      for (const bool slot_reuse : {false, true}) {
        WorldOptions options;
        options.group.staging_slice_bytes = 2048;
        run_ranks(ranks, options, [&](int rank, Group& group) {
          auto layers = make_layers(rank, ranks, !slot_reuse, 11);
          plan_layers(group, layers, prefetch);
          for (int round = 0; round < 4; ++round)
            training_step(group, layers, rank, round, prefetch, slot_reuse);
          EXPECT_TRUE(group.error().is_ok());
        });
      }
    }
  }
}

// All ranks draw the same calls; when a group is waited for is drawn by each rank alone.
TEST(EngineSequence, RandomCallsInOneOrder) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    const int ranks = 2 + static_cast<int>(seed % 3);
    WorldOptions options;
    options.group.staging_slice_bytes = 4096;
    options.group.landing_slice_bytes = 1024;
    run_ranks(ranks, options, [&](int rank, Group& group) {
      std::mt19937 shared(seed);
      std::mt19937 own(seed * 100 + static_cast<unsigned>(rank));
      auto layers = make_layers(rank, ranks, seed % 2 == 0, seed);
      plan_layers(group, layers, 1);
      std::vector<int> state(kGroups);  // 0 sharded, 1 gathering, 2 reducing
      std::vector<int> round(kGroups);
      std::vector<std::shared_ptr<Operation>> gathers;  // read the shards until they are done
      for (int step = 0; step < 120; ++step) {
        const int g = static_cast<int>(shared() % kGroups);
        if (state[g] == 0) {
          auto started = group.gather({g, pointers(layers[g].shards)});
          if (started.status().kind() == ErrorKind::kUnsupported)
            continue;  // no slot: alike on all ranks
          TIDE_ASSERT_OK(started.status());
          layers[g].started = std::move(started.value());
          gathers.push_back(layers[g].started.operation);
          state[g] = 1;
        } else if (state[g] == 1) {
          if (own() % 2 == 0) use(layers, g);
          const bool reduces = shared() % 2 == 0;
          if (!reduces) use(layers, g);
          vacate(group, layers, g);
          state[g] = 0;
          if (reduces) {
            reduce(group, layers, g, rank, ++round[g], shared() % 3 == 0);
            state[g] = 2;
          }
        } else {
          finish_reduce(layers, g, rank, round[g]);
          state[g] = 0;
        }
      }
      for (int g = 0; g < kGroups; ++g) {
        if (state[g] == 2) finish_reduce(layers, g, rank, round[g]);
      }
      for (const auto& operation : gathers) TIDE_ASSERT_OK(operation->wait());
    });
  }
}

TEST(EngineSequence, ManyOperationsInFlight) {
  run_ranks(3, {}, [](int rank, Group& group) {
    constexpr int kCalls = 1300;  // more than the ring of records holds
    Parameter parameter{"tensor 0", DType::kFloat32, 5, 15, 1, DType::kFloat32};
    auto layout = std::make_shared<GroupLayout>(std::vector<Parameter>{parameter}, 3);
    std::vector<std::vector<float>> inputs, summed;
    std::vector<std::shared_ptr<Operation>> operations;
    for (int i = 0; i < kCalls; ++i) {
      inputs.emplace_back(15, static_cast<float>(1000 * rank + i));
      summed.emplace_back(5);
    }
    const Outputs outputs(group, kCalls * 64);
    const auto gathered = [&](int i) { return static_cast<float*>(outputs.at(i * 64)); };
    for (int i = 0; i < kCalls; ++i) {
      auto operation = i % 3 == 2 ? group.reduce_list(layout, {inputs[i].data()},
                                                      {summed[i].data()}, DType::kFloat32, {})
                                  : group.gather_list(layout, {inputs[i].data()}, {gathered(i)});
      TIDE_ASSERT_OK(operation.status());
      operations.push_back(operation.value());
    }
    for (int i = kCalls - 1; i >= 0; --i) {
      TIDE_ASSERT_OK(operations[i]->wait());
      for (int e = 0; e < 15 && i % 3 != 2; ++e) ASSERT_EQ(gathered(i)[e], 1000 * (e / 5) + i);
      for (int e = 0; e < 5 && i % 3 == 2; ++e) ASSERT_EQ(summed[i][e], 3000 + 3 * i);
    }
    EXPECT_EQ(group.counters().operations, static_cast<uint64_t>(kCalls));
  });
}

TEST(EngineSequence, CallbacksRunOnceOnAnotherThread) {
  run_ranks(2, {}, [](int, Group& group) {
    Parameter parameter{"tensor 0", DType::kInt32, 1000, 2000, 1, DType::kInt32};
    auto layout = std::make_shared<GroupLayout>(std::vector<Parameter>{parameter}, 2);
    std::vector<int32_t> input(1000);
    const Outputs output(group, 8000);
    std::atomic<int> calls{0};
    std::mutex mutex;
    std::condition_variable changed;
    for (int i = 0; i < 50; ++i) {
      auto operation = group.gather_list(layout, {input.data()}, {output.at(0)});
      TIDE_ASSERT_OK(operation.status());
      operation.value()->on_done([&](const Status& status) {
        EXPECT_TRUE(status.is_ok());
        std::lock_guard<std::mutex> lock(mutex);
        ++calls;
        changed.notify_all();
      });
      TIDE_ASSERT_OK(operation.value()->wait());
    }
    std::unique_lock<std::mutex> lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, 30s, [&] { return calls == 50; }));
  });
}

}  // namespace
}  // namespace tide::testing
