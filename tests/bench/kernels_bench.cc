// How far copy and accumulate are from memcpy of the same bytes, on this machine. Each benchmark
// reports `ratio`: its time over the time of memcpy of the bytes that it has to move (read or
// written, counted once each side: a copy of n bytes is compared with memcpy of n; a sum that reads
// r and writes w bytes with memcpy of (r + w) / 2), both measured here. Threads stand for ranks:
// all of them work at once, as in a collective.
//
// Not part of the default build:
//   g++ -std=c++20 -O2 -ffp-contract=off -I. tests/bench/kernels_bench.cc
//   kernels/{copy,accumulate,cast,cpu_level}.cc
//     kernels/vector_*.cc backend/base/*.cc -lbenchmark -lpthread -o kernels_bench
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/accumulate.h"
#include "kernels/copy.h"

namespace tide {
namespace {

constexpr int64_t kGroupBytes = 32 << 20;

struct Memory {
  explicit Memory(int64_t size) : bytes(size) {
    data = static_cast<char*>(mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
    std::memset(data, 1, static_cast<size_t>(bytes));
  }
  ~Memory() { munmap(data, static_cast<size_t>(bytes)); }
  Memory(const Memory&) = delete;
  int64_t bytes;
  char* data;
};

// Seconds from the first rank's begin to the last one's end, best of several: other programs only
// ever add to it.
double seconds(int ranks, const std::function<void(int)>& work, int repeats = 15) {
  using Clock = std::chrono::steady_clock;
  double best = 1e9;
  for (int i = 0; i < repeats; ++i) {
    std::barrier start(ranks);
    std::vector<Clock::time_point> begins(static_cast<size_t>(ranks));
    std::vector<Clock::time_point> ends(static_cast<size_t>(ranks));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        start.arrive_and_wait();
        begins[static_cast<size_t>(rank)] = Clock::now();
        work(rank);
        ends[static_cast<size_t>(rank)] = Clock::now();
      });
    }
    for (std::thread& thread : threads) thread.join();
    const auto time = *std::max_element(ends.begin(), ends.end()) -
                      *std::min_element(begins.begin(), begins.end());
    best = std::min(best, std::chrono::duration<double>(time).count());
  }
  return best;
}

double memcpy_seconds(int ranks, int64_t bytes) {
  std::vector<std::unique_ptr<Memory>> memory;
  for (int i = 0; i < 2 * ranks; ++i) memory.push_back(std::make_unique<Memory>(bytes));
  return seconds(ranks, [&](int rank) {
    std::memcpy(memory[static_cast<size_t>(2 * rank)]->data,
                memory[static_cast<size_t>(2 * rank + 1)]->data, static_cast<size_t>(bytes));
  });
}

void report(benchmark::State& state, double time, double reference) {
  for ([[maybe_unused]] auto iteration : state) state.SetIterationTime(time);
  state.counters["ms"] = time * 1e3;
  state.counters["memcpy_ms"] = reference * 1e3;
  state.counters["ratio"] = time / reference;
}

// An all-gather's pushes: every rank writes its shard into the memory of all ranks.
void gather(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  const int64_t shard = kGroupBytes / ranks;
  std::vector<std::unique_ptr<Memory>> shards;
  std::vector<std::unique_ptr<Memory>> slots;
  for (int i = 0; i < ranks; ++i) {
    shards.push_back(std::make_unique<Memory>(shard));
    slots.push_back(std::make_unique<Memory>(kGroupBytes));
  }
  const double time = seconds(ranks, [&](int rank) {
    for (int i = 0; i < ranks; ++i) {
      const auto to = static_cast<size_t>((rank + i) % ranks);
      copy_block({slots[to]->data + rank * shard, shards[static_cast<size_t>(rank)]->data, 1, shard,
                  0, 0});
    }
  });
  report(state, time, memcpy_seconds(ranks, kGroupBytes));
}

// A reduce: pushes of the slices, then the sum of each rank's shard. bf16 slices.
void reduce(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  const DType output_dtype = state.range(1) == 32 ? DType::kFloat32 : DType::kBFloat16;
  const int64_t slice = kGroupBytes / ranks;
  const int64_t output_bytes = slice / 2 * dtype_bytes(output_dtype);
  std::vector<std::unique_ptr<Memory>> gradients;
  std::vector<std::unique_ptr<Memory>> staging;
  std::vector<std::unique_ptr<Memory>> outputs;
  for (int i = 0; i < ranks; ++i) {
    gradients.push_back(std::make_unique<Memory>(kGroupBytes));
    staging.push_back(std::make_unique<Memory>(kGroupBytes));
    outputs.push_back(std::make_unique<Memory>(output_bytes));
  }
  double time = 1e9;
  for (int repeat = 0; repeat < 15; ++repeat) {
    std::barrier arrived(ranks);
    time = std::min(time, seconds(
                              ranks,
                              [&](int rank) {
                                const auto own = static_cast<size_t>(rank);
                                for (int i = 1; i < ranks; ++i) {
                                  const int to = (rank + i) % ranks;
                                  copy_block({staging[static_cast<size_t>(to)]->data + rank * slice,
                                              gradients[own]->data + to * slice, 1, slice, 0, 0});
                                }
                                arrived.arrive_and_wait();
                                AccumulateBlock block;
                                for (int i = 0; i < ranks; ++i) {
                                  block.slices.push_back(i == rank
                                                             ? gradients[own]->data + rank * slice
                                                             : staging[own]->data + i * slice);
                                }
                                block.output = outputs[own]->data;
                                block.numel = slice / 2;
                                block.slice_dtype = DType::kBFloat16;
                                block.output_dtype = output_dtype;
                                (void)accumulate_block(block, {});
                              },
                              1));
  }
  const int64_t pushed = 2 * (kGroupBytes - slice);
  const int64_t summed = kGroupBytes + output_bytes;
  report(state, time, memcpy_seconds(ranks, (pushed + summed) / 2));
}

// The sum alone.
void accumulate(benchmark::State& state) {
  const int slices = static_cast<int>(state.range(0));
  const DType output_dtype = state.range(1) == 32 ? DType::kFloat32 : DType::kBFloat16;
  const int64_t slice = kGroupBytes / slices;
  const int64_t output_bytes = slice / 2 * dtype_bytes(output_dtype);
  Memory input(kGroupBytes);
  Memory output(output_bytes);
  AccumulateBlock block;
  for (int i = 0; i < slices; ++i) block.slices.push_back(input.data + i * slice);
  block.output = output.data;
  block.numel = slice / 2;
  block.slice_dtype = DType::kBFloat16;
  block.output_dtype = output_dtype;
  const double time = seconds(1, [&](int) { (void)accumulate_block(block, {}); });
  report(state, time, memcpy_seconds(1, (kGroupBytes + output_bytes) / 2));
}

BENCHMARK(gather)->Arg(2)->Arg(4)->UseManualTime()->Iterations(1);
BENCHMARK(reduce)
    ->Args({2, 32})
    ->Args({4, 32})
    ->Args({2, 16})
    ->Args({4, 16})
    ->UseManualTime()
    ->Iterations(1);
BENCHMARK(accumulate)
    ->Args({2, 32})
    ->Args({4, 32})
    ->Args({8, 32})
    ->Args({2, 16})
    ->Args({4, 16})
    ->Args({8, 16})
    ->UseManualTime()
    ->Iterations(1);

}  // namespace
}  // namespace tide

BENCHMARK_MAIN();
