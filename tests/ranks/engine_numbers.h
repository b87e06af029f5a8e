// The naive reference of a reduce: fp32 sums in rank order, scaled, rounded once. Shares no code
// with the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "backend/layout/group_layout.h"
#include "tests/ranks/engine_world.h"
#include "transports/fabric.h"

namespace tide::testing {

// Round to nearest, ties to even; finite values only.
inline uint16_t bf16_of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  const uint32_t rounding = 0x7fffu + (bits >> 16 & 1);
  return static_cast<uint16_t>((bits + rounding) >> 16);
}
inline float float_of_bf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value = 0;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float load(const void* data, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
  return float_of_bf16(static_cast<const uint16_t*>(data)[index]);
}
inline void store(void* data, int64_t index, DType dtype, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<uint16_t*>(data)[index] = bf16_of(value);
  }
}

// Gradient of `rank` at an element of the unsharded parameter: many magnitudes, both signs, so that
// order matters.
inline float gradient_at(int rank, int parameter, int64_t index, int round = 0) {
  uint64_t x = static_cast<uint64_t>(index) * 0x9e3779b97f4a7c15u +
               static_cast<uint64_t>(rank) * 0xbf58476d1ce4e5b9u +
               static_cast<uint64_t>(parameter) * 0x94d049bb133111ebu +
               static_cast<uint64_t>(round) * 0xd6e8feb86659fd93u;
  x ^= x >> 31;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 29;
  const float mantissa = 1.0f + static_cast<float>(x & 0xffff) / 65536.0f;
  return std::ldexp(x >> 40 & 1 ? -mantissa : mantissa, static_cast<int>(x >> 20 & 15) - 8);
}

// Unsharded gradients of one rank, as bytes; parameters not in `dtypes` (kBytes) get none.
inline std::vector<std::vector<uint8_t>> make_gradients(const GroupLayout& layout, int rank,
                                                        const std::vector<DType>& dtypes,
                                                        int round = 0) {
  std::vector<std::vector<uint8_t>> gradients;
  for (int p = 0; p < layout.size(); ++p) {
    const int64_t numel = layout.parameter(p).unsharded_numel;
    std::vector<uint8_t> gradient(
        dtypes[p] == DType::kBytes ? 0 : static_cast<size_t>(numel * dtype_bytes(dtypes[p])));
    for (int64_t i = 0; i < numel && !gradient.empty(); ++i) {
      store(gradient.data(), i, dtypes[p], gradient_at(rank, p, i, round));
    }
    gradients.push_back(std::move(gradient));
  }
  return gradients;
}

// What rank's shard of parameter p must hold after the reduce, as bytes of output_dtype. `before`:
// what it held. `sources`: the ranks of each node, in the order in which the nodes' sums are added;
// empty: all ranks are one node.
inline std::vector<uint8_t> expected_shard(const GroupLayout& layout, int p, int rank, DType dtype,
                                           DType output_dtype, const AccumulateOptions& options,
                                           const std::vector<uint8_t>& before, int round = 0,
                                           std::vector<std::vector<int>> sources = {}) {
  if (sources.empty()) {
    sources.emplace_back();
    for (int r = 0; r < layout.ranks(); ++r) sources[0].push_back(r);
  }
  const auto joined = [&](float sum, float next, bool is_first) {
    if (is_first) return next;
    if (options.op == ReduceOp::kSum) {
      volatile float added = sum + next;  // volatile: no contraction, no reordering
      return static_cast<float>(added);
    }
    return (options.op == ReduceOp::kMin) == (next < sum) ? next : sum;
  };
  const Parameter& parameter = layout.parameter(p);
  std::vector<uint8_t> result = before;
  for (int64_t i = 0; i < parameter.shard_numel; ++i) {
    const int64_t place = place_of(parameter, layout.ranks(), rank, i);
    if (place >= parameter.unsharded_numel) {
      if (!options.add_to_output) store(result.data(), i, output_dtype, 0.0f);
      continue;
    }
    volatile float sum = 0;
    for (size_t source = 0; source < sources.size(); ++source) {
      float partial = 0;
      for (size_t k = 0; k < sources[source].size(); ++k) {
        float slice = gradient_at(sources[source][k], p, place, round);
        if (dtype == DType::kBFloat16) slice = float_of_bf16(bf16_of(slice));
        partial = joined(partial, slice, k == 0);
      }
      sum = joined(sum, partial, source == 0);
    }
    if (options.op == ReduceOp::kSum) sum = sum * static_cast<float>(options.scale);
    if (options.add_to_output) sum = load(before.data(), i, output_dtype) + sum;
    store(result.data(), i, output_dtype, sum);
  }
  return result;
}

// One reduce: which parameters have gradients, of which types, into what.
struct ReduceCase {
  std::vector<int> subset;
  std::vector<DType> dtypes;  // by parameter, kBytes without a gradient
  DType output_dtype = DType::kFloat32;
  AccumulateOptions options;
  bool slot_reuse = false;
};

inline ReduceCall call_of(int plan, const ReduceCase& made,
                          const std::vector<std::vector<uint8_t>>& gradients,
                          std::vector<std::vector<uint8_t>>& outputs) {
  ReduceCall call;
  call.plan = plan;
  for (const int p : made.subset) {
    call.parameters.push_back(p);
    call.gradient_dtypes.push_back(made.dtypes[p]);
    call.gradients.push_back(gradients[p].data());
    call.outputs.push_back(outputs[p].data());
  }
  call.output_dtype = made.output_dtype;
  call.options = made.options;
  call.slot_reuse = made.slot_reuse;
  return call;
}

inline ReduceCase random_case(std::mt19937& random, const GroupLayout& layout) {
  ReduceCase made;
  const bool mixed = random() % 3 == 0;
  for (int p = 0; p < layout.size(); ++p) {
    const bool has_gradient = random() % 5 != 0;
    const bool wide = mixed && random() % 2 == 0;
    made.dtypes.push_back(!has_gradient ? DType::kBytes
                          : wide        ? DType::kFloat32
                                        : DType::kBFloat16);
    if (has_gradient) made.subset.push_back(p);
  }
  made.output_dtype = random() % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
  made.options.scale = random() % 2 == 0 ? 1.0 : 1.0 / layout.ranks();
  made.options.add_to_output = random() % 3 == 0;
  return made;
}

inline std::vector<std::vector<uint8_t>> make_outputs(const GroupLayout& layout, DType dtype) {
  std::vector<std::vector<uint8_t>> outputs;
  for (int p = 0; p < layout.size(); ++p) {
    outputs.emplace_back(static_cast<size_t>(layout.parameter(p).shard_numel * dtype_bytes(dtype)));
    for (int64_t i = 0; i < layout.parameter(p).shard_numel; ++i) {
      store(outputs.back().data(), i, dtype, static_cast<float>(i % 7) - 3.0f);
    }
  }
  return outputs;
}

// One gather of all shards, bit-exact on this rank, and its slot given back.
inline void gather_and_check(Group& group, int plan, int rank, const GroupLayout& layout) {
  const auto shards = make_shards(layout, rank);
  auto started = group.gather({plan, pointers(shards)});
  TIDE_ASSERT_OK(started.status());
  TIDE_ASSERT_OK(started.value().operation->wait());
  for (int p = 0; p < layout.size(); ++p)
    EXPECT_EQ(wrong_bytes(layout, p, started.value().places[p]), 0) << "rank " << rank;
  TIDE_ASSERT_OK(group.vacate(plan));
}

// One reduce of fresh gradients, which are overwritten once they have been read.
inline void reduce_and_wait(Group& group, int plan, const GroupLayout& layout, int rank,
                            const ReduceCase& made, int round,
                            std::vector<std::vector<uint8_t>>* outputs) {
  auto gradients = make_gradients(layout, rank, made.dtypes, round);
  auto operation = group.reduce(call_of(plan, made, gradients, *outputs));
  TIDE_ASSERT_OK(operation.status());
  TIDE_ASSERT_OK(operation.value()->wait_read());
  for (auto& gradient : gradients)
    std::fill(gradient.begin(), gradient.end(), 0xff);  // read: free to change
  TIDE_ASSERT_OK(operation.value()->wait());
}

// `outputs` held what make_outputs() gives. `sources`: as expected_shard's.
inline void check_outputs(const GroupLayout& layout, int rank, const ReduceCase& made,
                          const std::vector<std::vector<uint8_t>>& outputs, int round,
                          const std::vector<std::vector<int>>& sources = {}) {
  const auto before = make_outputs(layout, made.output_dtype);
  for (int p = 0; p < layout.size(); ++p) {
    const auto expected = made.dtypes[p] == DType::kBytes
                              ? before[p]
                              : expected_shard(layout, p, rank, made.dtypes[p], made.output_dtype,
                                               made.options, before[p], round, sources);
    EXPECT_EQ(expected, outputs[p]) << "parameter " << p << " rank " << rank << " round " << round;
  }
}

}  // namespace tide::testing
