// The sum of accumulate.cu: walks a list of blocks; same order and rounding as accumulate.h.
//
// A thread adds vectors: as many elements as fit 16 bytes of the wider type, so that a warp's loads
// and its stores are whole lines. 2, 4 and 8 slices have code of their own, without a branch
// between their loads: what one thread has under way is then always kInFlightBytes, and 16 CTAs
// take in what 16 SMs can. Other numbers of slices go four at a time. Slices whose vectors are not
// aligned are read as aligned words and shifted (the host leaves a vector's room at both ends, so
// that no word reaches outside the slice).
#pragma once

#include <type_traits>

#include "kernels/cuda_device.cuh"

namespace tide::cuda {

// One block, as the host wrote it.
struct SumBlock {
  const uint64_t* words;
  char* to;
  int64_t vectors;
  int count;
  int head;
  bool misaligned;

  __device__ explicit SumBlock(const uint64_t* at)
      : words(at),
        to(reinterpret_cast<char*>(at[kTo])),
        vectors(static_cast<int64_t>(at[kVectors])),
        count(static_cast<int>(at[kSlices] & 0xffffffffu)),
        head(static_cast<int>(at[kSlices] >> 32) & 0xffff),
        misaligned((at[kSlices] & kMisaligned) != 0) {}
  __device__ const char* slice(int s) const {
    return reinterpret_cast<const char*>(words[kAccumulateWords + s]);
  }
};

struct SumOptions {
  float scale;
  bool add_to_output;

  __device__ explicit SumOptions(const ListHead& head)
      : scale(poisoned(head) ? __uint_as_float(kQuietNan) : head.scale),
        add_to_output((head.flags & kAddToOutput) != 0) {}

  template <bool kAdd, class Output>
  __device__ Output finish(float sum, Output before) const {
    float value = sum * scale;
    if (kAdd) value = sum_float(before) + value;
    return from_float<Output>(canonical(value));
  }
  template <class Output>
  __device__ void store_element(float sum, char* to) const {
    if (add_to_output) {
      cuda::store_element<Output>(to, finish<true>(sum, load_element<Output>(to)));
    } else {
      cuda::store_element<Output>(to, finish<false>(sum, Output{}));
    }
  }
};

template <class Slice, class Output>
struct Accumulate {
  static constexpr int kElements = vector_numel(sizeof(Slice), sizeof(Output));
  static constexpr int kSliceBytes = kElements * sizeof(Slice);
  static constexpr int kOutputBytes = kElements * sizeof(Output);
  static constexpr int64_t kStride = static_cast<int64_t>(kThreads) * kSliceBytes;
  static constexpr int64_t kOutputStride = static_cast<int64_t>(kThreads) * kOutputBytes;
  using Raw = typename Word<kSliceBytes>::Type;
  using RawOutput = typename Word<kOutputBytes>::Type;

  static __device__ void add(float (&sum)[kElements], Raw raw, bool first) {
    constexpr int kPerWord = 4 / sizeof(Slice);
    uint32_t words[kSliceBytes / 4];
    memcpy(words, &raw, sizeof(raw));
#pragma unroll
    for (int w = 0; w < kSliceBytes / 4; ++w) {
      float values[kPerWord];
      unpack<Slice>(words[w], values);
#pragma unroll
      for (int i = 0; i < kPerWord; ++i) {
        float& to = sum[w * kPerWord + i];
        to = first ? values[i] : to + values[i];
      }
    }
  }

  template <bool kAdd>
  static __device__ void store(const float (&sum)[kElements], char* to, const SumOptions& options) {
    Output values[kElements] = {};
    if constexpr (kAdd) {
      const RawOutput raw = load_streaming<kOutputBytes>(to);
      memcpy(values, &raw, sizeof(raw));
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) values[i] = options.finish<kAdd, Output>(sum[i], values[i]);
    RawOutput raw;
    memcpy(&raw, values, sizeof(raw));
    store_streaming<kOutputBytes>(to, raw);
  }

  // kUnroll vectors of kCount slices from slice s on, all under way at once.
  template <int kCount, int kUnroll, bool kShifted>
  static __device__ void load(Raw (&raw)[kCount][kUnroll], const SumBlock& block, int s,
                              int64_t offset) {
#pragma unroll
    for (int g = 0; g < kCount; ++g) {
      const char* from = block.slice(s + g) + offset;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if constexpr (kShifted) {
          raw[g][u] = load_shifted<kSliceBytes>(from + u * kStride);
        } else {
          raw[g][u] = load_streaming<kSliceBytes>(from + u * kStride);
        }
      }
    }
  }

  // Exactly kCount slices.
  template <int kCount, int kUnroll, bool kAdd>
  static __device__ void pass(const SumBlock& block, int64_t offset, char* to,
                              const SumOptions& options) {
    Raw raw[kCount][kUnroll];
    load<kCount, kUnroll, false>(raw, block, 0, offset);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float sum[kElements];
#pragma unroll
      for (int g = 0; g < kCount; ++g) add(sum, raw[g][u], g == 0);
      store<kAdd>(sum, to + u * kOutputStride, options);
    }
  }

  template <int kCount, int kUnroll, bool kShifted>
  static __device__ void add_more(float (&sum)[kUnroll][kElements], const SumBlock& block, int s,
                                  int64_t offset) {
    Raw raw[kCount][kUnroll];
    load<kCount, kUnroll, kShifted>(raw, block, s, offset);
#pragma unroll
    for (int g = 0; g < kCount; ++g) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) add(sum[u], raw[g][u], s + g == 0);
    }
  }

  // Any number of slices, also none.
  template <int kUnroll, bool kShifted, bool kAdd>
  static __device__ void pass_any(const SumBlock& block, int64_t offset, char* to,
                                  const SumOptions& options) {
    float sum[kUnroll][kElements] = {};
    int s = 0;
#pragma unroll 1
    for (; s + 4 <= block.count; s += 4) add_more<4, kUnroll, kShifted>(sum, block, s, offset);
#pragma unroll 1
    for (; s < block.count; ++s) add_more<1, kUnroll, kShifted>(sum, block, s, offset);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) store<kAdd>(sum[u], to + u * kOutputStride, options);
  }

  // Whole passes of kUnroll vectors a thread from `begin` on; returns where they end. kCount 0: any
  // number.
  template <int kCount, int kUnroll, bool kShifted, bool kAdd>
  static __device__ int64_t passes(const SumBlock& block, int64_t begin, int64_t end,
                                   const SumOptions& options) {
    const int64_t slice_offset = static_cast<int64_t>(block.head) * sizeof(Slice);
    char* const to = block.to + static_cast<int64_t>(block.head) * sizeof(Output);
    constexpr int64_t kPass = static_cast<int64_t>(kThreads) * kUnroll;
#pragma unroll 1
    for (; kUnroll == 1 ? begin < end : begin + kPass <= end; begin += kPass) {
      const int64_t v = begin + threadIdx.x;
      if (kUnroll == 1 && v >= end) continue;
      if constexpr (kCount > 0) {
        pass<kCount, kUnroll, kAdd>(block, slice_offset + v * kSliceBytes, to + v * kOutputBytes,
                                    options);
      } else {
        pass_any<kUnroll, kShifted, kAdd>(block, slice_offset + v * kSliceBytes,
                                          to + v * kOutputBytes, options);
      }
    }
    return begin;
  }

  template <int kCount, bool kAdd>
  static __device__ void vectors(const SumBlock& block, int64_t begin, int64_t end,
                                 const SumOptions& options) {
    constexpr int kUnroll = kInFlightBytes / (kCount * kSliceBytes);
    begin = passes<kCount, kUnroll, false, kAdd>(block, begin, end, options);
    if constexpr (kUnroll > 4)
      begin = passes<kCount, kUnroll / 4, false, kAdd>(block, begin, end, options);
    passes<kCount, 1, false, kAdd>(block, begin, end, options);
  }

  static __device__ void element(const SumBlock& block, int64_t i, const SumOptions& options) {
    float sum = 0.0f;
    for (int s = 0; s < block.count; ++s) {
      const float value =
          sum_float(load_element<Slice>(block.slice(s) + i * static_cast<int64_t>(sizeof(Slice))));
      sum = s == 0 ? value : sum + value;
    }
    options.store_element<Output>(sum, block.to + i * static_cast<int64_t>(sizeof(Output)));
  }

  template <bool kAdd>
  static __device__ void all_vectors(const SumBlock& block, int64_t begin, int64_t end,
                                     const SumOptions& options) {
    // Pairs of types that nobody asks for at speed do without code of their own for each number of
    // slices.
    constexpr bool kFast = sizeof(Output) == 4 || std::is_same_v<Slice, Output>;
    if (block.misaligned) {
      begin = passes<0, 32 / kSliceBytes, true, kAdd>(block, begin, end, options);
      passes<0, 1, true, kAdd>(block, begin, end, options);
      return;
    }
    if constexpr (kFast) {
      if (block.count == 8) return vectors<8, kAdd>(block, begin, end, options);
      if (block.count == 4) return vectors<4, kAdd>(block, begin, end, options);
      if (block.count == 2) return vectors<2, kAdd>(block, begin, end, options);
    }
    begin = passes<0, 4, false, kAdd>(block, begin, end, options);
    passes<0, 1, false, kAdd>(block, begin, end, options);
  }

  static __device__ void tile(const uint64_t* words, int64_t tile, int64_t tiles,
                              int64_t tile_vectors, const SumOptions& options) {
    const SumBlock block(words);
    const int64_t begin = tile * tile_vectors;
    const int64_t end = min(block.vectors, begin + tile_vectors);
    if (options.add_to_output) {
      all_vectors<true>(block, begin, end, options);
    } else {
      all_vectors<false>(block, begin, end, options);
    }
    // What is no whole vector; a block without vectors is all tail, shared by its tiles.
    const int64_t numel = static_cast<int64_t>(words[kNumel]);
    if (tile == 0 && threadIdx.x < block.head) element(block, threadIdx.x, options);
    int64_t i = block.head + block.vectors * kElements + threadIdx.x;
    int64_t tail_end = numel;
    if (block.vectors == 0) {
      i += tile * tile_vectors;
      tail_end = min(numel, (tile + 1) * tile_vectors);
    } else if (tile != tiles - 1) {
      return;
    }
    for (; i < tail_end; i += kThreads) element(block, i, options);
  }

  static __device__ void run(const List& list) {
    const SumOptions options(list.head);
    const int64_t tile_vectors = list.head.tile_vectors;
    const uint64_t* block = list.words;
    uint32_t left = list.head.blocks;
    uint64_t first_tile = 0;
    for (uint64_t at = blockIdx.x;; at += gridDim.x) {
      while (left > 0 && at >= block[kEndTile]) {
        first_tile = block[kEndTile];
        block += kAccumulateWords + (block[kSlices] & 0xffffffffu);
        --left;
      }
      if (left == 0) return;
      tile(block, static_cast<int64_t>(at - first_tile),
           static_cast<int64_t>(block[kEndTile] - first_tile), tile_vectors, options);
    }
  }
};

// The output's type is the list's.
template <class Slice>
__device__ void accumulate(const List& list) {
  const uint32_t output = list.head.flags & kOutputMask;
  if (output == kOutputFp32) {
    Accumulate<Slice, float>::run(list);
  } else if (output == kOutputBf16) {
    Accumulate<Slice, BFloat>::run(list);
  } else {
    Accumulate<Slice, Half>::run(list);
  }
}

}  // namespace tide::cuda
