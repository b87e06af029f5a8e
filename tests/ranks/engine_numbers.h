// The naive reference of a reduce: fp32 sums in rank order, scaled, rounded once. Shares no code
// with the kernels.
#pragma once

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
// what it held.
inline std::vector<uint8_t> expected_shard(const GroupLayout& layout, int p, int rank, DType dtype,
                                           DType output_dtype, const AccumulateOptions& options,
                                           const std::vector<uint8_t>& before, int round = 0) {
  const Parameter& parameter = layout.parameter(p);
  std::vector<uint8_t> result = before;
  for (int64_t i = 0; i < parameter.shard_numel; ++i) {
    const int64_t place = place_of(parameter, layout.ranks(), rank, i);
    if (place >= parameter.unsharded_numel) {
      if (!options.add_to_output) store(result.data(), i, output_dtype, 0.0f);
      continue;
    }
    volatile float sum = 0;  // volatile: no contraction, no reordering
    for (int r = 0; r < layout.ranks(); ++r) {
      float slice = gradient_at(r, p, place, round);
      if (dtype == DType::kBFloat16) slice = float_of_bf16(bf16_of(slice));
      if (r == 0) {
        sum = slice;
      } else if (options.op == ReduceOp::kSum) {
        sum = sum + slice;
      } else {
        sum = (options.op == ReduceOp::kMin) == (slice < sum) ? slice : static_cast<float>(sum);
      }
    }
    if (options.op == ReduceOp::kSum) sum = sum * static_cast<float>(options.scale);
    if (options.add_to_output) sum = load(before.data(), i, output_dtype) + sum;
    store(result.data(), i, output_dtype, sum);
  }
  return result;
}

}  // namespace tide::testing
