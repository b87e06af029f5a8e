// Ranks as threads: what the engine's tests run on. Every program of such tests is built twice,
// over the memory fabric and, with TIDE_TEST_OVER_CUDA, over the CUDA fabric with a driver in
// ordinary memory: the same calls, enqueued instead of run by lanes.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "backend/engine/group.h"
#include "transports/memory/memory_fabric.h"
#ifdef TIDE_TEST_OVER_CUDA
#include "tests/unit/cuda_driver_fake.h"
#include "transports/cuda/cuda_fabric.h"
#endif

namespace tide::testing {

using namespace std::chrono_literals;

// The store of one group, inside the process.
class MapStore : public KeyValueStore {
 public:
  Status set(const std::string& key, const std::string& value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
    return Status::ok();
  }
  Result<std::string> get(const std::string& key, Deadline deadline) override {
    std::unique_lock<std::mutex> lock(mutex_);
    while (values_.count(key) == 0) {
      if (Clock::now() >= deadline) return Status(ErrorKind::kTimeout, "no key " + key);
      changed_.wait_for(lock, std::chrono::milliseconds(20));
    }
    return values_[key];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

#ifdef TIDE_TEST_OVER_CUDA
inline constexpr bool kOverCuda = true;
#else
inline constexpr bool kOverCuda = false;
#endif

struct WorldOptions {
  GroupOptions group{.name = "test", .timeout = 60s};
  MemoryFabricOptions fabric;
  std::function<void(int rank, GroupOptions&)> per_rank;
  bool keeps_memory = false;  // `body` keeps memory of the group beyond run_ranks
};

// Runs `body(rank, group)` on one thread per rank; groups are closed when it returns. Failures are
// gtest's. `fabrics`: raw fabrics for fault injection, valid while the ranks run.
#ifdef TIDE_TEST_OVER_CUDA
// Also: nothing is misused, and no object is left.
inline void run_ranks(int ranks, const WorldOptions& options,
                      const std::function<void(int, Group&)>& body,
                      std::vector<Fabric*>* fabrics = nullptr) {
  auto owned_driver = std::make_unique<cuda::FakeDriver>();
  cuda::FakeDriver& driver = *owned_driver;
  driver.devices = options.fabric.multicast ? ranks : 1;
  driver.multicast = options.fabric.multicast;
  auto store = std::make_shared<MapStore>();
  std::vector<std::thread> threads;
  if (fabrics != nullptr) fabrics->resize(static_cast<size_t>(ranks));
  std::atomic<int> connected{0};
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      GroupOptions group_options = options.group;
      if (options.per_rank) options.per_rank(rank, group_options);
      CudaFabricOptions fabric_options;
      fabric_options.host.rank = rank;
      fabric_options.host.size = ranks;
      fabric_options.host.group = group_options.name;
      fabric_options.host.deadline = Clock::now() + 60s;
      fabric_options.host.refuse_window = options.fabric.refuse_window
                                              ? [rank, refuse = options.fabric.refuse_window](
                                                    int64_t bytes) { return refuse(rank, bytes); }
                                              : std::function<Status(int64_t)>();
      fabric_options.device = rank % driver.devices;
      cuda::DriverApi api = driver.api(rank);
      api.environment = [](const char*) -> const char* { return nullptr; };
      fabric_options.api = api;
      if (options.fabric.refuse_multicast)
        fabric_options.multicast = options.fabric.refuse_multicast(rank);
      fabric_options.images = cuda::FakeDriver::images();
      auto fabric = connect_cuda_fabric(fabric_options, *store);
      ASSERT_TRUE(fabric.is_ok()) << fabric.status().to_string();
      if (fabrics != nullptr) (*fabrics)[static_cast<size_t>(rank)] = fabric.value().get();
      auto group = Group::create(group_options, std::move(fabric.value()), store);
      ASSERT_TRUE(group.is_ok()) << group.status().to_string();
      for (++connected; fabrics != nullptr && connected < ranks;) std::this_thread::yield();
      body(rank, *group.value());
      group.value()->close();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(driver.misuses(), "");
  if (options.keeps_memory) {
    (void)owned_driver.release();  // kept memory refers to it
  } else {
    EXPECT_EQ(driver.live_objects(), 0);
  }
}
#else
inline void run_ranks(int ranks, const WorldOptions& options,
                      const std::function<void(int, Group&)>& body,
                      std::vector<Fabric*>* fabrics = nullptr) {
  std::vector<std::unique_ptr<Fabric>> made = make_memory_fabrics(ranks, options.fabric);
  ASSERT_EQ(static_cast<int>(made.size()), ranks);
  if (fabrics != nullptr) {
    for (const auto& fabric : made) fabrics->push_back(fabric.get());
  }
  auto store = std::make_shared<MapStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      GroupOptions group_options = options.group;
      if (options.per_rank) options.per_rank(rank, group_options);
      auto group = Group::create(group_options, std::move(made[static_cast<size_t>(rank)]), store);
      ASSERT_TRUE(group.is_ok()) << group.status().to_string();
      body(rank, *group.value());
      group.value()->close();
    });
  }
  for (std::thread& thread : threads) thread.join();
}
#endif

#define TIDE_ASSERT_OK(expression)                                 \
  do {                                                             \
    const ::tide::Status tide_status_ = (expression);              \
    ASSERT_TRUE(tide_status_.is_ok()) << tide_status_.to_string(); \
  } while (0)

// Room for a gather list's outputs: where the fabric enqueues it must be the group's own memory
// (making it is collective then), else any memory bounces.
struct Outputs {
  Outputs(Group& group, int64_t bytes) {
    if (!kOverCuda) {
      plain.resize(static_cast<size_t>(bytes));
      base = plain.data();
      return;
    }
    auto allocated = group.allocate(bytes);
    EXPECT_TRUE(allocated.is_ok()) << allocated.status().to_string();
    if (allocated.is_ok()) memory = allocated.value();
    base = static_cast<uint8_t*>(memory.get());
  }
  void* at(int64_t offset) const { return base + offset; }

  std::vector<uint8_t> plain;
  std::shared_ptr<void> memory;
  uint8_t* base = nullptr;
};

// Value of an element of a full tensor, the same on all ranks: what a gather must bring.
inline uint8_t byte_at(int parameter, int64_t index) {
  const uint64_t mixed = (static_cast<uint64_t>(index) + 1) * 0x9e3779b97f4a7c15u +
                         static_cast<uint64_t>(parameter) * 977;
  return static_cast<uint8_t>(mixed >> 37);
}

// The places of a layout by its definition, element by element: (row, rank, column) of dimension k.
inline int64_t place_of(const Parameter& parameter, int ranks, int rank, int64_t shard_index) {
  const int64_t row_numel = parameter.shard_numel / parameter.rows;
  if (parameter.rows == 1) return rank * parameter.shard_numel + shard_index;
  return shard_index / row_numel * ranks * row_numel + rank * row_numel + shard_index % row_numel;
}

// This rank's padded shards, filled with the bytes that byte_at gives their places.
inline std::vector<std::vector<uint8_t>> make_shards(const GroupLayout& layout, int rank) {
  std::vector<std::vector<uint8_t>> shards;
  for (int p = 0; p < layout.size(); ++p) {
    const Parameter& parameter = layout.parameter(p);
    const int64_t bytes = dtype_bytes(parameter.dtype);
    std::vector<uint8_t> shard(static_cast<size_t>(parameter.shard_numel * bytes));
    for (int64_t i = 0; i < parameter.shard_numel; ++i) {
      const int64_t place = place_of(parameter, layout.ranks(), rank, i);
      for (int64_t b = 0; b < bytes; ++b)
        shard[static_cast<size_t>(i * bytes + b)] = byte_at(p, place * bytes + b);
    }
    shards.push_back(std::move(shard));
  }
  return shards;
}

// Number of wrong bytes among the first unsharded_numel elements of parameter p at `data`.
inline int64_t wrong_bytes(const GroupLayout& layout, int p, const void* data) {
  const int64_t bytes =
      layout.parameter(p).unsharded_numel * dtype_bytes(layout.parameter(p).dtype);
  int64_t wrong = 0;
  for (int64_t i = 0; i < bytes; ++i)
    wrong += static_cast<const uint8_t*>(data)[i] != byte_at(p, i);
  return wrong;
}

// What a gather moves of a rank's shards: their bytes without padding.
inline int64_t valid_bytes(const GroupLayout& layout, int rank) {
  int64_t bytes = 0;
  for (int p = 0; p < layout.size(); ++p) {
    bytes += layout.valid_numel(p, rank) * dtype_bytes(layout.parameter(p).dtype);
  }
  return bytes;
}

template <typename T>
std::vector<const void*> pointers(const std::vector<std::vector<T>>& arrays) {
  std::vector<const void*> result;
  for (const auto& array : arrays) result.push_back(array.data());
  return result;
}
template <typename T>
std::vector<void*> mutable_pointers(std::vector<std::vector<T>>& arrays) {
  std::vector<void*> result;
  for (auto& array : arrays) result.push_back(array.data());
  return result;
}

// A random layout, some parameters uneven, some of several rows, some empty. The same for the same
// seed.
inline std::vector<Parameter> random_parameters(std::mt19937& random, int ranks, int count,
                                                const std::vector<DType>& dtypes,
                                                int64_t largest_numel = 3000) {
  std::vector<Parameter> parameters;
  for (int p = 0; p < count; ++p) {
    Parameter parameter;
    parameter.name = "p" + std::to_string(p);
    parameter.dtype = parameter.shard_dtype = dtypes[random() % dtypes.size()];
    const int kind = static_cast<int>(random() % 6);
    if (kind == 0) {
      parameter.rows = 1 + static_cast<int64_t>(random() % 7);
      parameter.shard_numel = parameter.rows * (1 + static_cast<int64_t>(random() % 60));
      parameter.unsharded_numel = ranks * parameter.shard_numel;
    } else if (kind == 1) {  // uneven, down to ranks without any element
      parameter.unsharded_numel = static_cast<int64_t>(random() % 200);
      parameter.shard_numel = (parameter.unsharded_numel + ranks - 1) / ranks;
    } else {
      parameter.shard_numel = static_cast<int64_t>(random() % static_cast<uint64_t>(largest_numel));
      parameter.unsharded_numel = ranks * parameter.shard_numel;
    }
    parameters.push_back(parameter);
  }
  return parameters;
}

}  // namespace tide::testing
