// Predictions beside what two H200 GPUs joined by 18 NVLinks measured (cost_constants.h: "H200
// pair"; medians of device events): no constant of the cost model comes from these rows.
#include <gtest/gtest.h>

#include "tests/unit/simulator_fixture.h"

namespace tide::testing {
namespace {

constexpr double kTolerance = 0.10;
constexpr int64_t kMiB = 1 << 20;

struct Reading {
  double mib = 0;
  double us = 0;
};

double off_by(double predicted_s, double measured_us) {
  return predicted_s * 1e6 / measured_us - 1;
}

// 9 parameters: norms, q, k, v, o, gate, up, down.
std::vector<int64_t> layer_numels() {
  const int64_t hidden = 4096;
  const int64_t wide = 14336;
  return {hidden,          hidden,        hidden * hidden, hidden * hidden / 4, hidden * hidden / 4,
          hidden * hidden, wide * hidden, wide * hidden,   hidden * wide};
}

TEST(SimulatorCalibration, GatherBySize) {
  const Topology pair = uniform_topology(1, 2);
  // Total bytes gathered; 64 MiB took 101 to 108 us.
  for (const Reading& reading :
       {Reading{1, 15.4}, {4, 19.6}, {16, 36}, {64, 104.5}, {256, 358}, {1024, 1388}}) {
    const int64_t numel = static_cast<int64_t>(reading.mib) * kMiB / 2;
    const SimulationReport report = run(gather(bf16_layout({numel}, 2), pair), pair);
    EXPECT_NEAR(off_by(report.end_s[0], reading.us), 0, kTolerance) << reading.mib << " MiB";
  }
}

TEST(SimulatorCalibration, GatherOfALayer) {
  const Topology pair = uniform_topology(1, 2);
  const SimulationReport report = run(gather(bf16_layout(layer_numels(), 2), pair), pair);
  EXPECT_NEAR(off_by(report.end_s[0], 579), 0, kTolerance);
}

TEST(SimulatorCalibration, ReduceBySizeInOneChunk) {
  const Topology pair = uniform_topology(1, 2);
  // Bytes of bf16 gradients a rank.
  for (const Reading& reading :
       {Reading{1, 26}, {4, 35}, {16, 68}, {64, 201}, {256, 718}, {1024, 2777}}) {
    const int64_t bytes = static_cast<int64_t>(reading.mib) * kMiB;
    const SimulationReport report = run(reduce(bf16_layout({bytes / 2}, 2), bytes), pair);
    EXPECT_NEAR(off_by(report.end_s[0], reading.us), 0, kTolerance) << reading.mib << " MiB";
  }
}

TEST(SimulatorCalibration, ReduceBySizeInChunks) {
  const Topology pair = uniform_topology(1, 2);
  struct Row {
    int64_t mib;
    int64_t chunk_mib;
    double us;
  };
  for (const Row& row : {Row{64, 4, 167},
                         {64, 16, 171},
                         {256, 4, 553},
                         {256, 16, 474},
                         {256, 64, 559},
                         {1024, 4, 2113},
                         {1024, 16, 1693},
                         {1024, 64, 1666}}) {
    const SimulationReport report =
        run(reduce(bf16_layout({row.mib * kMiB / 2}, 2), row.chunk_mib * kMiB), pair);
    EXPECT_NEAR(off_by(report.end_s[0], row.us), 0, kTolerance)
        << row.mib << " MiB in chunks of " << row.chunk_mib;
  }
}

TEST(SimulatorCalibration, ReduceOfALayer) {
  const Topology pair = uniform_topology(1, 2);
  struct Row {
    int ctas;
    int64_t chunk_mib;
    double us;
  };
  for (const Row& row : {Row{4, 32, 2391},
                         {8, 32, 1286},
                         {16, 32, 731},
                         {32, 32, 653},
                         {16, 8, 783},
                         {16, 16, 741},
                         {16, 64, 796}}) {
    SimulationOptions options;
    options.cluster.fabric.kernel_ctas = row.ctas;
    const SimulationReport report =
        run(reduce(bf16_layout(layer_numels(), 2), row.chunk_mib * kMiB), pair, options);
    EXPECT_NEAR(off_by(report.end_s[0], row.us), 0, kTolerance)
        << row.ctas << " CTAs, chunks of " << row.chunk_mib << " MiB: " << report.end_s[0] * 1e6;
  }
}

}  // namespace
}  // namespace tide::testing
