#include "kernels/cast.h"

#include <algorithm>
#include <cstring>

#include "kernels/rounding_mode.h"
#include "kernels/vector_levels.h"

namespace tide {
namespace {

constexpr int64_t kChunk = 512;

CastFunction cast_function(DType from, DType to, CpuLevel level) {
#if defined(__x86_64__)
  if (level == CpuLevel::kAvx512) return cast_avx512(from, to);
  if (level == CpuLevel::kAvx2) return cast_avx2(from, to);
#else
  (void)level;
#endif
  return cast_baseline(from, to);
}

void cast_from_fp64(const CastBlock& block, CastFunction narrow) {
  double wide[kChunk];
  float values[kChunk];
  for (int64_t begin = 0; begin < block.numel; begin += kChunk) {
    const int64_t count = std::min(kChunk, block.numel - begin);
    std::memcpy(wide, static_cast<const char*>(block.from) + begin * 8,
                static_cast<size_t>(count) * 8);
    for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(wide[i]);
    narrow(values, static_cast<char*>(block.to) + begin * dtype_bytes(block.to_dtype), 0, count);
  }
}

void cast_to_fp64(const CastBlock& block, CastFunction widen) {
  double wide[kChunk];
  float values[kChunk];
  for (int64_t begin = 0; begin < block.numel; begin += kChunk) {
    const int64_t count = std::min(kChunk, block.numel - begin);
    widen(static_cast<const char*>(block.from) + begin * dtype_bytes(block.from_dtype), values, 0,
          count);
    for (int64_t i = 0; i < count; ++i) wide[i] = static_cast<double>(values[i]);
    std::memcpy(static_cast<char*>(block.to) + begin * 8, wide, static_cast<size_t>(count) * 8);
  }
}

}  // namespace

Status cast_block(const CastBlock& block, CpuLevel level) {
  if (block.from_dtype == block.to_dtype) {
    if (block.numel > 0) {
      std::memcpy(block.to, block.from,
                  static_cast<size_t>(block.numel * dtype_bytes(block.to_dtype)));
    }
    return Status::ok();
  }
  const DefaultRoundingMode rounding;
  if (const CastFunction direct = cast_function(block.from_dtype, block.to_dtype, level)) {
    direct(block.from, block.to, 0, block.numel);
    return Status::ok();
  }
  if (block.from_dtype == DType::kFloat64) {
    if (const CastFunction narrow = cast_function(DType::kFloat32, block.to_dtype, level)) {
      cast_from_fp64(block, narrow);
      return Status::ok();
    }
  }
  if (block.to_dtype == DType::kFloat64) {
    if (const CastFunction widen = cast_function(block.from_dtype, DType::kFloat32, level)) {
      cast_to_fp64(block, widen);
      return Status::ok();
    }
  }
  return {ErrorKind::kUnsupported, std::string("cast: from ") + dtype_name(block.from_dtype) +
                                       " to " + dtype_name(block.to_dtype) + " is not offered"};
}

}  // namespace tide
