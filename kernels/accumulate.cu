// The sum of a reduce: slices of bf16, fp16 or fp32 into any of these. The twin of accumulate.cc,
// bit for bit; lists as cuda_params.h says. Kernels are named accumulate_<slice>; the output's type
// is a flag of the list.
#include "kernels/cuda_accumulate.cuh"

namespace tide::cuda {

#define TIDE_ACCUMULATE(name, slice)                         \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)  \
      accumulate_##name(const __grid_constant__ List list) { \
    accumulate<slice>(list);                                 \
  }

TIDE_ACCUMULATE(bf16, BFloat)
TIDE_ACCUMULATE(fp16, Half)
TIDE_ACCUMULATE(fp32, float)

}  // namespace tide::cuda
