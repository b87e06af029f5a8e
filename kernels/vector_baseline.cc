// Sum and cast one element at a time: any machine, and the heads and tails of the vector levels.
#include <bit>
#include <cstring>

#include "kernels/float_bits.h"
#include "kernels/vector_levels.h"

namespace tide {
namespace {

template <DType kType>
float load(const void* base, int64_t i) {
  if constexpr (kType == DType::kFloat32) {
    float value;
    std::memcpy(&value, static_cast<const char*>(base) + i * 4, 4);
    return value;
  } else {
    uint16_t bits;
    std::memcpy(&bits, static_cast<const char*>(base) + i * 2, 2);
    return kType == DType::kBFloat16 ? bf16_to_fp32(bits) : fp16_to_fp32(bits);
  }
}

template <DType kType>
void store(void* base, int64_t i, float value) {
  if constexpr (kType == DType::kFloat32) {
    std::memcpy(static_cast<char*>(base) + i * 4, &value, 4);
  } else {
    const uint16_t bits = kType == DType::kBFloat16 ? fp32_to_bf16(value) : fp32_to_fp16(value);
    std::memcpy(static_cast<char*>(base) + i * 2, &bits, 2);
  }
}

template <DType kSlice, DType kOutput>
void sum_run(const SumCall& call) {
  for (int64_t i = call.begin; i < call.end; ++i) {
    float sum = load<kSlice>(call.slices[0], i);
    for (int slice = 1; slice < call.count; ++slice)
      sum = sum + load<kSlice>(call.slices[slice], i);
    sum = sum * call.scale;
    if (call.add) sum = load<kOutput>(call.output, i) + sum;
    if (sum != sum) sum = std::bit_cast<float>(kQuietNanBits);
    store<kOutput>(call.output, i, sum);
  }
}

template <DType kFrom, DType kTo>
void cast_run(const void* from, void* to, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) store<kTo>(to, i, load<kFrom>(from, i));
}

template <DType kFrom, DType kTo>
SumFunction pick(SumFunction) {
  return sum_run<kFrom, kTo>;
}
template <DType kFrom, DType kTo>
CastFunction pick(CastFunction) {
  return cast_run<kFrom, kTo>;
}

template <class Function, DType kFrom>
Function choose(DType to) {
  switch (to) {
    case DType::kBFloat16:
      return pick<kFrom, DType::kBFloat16>(Function{});
    case DType::kFloat16:
      return pick<kFrom, DType::kFloat16>(Function{});
    case DType::kFloat32:
      return pick<kFrom, DType::kFloat32>(Function{});
    default:
      return nullptr;
  }
}

template <class Function>
Function choose(DType from, DType to) {
  switch (from) {
    case DType::kBFloat16:
      return choose<Function, DType::kBFloat16>(to);
    case DType::kFloat16:
      return choose<Function, DType::kFloat16>(to);
    case DType::kFloat32:
      return choose<Function, DType::kFloat32>(to);
    default:
      return nullptr;
  }
}

}  // namespace

SumFunction sum_baseline(DType slice, DType output) { return choose<SumFunction>(slice, output); }
CastFunction cast_baseline(DType from, DType to) { return choose<CastFunction>(from, to); }

}  // namespace tide
