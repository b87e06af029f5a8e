// Moves many small rectangles of bytes in one launch: pack (pieces to one run), unpack, and own
// copies too small for a copy call each. The twin of copy.cc. Lists as cuda_params.h says; the
// kernel is pack.
//
// A row is cut into units: unit 0 is the bytes before the first multiple of 16 of the destination
// (often none), each later unit 16 bytes, so that every store of a whole unit is aligned.
// Consecutive threads take consecutive units.
#include "kernels/cuda_device.cuh"

namespace tide::cuda {
namespace {

struct Rectangle {
  char* to;
  const char* from;
  int64_t row_bytes, rows, to_pitch, from_pitch;
  bool fits;

  __device__ explicit Rectangle(const uint64_t* block)
      : to(reinterpret_cast<char*>(block[kTo])),
        from(reinterpret_cast<const char*>(block[kFrom])),
        row_bytes(static_cast<int64_t>(block[kNumel])),
        rows(static_cast<int64_t>(block[kRows] & ~kFits16)),
        to_pitch(static_cast<int64_t>(block[kToPitch])),
        from_pitch(static_cast<int64_t>(block[kFromPitch])),
        fits((block[kRows] & kFits16) != 0) {}

  __device__ int64_t units_per_row() const { return row_bytes / kPackBytes + (fits ? 0 : 2); }

  __device__ static void split(int64_t unit, int64_t per_row, int64_t* row, int64_t* column) {
    if (unit <= 0xffffffffll && per_row <= 0xffffffffll) {  // 32-bit division is many times faster
      const uint32_t quotient = static_cast<uint32_t>(unit) / static_cast<uint32_t>(per_row);
      *row = quotient;
      *column = static_cast<uint32_t>(unit) - quotient * static_cast<uint32_t>(per_row);
    } else {
      *row = unit / per_row;
      *column = unit - *row * per_row;
    }
  }

  // Everything is a multiple of 16: loads of all units first, then stores.
  __device__ void move_whole(int64_t first, int64_t end) const {
    const int64_t per_row = units_per_row();
    uint4 value[kPackUnroll];
    char* target[kPackUnroll];
#pragma unroll
    for (int u = 0; u < kPackUnroll; ++u) {
      const int64_t unit = first + u * kThreads;
      if (unit >= end) continue;
      int64_t row = 0;
      int64_t column = unit;
      if (rows > 1) split(unit, per_row, &row, &column);
      value[u] = load_streaming<16>(from + row * from_pitch + column * kPackBytes);
      target[u] = to + row * to_pitch + column * kPackBytes;
    }
#pragma unroll
    for (int u = 0; u < kPackUnroll; ++u) {
      if (first + u * kThreads < end) store_streaming<16>(target[u], value[u]);
    }
  }

  __device__ void move_unit(int64_t unit, int64_t per_row) const {
    int64_t row;
    int64_t column;
    split(unit, per_row, &row, &column);
    char* row_to = to + row * to_pitch;
    const char* row_from = from + row * from_pitch;
    const int64_t head =
        min(static_cast<int64_t>((16 - reinterpret_cast<uintptr_t>(row_to) % 16) % 16), row_bytes);
    const int64_t begin = column == 0 ? 0 : head + (column - 1) * kPackBytes;
    const int64_t end = column == 0 ? head : min(begin + kPackBytes, row_bytes);
    if (column > 0 && begin + kPackBytes == end) {
      store_streaming<16>(row_to + begin, load_anywhere<16>(row_from + begin));
    } else {
      for (int64_t i = begin; i < end; ++i) row_to[i] = row_from[i];
    }
  }
};

__device__ void run(const List& list) {
  const uint64_t* block = list.words;
  uint32_t left = list.head.blocks;
  uint64_t first_tile = 0;
  for (uint64_t at = blockIdx.x;; at += gridDim.x) {
    while (left > 0 && at >= block[kEndTile]) {
      first_tile = block[kEndTile];
      block += kPackWords;
      --left;
    }
    if (left == 0) return;
    const Rectangle rectangle(block);
    const int64_t per_row = rectangle.units_per_row();
    const int64_t units = per_row * rectangle.rows;
    const int64_t first =
        static_cast<int64_t>(at - first_tile) * kThreads * kPackUnroll + threadIdx.x;
    if (rectangle.fits) {
      rectangle.move_whole(first, units);
    } else {
      for (int u = 0; u < kPackUnroll; ++u) {
        const int64_t unit = first + u * kThreads;
        if (unit < units) rectangle.move_unit(unit, per_row);
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1) pack(const __grid_constant__ List list) {
  run(list);
}

}  // namespace tide::cuda
