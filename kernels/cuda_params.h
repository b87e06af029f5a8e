// What the CUDA kernels are called with: lists of blocks packed into the launch's own parameters,
// so that a launch needs no memory of its own and no copy before it. Host code writes a list
// (cuda_lists.h); a kernel walks it.
//
// A list is a sequence of 64-bit words, `kAccumulateWords + slices` (or kCastWords, kPackWords) of
// them a block. Work is cut into tiles; a block's word kEndTile holds the number of tiles of all
// blocks up to and with it, so that CTA c of n takes tiles c, c + n, c + 2n ... whatever blocks
// they belong to.
//
// Plain data, read by nvcc too. Thread-free.
#pragma once

#include <cstdint>

namespace tide::cuda {

#ifndef TIDE_CUDA_THREADS  // set by measurements of other shapes only
#define TIDE_CUDA_THREADS 512
#define TIDE_CUDA_IN_FLIGHT 256
#endif
inline constexpr int kThreads = TIDE_CUDA_THREADS;  // of a CTA, in every kernel
inline constexpr int kCtas = 16;        // of a launch, at most; single CTAs, no clusters
inline constexpr int kCombineCtas = 4;  // of the last step of a reduce over several nodes
#ifndef TIDE_CUDA_LIST_WORDS
#define TIDE_CUDA_LIST_WORDS 2000
#endif
inline constexpr int kListWords =
    TIDE_CUDA_LIST_WORDS;  // 16 kB: a launch's parameters may have 32,764 bytes

enum : uint32_t {
  kAddToOutput = 1,  // sums: output = output + scaled sum
  kOutputMask = 6,   // sums: the output's type
  kOutputFp32 = 0,
  kOutputBf16 = 2,
  kOutputFp16 = 4,
};

struct ListHead {
  uint32_t blocks = 0;
  uint32_t flags = 0;
  float scale = 1.0f;
  uint32_t tile_vectors = 0;  // sums: vectors of a tile
  // A word of device memory that is not zero once the group has failed: sums then write NaN. Null:
  // not looked at.
  const uint32_t* poison = nullptr;
};

struct List {
  ListHead head;
  uint64_t words[kListWords];
};
static_assert(sizeof(List) <= 32764);

// Indices into a block's words.
enum : int { kEndTile = 0, kTo = 1, kNumel = 2 };
// accumulate: then kSlices, kVectors, and the slices' addresses. No slices: zeros are written (a
// shard's padding).
//   kSlices   their number; bits 32..47: elements before the first vector; kMisaligned
//   kVectors  whole vectors; what lies before and behind them is added element by element
enum : int { kSlices = 3, kVectors = 4, kAccumulateWords = 5 };
inline constexpr uint64_t kMisaligned = uint64_t{1}
                                        << 48;  // a slice's vectors are not aligned to their size
// cast and multicast combine: then kFrom.
enum : int { kFrom = 3, kCastWords = 4 };
// pack: rectangles. kNumel is the bytes of a row; then from, rows and the two pitches; bit 63 of
// kRows: 16-byte fit.
enum : int { kRows = 4, kToPitch = 5, kFromPitch = 6, kPackWords = 7 };
inline constexpr uint64_t kFits16 = uint64_t{1} << 63;

// Elements of a vector: 16 bytes of the wider type.
constexpr int vector_numel(int one_bytes, int other_bytes) {
  return 16 / (one_bytes > other_bytes ? one_bytes : other_bytes);
}
// A sum: bytes of slices that a thread has under way, and the vectors of a tile, fewer where there
// is little to add.
inline constexpr int kInFlightBytes = TIDE_CUDA_IN_FLIGHT;
inline constexpr int kTileVectors = kThreads * 16;
inline constexpr int kSmallTileVectors = kThreads * 4;
inline constexpr int kMulticastUnroll = 4;
inline constexpr int kCastUnroll = 4;
inline constexpr int kPackUnroll = 4;
inline constexpr int kPackBytes = 16;

}  // namespace tide::cuda
