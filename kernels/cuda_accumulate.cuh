// The sum of accumulate.cu and combine.cu: walks a list of blocks; same order and rounding as accumulate.h.
//
// A thread adds vectors of 16 bytes of each slice. They come in through shared memory by asynchronous copies, several
// vectors ahead of the sum and across the ends of blocks, so that many small blocks stream like a large one. Every thread
// reads only what it copied itself: nothing in here synchronises threads. Where the output is wider than the slices,
// pairs of lanes swap halves before they store, so that every store instruction fills whole 32-byte sectors. Slices at
// odd addresses are read where they are added, as aligned words, and shifted (the host leaves a vector's room at both
// ends, so that no word reaches outside the slice).
#pragma once

#include "kernels/cuda_device.cuh"

namespace tide::cuda {

template <class Slice>
struct Accumulate {
  static constexpr int kVectorNumel = kVectorBytes / sizeof(Slice);

  struct Options {
    float scale;
    bool add_to_output;
    uint32_t output;  // kOutputBf16, ...
  };
  // One block, as the host wrote it.
  struct Block {
    const uint64_t* words;
    char* to;
    int count;
    int head;
    bool misaligned;
    int64_t vectors;

    __device__ explicit Block(const uint64_t* at)
        : words(at),
          to(reinterpret_cast<char*>(at[kTo])),
          count(static_cast<int>(at[kSlices] & 0xffffffffu)),
          head(static_cast<int>(at[kSlices] >> 32) & 0xffff),
          misaligned((at[kSlices] & kMisaligned) != 0),
          vectors(static_cast<int64_t>(at[kVectors])) {}
    __device__ const char* slice(int s) const { return reinterpret_cast<const char*>(words[kAccumulateWords + s]); }
  };

  // The order in which a CTA meets vectors: tiles c, c + grid, c + 2 grid ...; of each tile, chunks of slices.
  struct Walk {
    Block block;
    uint32_t left;
    int chunk = 0;
    uint64_t first_tile = 0;
    uint64_t end_tile;
    uint64_t at = blockIdx.x;

    template <int kWords>
    __device__ explicit Walk(const List<kWords>& list)
        : block(list.words), left(list.head.blocks), end_tile(list.words[kEndTile]) {}
    // Goes to the block of the current tile; false at the end.
    __device__ bool settle() {
      while (at >= end_tile) {
        if (--left == 0) return false;
        first_tile = end_tile;
        block = Block(block.words + kAccumulateWords + block.count);
        end_tile = block.words[kEndTile];
      }
      return true;
    }
    __device__ int64_t vector() const { return static_cast<int64_t>(at - first_tile) * kThreads + threadIdx.x; }
    __device__ int64_t offset() const {
      return static_cast<int64_t>(block.head) * sizeof(Slice) + vector() * kVectorBytes;
    }
    template <int kMost, bool kMore>
    __device__ bool is_last_chunk() const {
      return !kMore || (chunk + 1) * kMost >= block.count;
    }
    template <int kMost, bool kMore>
    __device__ void next() {
      if (is_last_chunk<kMost, kMore>()) {
        chunk = 0;
        at += gridDim.x;
      } else {
        ++chunk;
      }
    }
  };

  static __device__ void add(float (&sum)[kVectorNumel], uint4 raw, bool first) {
    Slice values[kVectorNumel];
    memcpy(values, &raw, sizeof(raw));
#pragma unroll
    for (int i = 0; i < kVectorNumel; ++i) sum[i] = first ? to_float(values[i]) : sum[i] + to_float(values[i]);
  }

  // kRun elements that lie together in the output.
  template <class Output, int kRun>
  static __device__ void store_run(const float* sum, char* to, const Options& options) {
    constexpr int kBytes = kRun * sizeof(Output);
    using Raw = typename Word<kBytes>::Type;
    Output values[kRun];
    if (options.add_to_output) {
      const Raw raw = load_streaming<kBytes>(to);
      memcpy(values, &raw, sizeof(raw));
    }
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      float value = sum[i] * options.scale;
      if (options.add_to_output) value = to_float(values[i]) + value;
      values[i] = from_float<Output>(canonical(value));
    }
    Raw raw;
    memcpy(&raw, values, sizeof(raw));
    store_streaming<kBytes>(to, raw);
  }

  // A thread's vector, at element `first` of the output. together: all lanes of the warp are here, with neighbours.
  template <class Output>
  static __device__ void store_as(float (&sum)[kVectorNumel], char* output, int64_t first, bool together,
                                  const Options& options) {
    char* to = output + first * static_cast<int64_t>(sizeof(Output));
    if constexpr (kVectorNumel * sizeof(Output) <= 16) {
      store_run<Output, kVectorNumel>(sum, to, options);
    } else if (together) {
      const bool odd = threadIdx.x % 2 != 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float given = odd ? sum[i] : sum[4 + i];
        const float taken = __shfl_xor_sync(0xffffffffu, given, 1);
        if (odd) {
          sum[i] = taken;
        } else {
          sum[4 + i] = taken;
        }
      }
      // Even: its own first half and the neighbour's. Odd: the neighbour's second half and its own.
      to += odd ? -16 : 0;
      store_run<Output, 4>(sum, to, options);
      store_run<Output, 4>(sum + 4, to + 32, options);
    } else {
      store_run<Output, 4>(sum, to, options);
      store_run<Output, 4>(sum + 4, to + 16, options);
    }
  }

  static __device__ void store(float (&sum)[kVectorNumel], char* output, int64_t first, bool together,
                               const Options& options) {
    if (options.output == kOutputFp32) {
      store_as<float>(sum, output, first, together, options);
    } else if (options.output == kOutputBf16) {
      store_as<BFloat>(sum, output, first, together, options);
    } else {
      store_as<Half>(sum, output, first, together, options);
    }
  }

  template <class Output>
  static __device__ void store_one(float sum, char* output, int64_t i, const Options& options) {
    char* at = output + i * static_cast<int64_t>(sizeof(Output));
    sum = sum * options.scale;
    if (options.add_to_output) sum = to_float(load_element<Output>(at)) + sum;
    store_element<Output>(at, from_float<Output>(canonical(sum)));
  }

  static __device__ void store_single(float sum, char* output, int64_t i, const Options& options) {
    if (options.output == kOutputFp32) {
      store_one<float>(sum, output, i, options);
    } else if (options.output == kOutputBf16) {
      store_one<BFloat>(sum, output, i, options);
    } else {
      store_one<Half>(sum, output, i, options);
    }
  }

  static __device__ void element(const Block& block, int64_t i, const Options& options) {
    float sum = 0.0f;
    for (int s = 0; s < block.count; ++s) {
      const float value = to_float(load_element<Slice>(block.slice(s) + i * static_cast<int64_t>(sizeof(Slice))));
      sum = s == 0 ? value : sum + value;
    }
    store_single(sum, block.to, i, options);
  }

  // What of a tile is no whole vector; a block without vectors is all head and tail, spread over its tiles.
  static __device__ void elements(const Walk& walk, const Options& options) {
    const Block& block = walk.block;
    const int64_t numel = static_cast<int64_t>(block.words[kNumel]);
    if (walk.at == walk.first_tile && threadIdx.x < block.head) element(block, threadIdx.x, options);
    int64_t i = block.head + block.vectors * kVectorNumel + threadIdx.x;
    int64_t end = numel;
    if (block.vectors == 0) {
      i += static_cast<int64_t>(walk.at - walk.first_tile) * kThreads;
      end = min(numel, i + 1);
    } else if (walk.at + 1 != walk.end_tile) {
      return;
    }
    for (; i < end; i += kThreads) element(block, i, options);
  }

  // At multiples of 4 a copy can be started; elsewhere a slice is read by load_shifted.
  static __device__ bool can_start(const char* from) { return reinterpret_cast<uintptr_t>(from) % 4 == 0; }
  static __device__ void start(char* shared, const char* from, bool misaligned) {
    if (!misaligned || reinterpret_cast<uintptr_t>(from) % 16 == 0) {
      start_copy<16>(shared, from);
    } else if (can_start(from)) {
#pragma unroll
      for (int i = 0; i < kVectorBytes; i += 4) start_copy<4>(shared + i, from + i);
    }
  }

  // kMost slices are under way for each of kInFlight / kMost vectors; kMore: blocks may have more than kMost slices.
  template <int kMost, bool kMore, int kWords>
  static __device__ void stream(const List<kWords>& list, char* shared, const Options& options) {
    constexpr int kStages = kInFlight / kMost;
    constexpr int kSlotBytes = kThreads * kVectorBytes;
    char* const own = shared + threadIdx.x * kVectorBytes;
    Walk ahead(list);
    Walk walk(list);
    bool more = true;

    const auto start_next = [&](int stage) {
      more = more && ahead.settle();
      if (more) {
        if (ahead.vector() < ahead.block.vectors) {
          const int64_t offset = ahead.offset();
          const int first = ahead.chunk * kMost;
#pragma unroll
          for (int g = 0; g < kMost; ++g) {
            if (first + g < ahead.block.count) {
              start(own + (stage * kMost + g) * kSlotBytes, ahead.block.slice(first + g) + offset, ahead.block.misaligned);
            }
          }
        }
        ahead.template next<kMost, kMore>();
      }
      commit_copies();
    };
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) start_next(stage);

    float sum[kVectorNumel] = {};
    for (int stage = 0; walk.settle(); stage = (stage + 1) % kStages) {
      wait_copies<kStages - 1>();
      const Block& block = walk.block;
      const int64_t v = walk.vector();
      if (v < block.vectors) {
        const int64_t offset = walk.offset();
        const int first = walk.chunk * kMost;
#pragma unroll
        for (int g = 0; g < kMost; ++g) {
          if (first + g >= block.count) continue;
          uint4 raw = *reinterpret_cast<const uint4*>(own + (stage * kMost + g) * kSlotBytes);
          if (block.misaligned) {
            const char* from = block.slice(first + g) + offset;
            if (!can_start(from)) raw = load_shifted(from);
          }
          add(sum, raw, g == 0 && first == 0);
        }
        if (walk.template is_last_chunk<kMost, kMore>()) {
          if (block.count == 0) {
#pragma unroll
            for (int i = 0; i < kVectorNumel; ++i) sum[i] = 0.0f;
          }
          const bool together = v - threadIdx.x % 32 + 32 <= block.vectors;
          store(sum, block.to, block.head + v * kVectorNumel, together, options);
        }
      }
      if (walk.template is_last_chunk<kMost, kMore>() && (walk.at == walk.first_tile || walk.at + 1 == walk.end_tile ||
                                                          block.vectors == 0)) {
        elements(walk, options);
      }
      walk.template next<kMost, kMore>();
      start_next(stage);
    }
    wait_copies<0>();
  }

  template <int kWords>
  static __device__ void run(const List<kWords>& list) {
    extern __shared__ __align__(16) char shared[];
    const Options options = {poisoned(list.head) ? __uint_as_float(kQuietNan) : list.head.scale,
                             (list.head.flags & kAddToOutput) != 0, list.head.flags & kOutputMask};
    if (list.head.blocks == 0) return;
    if (list.head.most_slices <= 2) {
      stream<2, false>(list, shared, options);
    } else if (list.head.most_slices <= 4) {
      stream<4, false>(list, shared, options);
    } else {
      stream<8, true>(list, shared, options);
    }
  }
};

}  // namespace tide::cuda
