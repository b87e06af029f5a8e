// What the rates of a sum are compared with: the same CTAs, only reading, or reading and writing as much (a copy), with
// as many loads under way as pay.
#include <cstdint>

extern "C" __global__ void __launch_bounds__(1024, 1) read_only(const uint4* from, uint64_t vectors, uint32_t* never) {
  constexpr int kUnroll = 8;
  const uint64_t threads = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  uint32_t mixed = 0;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors; i += threads * kUnroll) {
    uint4 value[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      value[u] = i + u * threads < vectors ? __ldcs(from + i + u * threads) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) mixed ^= value[u].x ^ value[u].y ^ value[u].z ^ value[u].w;
  }
  if (mixed == 0x12345678u) *never = mixed;  // keeps the loads
}

extern "C" __global__ void __launch_bounds__(1024, 1) copy_only(const uint4* from, uint64_t vectors, uint4* to) {
  constexpr int kUnroll = 8;
  const uint64_t threads = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors; i += threads * kUnroll) {
    uint4 value[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i + u * threads < vectors) value[u] = __ldcs(from + i + u * threads);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i + u * threads < vectors) __stcs(to + i + u * threads, value[u]);
    }
  }
}
