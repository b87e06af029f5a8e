// The sum of a reduce: slices of bf16, fp16 or fp32 into any of these. The twin of accumulate.cc, bit for bit; lists as
// cuda_params.h says. Kernels are named accumulate_<slice>_<short|long>; the output's type is a flag of the list. They
// take kSumSharedBytes of dynamic shared memory.
#include "kernels/cuda_accumulate.cuh"

namespace tide::cuda {

#define TIDE_ACCUMULATE(name, slice)                                                  \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                           \
      accumulate_##name##_short(const __grid_constant__ ShortList list) {             \
    Accumulate<slice>::run(list);                                                     \
  }                                                                                   \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                           \
      accumulate_##name##_long(const __grid_constant__ LongList list) {               \
    Accumulate<slice>::run(list);                                                     \
  }

TIDE_ACCUMULATE(bf16, BFloat)
TIDE_ACCUMULATE(fp16, Half)
TIDE_ACCUMULATE(fp32, float)

}  // namespace tide::cuda
