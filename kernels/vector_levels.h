// What the vector sources offer to accumulate.cc and cast.cc: one function per pair of 16- and
// 32-bit float types and level. Internal to kernels/.
#pragma once

#include <cstdint>

#include "backend/base/dtype.h"

namespace tide {

// One sum of bf16, fp16 or fp32 slices; types are those of the function that takes it.
struct SumCall {
  const void* const* slices = nullptr;
  int count = 0;
  int64_t begin = 0;  // elements [begin, end) of slices and output
  int64_t end = 0;
  void* output = nullptr;
  float scale = 1.0f;
  bool add = false;
  bool stream = false;  // store past the cache; needs an output aligned to its element
};
using SumFunction = void (*)(const SumCall&);
using CastFunction = void (*)(const void* from, void* to, int64_t begin, int64_t end);

// Null unless both types are kBFloat16, kFloat16 or kFloat32.
SumFunction sum_baseline(DType slice, DType output);
CastFunction cast_baseline(DType from, DType to);
#if defined(__x86_64__)
SumFunction sum_avx2(DType slice, DType output);
CastFunction cast_avx2(DType from, DType to);
SumFunction sum_avx512(DType slice, DType output);
CastFunction cast_avx512(DType from, DType to);
#endif

}  // namespace tide
