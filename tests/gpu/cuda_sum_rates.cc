// Rates of the sum, as ratios to a kernel that only reads with the same CTAs, in one run: JSON on
// standard output.
//   cuda_sum_rates read_only.cubin [accumulate.fatbin]     the second replaces the kernels of this
//   build
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>

#include "tests/gpu/gpu_fixture.h"

namespace tide::cuda {
namespace {

std::vector<char> read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Bench {
  DriverApi api;
  Stream stream = nullptr;
  Event begin = nullptr, end = nullptr;

  template <class Launch>
  double median_us(Launch launch, int repeats = 15) {
    std::vector<float> times;
    for (int i = 0; i < repeats + 3; ++i) {
      api.event_record(begin, stream);
      launch();
      api.event_record(end, stream);
      TIDE_EXPECT_CUDA(api.stream_synchronize(stream));
      float ms = 0;
      TIDE_EXPECT_CUDA(TestCalls::get().elapsed(&ms, begin, end));
      if (i >= 3) times.push_back(ms * 1000);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }
};

int run(int arguments, char** argument) {
  const auto& loaded = driver();
  if (!loaded || arguments < 2) {
    std::fprintf(
        stderr, "%s\n",
        loaded ? "usage: cuda_sum_rates read_only.cubin" : loaded.status().to_string().c_str());
    return loaded ? 2 : 77;
  }
  Bench bench;
  bench.api = loaded.value();
  DriverApi& api = bench.api;
  Context context = nullptr;
  api.primary_context_retain(&context, 0);
  api.context_set_current(context);
  api.stream_create(&bench.stream, kStreamNonBlocking, 0);
  api.event_create(&bench.begin, kEventDefault);
  api.event_create(&bench.end, kEventDefault);

  const std::vector<char> probe = read_file(argument[1]);
  Module module = nullptr;
  Function read_only = nullptr;
  TIDE_EXPECT_CUDA(api.module_load(&module, probe.data()));
  TIDE_EXPECT_CUDA(api.module_function(&read_only, module, "read_only"));
  Function copy_only = nullptr;
  TIDE_EXPECT_CUDA(api.module_function(&copy_only, module, "copy_only"));
  Module sums = nullptr;
  const std::vector<char> replaced = arguments > 2 ? read_file(argument[2]) : std::vector<char>();
  const void* image = replaced.empty() ? kernel_images().value()[0].data : replaced.data();
  TIDE_EXPECT_CUDA(api.module_load(&sums, image));

  constexpr size_t kBytes = size_t{1} << 30;
  DeviceBytes slices(kBytes), output(kBytes), never(16);
  api.set_words(slices.address(), 0x3f8c3f8cu, kBytes / 4, bench.stream);
  api.set_words(output.address(), 0, kBytes / 4, bench.stream);
  char name[128] = {};
  api.device_name(name, sizeof(name) - 1, 0);
  std::printf(
      "{\"gpu\": \"%s\", \"cuda_driver\": %d, \"command\": \"ci/device rates\", \"slice_bytes\": "
      "%zu, ",
      name, api.version, kBytes);
  std::printf("\"threads\": %d, \"in_flight\": %d, \"rows\": [\n", kThreads, kInFlightBytes);
  const auto function_of = [&](const std::string& name) {
    Function function = nullptr;
    TIDE_EXPECT_CUDA(api.module_function(&function, sums, name.c_str()));
    return function;
  };
  bool first = true;
  for (unsigned ctas : {4u, 8u, 16u, 32u}) {
    double read_rate = 0;
    double copy_rate = 0;  // bytes read and written
    for (unsigned threads : {512u, 1024u}) {
      DevicePointer from = slices.address();
      DevicePointer to = output.address();
      DevicePointer nowhere = never.address();
      uint64_t vectors = kBytes / 16;
      void* reading[] = {&from, &vectors, &nowhere};
      void* copying[] = {&from, &vectors, &to};
      const auto rate = [&](Function function, void** parameters, double bytes) {
        const double us = bench.median_us([&] {
          TIDE_EXPECT_CUDA(api.launch(function, ctas, 1, 1, threads, 1, 1, 0, bench.stream,
                                      parameters, nullptr));
        });
        return bytes / us / 1000;
      };
      read_rate = std::max(read_rate, rate(read_only, reading, kBytes));
      copy_rate = std::max(copy_rate, rate(copy_only, copying, 2.0 * kBytes));
    }
    for (int ranks : {2, 4, 8, 16}) {
      for (DType slice : {DType::kBFloat16, DType::kFloat32}) {
        for (DType out : {DType::kFloat32, DType::kBFloat16}) {
          if (slice == DType::kFloat32 && out == DType::kBFloat16) continue;
          for (int mode = 0; mode < 3;
               ++mode) {  // write; add; write with one slice off by an element
            if (ctas != 16 && (mode != 0 || ranks == 16 || ranks == 4)) continue;
            const int64_t slice_bytes = static_cast<int64_t>(kBytes) / ranks;
            const int64_t numel =
                std::min<int64_t>(slice_bytes / dtype_bytes(slice) - 64, kBytes / 4);
            AccumulateBlock block;
            for (int r = 0; r < ranks; ++r) {
              const int64_t shift = mode == 2 && r == ranks - 1 ? dtype_bytes(slice) : 0;
              block.slices.push_back(slices.get() + r * slice_bytes + shift);
            }
            block.output = output.get();
            block.numel = numel;
            block.slice_dtype = slice;
            block.output_dtype = out;
            AccumulateOptions options;
            options.scale = 1.0 / ranks;
            options.add_to_output = mode == 1;
            ListBuilder list;
            list.append(block, options);
            const Function function = function_of(accumulate_kernel(slice));
            void* parameters[] = {list.parameters()};
            const double us = bench.median_us([&] {
              TIDE_EXPECT_CUDA(api.launch(function, list.ctas(ctas), 1, 1, kThreads, 1, 1, 0,
                                          bench.stream, parameters, nullptr));
            });
            const double bytes =
                static_cast<double>(numel) *
                (ranks * dtype_bytes(slice) + dtype_bytes(out) * (mode == 1 ? 2 : 1));
            std::printf(
                "%s{\"ctas\": %u, \"ranks\": %d, \"slice\": \"%s\", \"output\": \"%s\", \"mode\": "
                "\"%s\", \"gb_s\": %.0f, "
                "\"read_only_gb_s\": %.0f, \"copy_gb_s\": %.0f, \"ratio\": %.3f, "
                "\"ratio_to_copy\": %.3f}",
                first ? "" : ",\n", ctas, ranks, dtype_name(slice), dtype_name(out),
                mode == 0   ? "write"
                : mode == 1 ? "add"
                            : "odd",
                bytes / us / 1000, read_rate, copy_rate, bytes / us / 1000 / read_rate,
                bytes / us / 1000 / copy_rate);
            first = false;
          }
        }
      }
    }
  }
  std::printf("],\n\"launch_us\": {");
  // A launch's cost on the host, empty work: short and long lists.
  for (const int blocks : {1, 30, 150}) {
    const Function function = function_of(accumulate_kernel(DType::kBFloat16));
    AccumulateBlock block;
    block.slices.assign(8, slices.get());
    block.output = output.get();
    block.numel = 8;
    block.slice_dtype = DType::kBFloat16;
    ListBuilder list;
    for (int i = 0; i < blocks; ++i) list.append(block, {});
    void* parameters[] = {list.parameters()};
    api.stream_synchronize(bench.stream);
    const auto start = Clock::now();
    for (int i = 0; i < 200; ++i)
      api.launch(function, 16, 1, 1, kThreads, 1, 1, 0, bench.stream, parameters, nullptr);
    const double host =
        std::chrono::duration<double, std::micro>(Clock::now() - start).count() / 200;
    api.stream_synchronize(bench.stream);
    const double all =
        std::chrono::duration<double, std::micro>(Clock::now() - start).count() / 200;
    std::printf("%s\"%d blocks\": {\"host\": %.2f, \"with_device\": %.2f}", blocks == 1 ? "" : ", ",
                blocks, host, all);
  }
  std::printf("}}\n");
  return testing::Test::HasFailure() ? 1 : 0;
}

}  // namespace
}  // namespace tide::cuda

int main(int arguments, char** argument) {
  testing::InitGoogleTest(&arguments, argument);
  return tide::cuda::run(arguments, argument);
}
