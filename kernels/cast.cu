// Changes the element type of runs of elements. The twin of cast.cc, bit for bit; lists as
// cuda_params.h says. Kernels are named cast_<from>_<to>; equal types are a copy and have none.
#include "kernels/cuda_device.cuh"

namespace tide::cuda {

// fp64 to a 16-bit type goes through fp32, as cast.h says.
template <class To, class From>
__device__ inline To convert(From value) {
  return from_float<To>(to_float(value));
}

template <class From, class To>
struct Cast {
  static constexpr int kElements = vector_numel(sizeof(From), sizeof(To));
  static constexpr int kFromBytes = kElements * sizeof(From);
  static constexpr int kToBytes = kElements * sizeof(To);
  static constexpr int kTile = kThreads * kCastUnroll;
  using RawFrom = typename Word<kFromBytes>::Type;
  using RawTo = typename Word<kToBytes>::Type;

  static __device__ void element(const char* from, char* to, int64_t i) {
    store_element<To>(to + i * sizeof(To),
                      convert<To>(load_element<From>(from + i * sizeof(From))));
  }

  static __device__ void tile(const uint64_t* block, int64_t tile, int64_t tiles) {
    char* to = reinterpret_cast<char*>(block[kTo]);
    const char* from = reinterpret_cast<const char*>(block[kFrom]);
    const int64_t numel = static_cast<int64_t>(block[kNumel]);
    if (reinterpret_cast<uintptr_t>(to) % sizeof(To) != 0) {
      const int64_t first = tile * kTile * kElements;
      const int64_t end = min(numel, first + static_cast<int64_t>(kTile) * kElements);
      for (int64_t i = first + threadIdx.x; i < end; i += kThreads) element(from, to, i);
      return;
    }
    const int64_t head = min(head_numel<To, kElements>(to), numel);
    const int64_t vectors_end = (numel - head) / kElements;
    const int64_t first = tile * kTile + threadIdx.x;
    const char* vectors_from = from + head * sizeof(From);
    char* vectors_to = to + head * sizeof(To);
    RawFrom raw[kCastUnroll] = {};
#pragma unroll
    for (int u = 0; u < kCastUnroll; ++u) {
      const int64_t v = first + u * kThreads;
      if (v < vectors_end) raw[u] = load_anywhere<kFromBytes>(vectors_from + v * kFromBytes);
    }
#pragma unroll
    for (int u = 0; u < kCastUnroll; ++u) {
      const int64_t v = first + u * kThreads;
      if (v >= vectors_end) continue;
      From values[kElements];
      To results[kElements];
      memcpy(values, &raw[u], sizeof(values));
#pragma unroll
      for (int i = 0; i < kElements; ++i) results[i] = convert<To>(values[i]);
      RawTo out;
      memcpy(&out, results, sizeof(out));
      store_streaming<kToBytes>(vectors_to + v * kToBytes, out);
    }
    if (tile == 0 && threadIdx.x < head) element(from, to, threadIdx.x);
    const int64_t tail = head + vectors_end * kElements + threadIdx.x;
    if (tile == tiles - 1 && tail < numel) element(from, to, tail);
  }

  static __device__ void run(const List& list) {
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
      tile(block, static_cast<int64_t>(at - first_tile),
           static_cast<int64_t>(block[kEndTile] - first_tile));
    }
  }
};

#define TIDE_CAST(from_name, from, to_name, to)                         \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)             \
      cast_##from_name##_##to_name(const __grid_constant__ List list) { \
    Cast<from, to>::run(list);                                          \
  }

TIDE_CAST(fp32, float, bf16, BFloat)
TIDE_CAST(fp32, float, fp16, Half)
TIDE_CAST(fp32, float, fp64, double)
TIDE_CAST(bf16, BFloat, fp32, float)
TIDE_CAST(bf16, BFloat, fp16, Half)
TIDE_CAST(bf16, BFloat, fp64, double)
TIDE_CAST(fp16, Half, fp32, float)
TIDE_CAST(fp16, Half, bf16, BFloat)
TIDE_CAST(fp16, Half, fp64, double)
TIDE_CAST(fp64, double, fp32, float)
TIDE_CAST(fp64, double, bf16, BFloat)
TIDE_CAST(fp64, double, fp16, Half)

}  // namespace tide::cuda
