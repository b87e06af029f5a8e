#include "kernels/accumulate.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/float_bits.h"
#include "kernels/rounding_mode.h"
#include "kernels/vector_levels.h"

namespace tide {
namespace {

// Outputs of at least this many bytes are stored past the cache: nobody reads a large shard soon.
constexpr int64_t kStreamOutputBytes = 64 << 10;
// Elements summed at a time by the paths without vector code: their partial results stay in the
// nearest cache.
constexpr int64_t kChunk = 512;

bool is_small_float(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32;
}

SumFunction sum_function(DType slice, DType output, CpuLevel level) {
#if defined(__x86_64__)
  if (level == CpuLevel::kAvx512) return sum_avx512(slice, output);
  if (level == CpuLevel::kAvx2) return sum_avx2(slice, output);
#else
  (void)level;
#endif
  return sum_baseline(slice, output);
}

template <class T>
void load_chunk(T* to, const void* base, int64_t begin, int64_t count) {
  std::memcpy(to, static_cast<const char*>(base) + begin * static_cast<int64_t>(sizeof(T)),
              static_cast<size_t>(count) * sizeof(T));
}

template <class T>
T combine(ReduceOp op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (op == ReduceOp::kSum) return a + b;
    if (b != b) return b;
  } else if (op == ReduceOp::kSum) {
    // Wraps; uint8 + uint8 is an int, cut again by the cast.
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(
        static_cast<Unsigned>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b)));
  }
  if (op == ReduceOp::kMin) return b < a ? b : a;
  return b > a ? b : a;
}

// fp64 and integers, and MIN and MAX of fp32: slices and output have the same type T.
template <class T>
void accumulate_same(const AccumulateBlock& block, const AccumulateOptions& options) {
  T sum[kChunk];
  T other[kChunk];
  for (int64_t begin = 0; begin < block.numel; begin += kChunk) {
    const int64_t count = std::min(kChunk, block.numel - begin);
    load_chunk(sum, block.slices[0], begin, count);
    for (size_t slice = 1; slice < block.slices.size(); ++slice) {
      load_chunk(other, block.slices[slice], begin, count);
      for (int64_t i = 0; i < count; ++i) sum[i] = combine(options.op, sum[i], other[i]);
    }
    if constexpr (std::is_floating_point_v<T>) {
      if (options.op == ReduceOp::kSum) {
        for (int64_t i = 0; i < count; ++i) sum[i] = sum[i] * static_cast<T>(options.scale);
      }
    }
    if (options.add_to_output) {
      load_chunk(other, block.output, begin, count);
      for (int64_t i = 0; i < count; ++i) sum[i] = combine(ReduceOp::kSum, other[i], sum[i]);
    }
    if constexpr (std::is_floating_point_v<T>) {
      for (int64_t i = 0; i < count; ++i) {
        if (sum[i] != sum[i]) sum[i] = std::numeric_limits<T>::quiet_NaN();
      }
    }
    std::memcpy(static_cast<char*>(block.output) + begin * static_cast<int64_t>(sizeof(T)), sum,
                static_cast<size_t>(count) * sizeof(T));
  }
}

// MIN and MAX of 16- and 32-bit floats: widened to fp32 by the cast functions, which loses nothing.
void extreme_small_float(const AccumulateBlock& block, ReduceOp op, CastFunction widen,
                         CastFunction narrow) {
  float best[kChunk];
  float other[kChunk];
  const int64_t slice_bytes = dtype_bytes(block.slice_dtype);
  const int64_t output_bytes = dtype_bytes(block.output_dtype);
  for (int64_t begin = 0; begin < block.numel; begin += kChunk) {
    const int64_t count = std::min(kChunk, block.numel - begin);
    widen(static_cast<const char*>(block.slices[0]) + begin * slice_bytes, best, 0, count);
    for (size_t slice = 1; slice < block.slices.size(); ++slice) {
      widen(static_cast<const char*>(block.slices[slice]) + begin * slice_bytes, other, 0, count);
      for (int64_t i = 0; i < count; ++i) best[i] = combine(op, best[i], other[i]);
    }
    for (int64_t i = 0; i < count; ++i) {
      if (best[i] != best[i]) best[i] = std::bit_cast<float>(kQuietNanBits);
    }
    narrow(best, static_cast<char*>(block.output) + begin * output_bytes, 0, count);
  }
}

Status check(const AccumulateBlock& block, const AccumulateOptions& options) {
  const std::string types =
      std::string(dtype_name(block.slice_dtype)) + " slices into " + dtype_name(block.output_dtype);
  if (block.numel < 0 || block.pad_numel < 0) {
    return {ErrorKind::kInternal, "accumulate: numel " + std::to_string(block.numel) + " and pad " +
                                      std::to_string(block.pad_numel) + " must not be negative"};
  }
  if (block.slices.empty()) return {ErrorKind::kInternal, "accumulate: no slices (" + types + ")"};
  const bool small = is_small_float(block.slice_dtype) && is_small_float(block.output_dtype);
  if (!small && (block.slice_dtype != block.output_dtype || !is_summable(block.slice_dtype))) {
    return {ErrorKind::kUnsupported, "accumulate: cannot add " + types};
  }
  const bool floating = small || block.slice_dtype == DType::kFloat64;
  if (options.scale != 1.0 && !floating) {
    return {ErrorKind::kUnsupported, "accumulate: a scale of " + std::to_string(options.scale) +
                                         " for " + types + "; integers are added without a scale"};
  }
  if (options.op != ReduceOp::kSum && (options.scale != 1.0 || options.add_to_output)) {
    return {ErrorKind::kUnsupported,
            "accumulate: MIN and MAX take no scale and do not add to the output"};
  }
  return Status::ok();
}

void accumulate_small_float(const AccumulateBlock& block, const AccumulateOptions& options,
                            CpuLevel level) {
  if (options.op != ReduceOp::kSum) {
    extreme_small_float(block, options.op, cast_baseline(block.slice_dtype, DType::kFloat32),
                        cast_baseline(DType::kFloat32, block.output_dtype));
    return;
  }
  const int64_t output_bytes = dtype_bytes(block.output_dtype);
  SumCall call;
  call.slices = block.slices.data();
  call.count = static_cast<int>(block.slices.size());
  call.end = block.numel;
  call.output = block.output;
  call.scale = static_cast<float>(options.scale);
  call.add = options.add_to_output;
  call.stream =
      !options.add_to_output && block.numel * output_bytes >= kStreamOutputBytes &&
      reinterpret_cast<uintptr_t>(block.output) % static_cast<uintptr_t>(output_bytes) == 0;
  sum_function(block.slice_dtype, block.output_dtype, level)(call);
}

}  // namespace

Status accumulate_block(const AccumulateBlock& block, const AccumulateOptions& options,
                        CpuLevel level) {
  TIDE_RETURN_IF_ERROR(check(block, options));
  const DefaultRoundingMode rounding;
  if (block.numel > 0) {
    switch (block.slice_dtype) {
      case DType::kUInt8:
        accumulate_same<uint8_t>(block, options);
        break;
      case DType::kInt8:
        accumulate_same<int8_t>(block, options);
        break;
      case DType::kInt16:
        accumulate_same<int16_t>(block, options);
        break;
      case DType::kInt32:
        accumulate_same<int32_t>(block, options);
        break;
      case DType::kInt64:
        accumulate_same<int64_t>(block, options);
        break;
      case DType::kFloat64:
        accumulate_same<double>(block, options);
        break;
      default:
        accumulate_small_float(block, options, level);
        break;
    }
  }
  if (!options.add_to_output && block.pad_numel > 0) {
    const int64_t bytes = dtype_bytes(block.output_dtype);
    std::memset(static_cast<char*>(block.output) + block.numel * bytes, 0,
                static_cast<size_t>(block.pad_numel * bytes));
  }
  return Status::ok();
}

}  // namespace tide
