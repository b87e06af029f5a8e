// The last step of a reduce over several nodes where the switch adds: reads one sum of all members'
// fp32 blocks at a multicast address (a multiple of 16), scales, and writes or adds it to the
// gradient shard. The order of the sum is the switch's. For sm_90 and newer; launched with at most
// kCombineCtas CTAs. Without multicast the step is accumulate.cu's kernel over fp32 blocks in own
// memory, with as few CTAs. Lists as cuda_params.h says; the kernel is multicast_combine.
#include "kernels/cuda_accumulate.cuh"

namespace tide::cuda {
namespace {

template <class Output>
__device__ void run_as(const List& list) {
#if __CUDA_ARCH__ >= 900
  const SumOptions options(list.head);
  const uint64_t* block = list.words;
  uint32_t left = list.head.blocks;
  uint64_t first_tile = 0;
  for (uint64_t at = blockIdx.x;; at += gridDim.x) {
    while (left > 0 && at >= block[kEndTile]) {
      first_tile = block[kEndTile];
      block += kCastWords;
      --left;
    }
    if (left == 0) return;
    const char* from = reinterpret_cast<const char*>(block[kFrom]);
    char* to = reinterpret_cast<char*>(block[kTo]);
    const int64_t numel = static_cast<int64_t>(block[kNumel]);
    const bool aligned = block[kTo] % 16 == 0;
    const int64_t vectors = numel / 4;
    const int64_t first =
        static_cast<int64_t>(at - first_tile) * kThreads * kMulticastUnroll + threadIdx.x;
    float4 sum[kMulticastUnroll];
#pragma unroll
    for (int u = 0; u < kMulticastUnroll; ++u) {
      if (first + u * kThreads < vectors)
        sum[u] = multicast_sum_4(from + (first + u * kThreads) * 16);
    }
#pragma unroll
    for (int u = 0; u < kMulticastUnroll; ++u) {
      const int64_t v = first + u * kThreads;
      if (v >= vectors) continue;
      const float sums[4] = {sum[u].x, sum[u].y, sum[u].z, sum[u].w};
      char* at_output = to + v * 4 * static_cast<int64_t>(sizeof(Output));
      if (!aligned) {
        for (int i = 0; i < 4; ++i)
          options.store_element<Output>(sums[i], at_output + i * sizeof(Output));
      } else if (options.add_to_output) {
        Accumulate<float, Output>::template store<true>(sums, at_output, options);
      } else {
        Accumulate<float, Output>::template store<false>(sums, at_output, options);
      }
    }
    const int64_t tail = vectors * 4 + threadIdx.x;
    if (at + 1 == block[kEndTile] && tail < numel) {
      options.store_element<Output>(multicast_sum(from + tail * 4),
                                    to + tail * static_cast<int64_t>(sizeof(Output)));
    }
  }
#endif
}

__device__ void run(const List& list) {
  const uint32_t output = list.head.flags & kOutputMask;
  if (output == kOutputFp32) {
    run_as<float>(list);
  } else if (output == kOutputBf16) {
    run_as<BFloat>(list);
  } else {
    run_as<Half>(list);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    multicast_combine(const __grid_constant__ List list) {
  run(list);
}

}  // namespace tide::cuda
