#include "kernels/cuda_lists.h"

#include <algorithm>

namespace tide::cuda {
namespace {

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

uint64_t divide_up(int64_t value, int64_t by) {
  return static_cast<uint64_t>((value + by - 1) / by);
}

bool is_small_float(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32;
}

// Where the vectors of a sum lie: from the first element at which the output's vectors are aligned.
// Where a slice's are not, they are shifted, and a vector's room stays free at both ends.
struct Grid {
  int64_t head = 0;
  int64_t vectors = 0;
  bool misaligned = false;
};

Grid grid_of(const void* to, int64_t numel, const void* const* slices, int count,
             int64_t slice_bytes, int64_t output_bytes) {
  const int64_t elements =
      vector_numel(static_cast<int>(slice_bytes), static_cast<int>(output_bytes));
  const auto fits = [](const void* base, int64_t offset, int64_t step) {
    return (address(base) + static_cast<uint64_t>(offset)) % static_cast<uint64_t>(step) == 0;
  };
  Grid grid;
  while (grid.head < elements && !fits(to, grid.head * output_bytes, elements * output_bytes))
    ++grid.head;
  if (grid.head == elements) return {};  // the output's elements are not aligned
  grid.misaligned = !std::all_of(slices, slices + count, [&](const void* slice) {
    return fits(slice, grid.head * slice_bytes, elements * slice_bytes);
  });
  int64_t end = numel;
  if (grid.misaligned) {
    grid.head += elements;
    end -= elements;
  }
  grid.vectors = (end - grid.head) / elements;
  if (grid.vectors <= 0) return {};
  return grid;
}

}  // namespace

void ListBuilder::clear() {
  list_.head = {};
  list_.head.tile_vectors = kTileVectors;
  words_ = 0;
  tiles_ = 0;
}

uint64_t* ListBuilder::begin_block(int words, uint64_t tiles, void* to, int64_t numel) {
  uint64_t* block = list_.words + words_;
  words_ += words;
  tiles_ += std::max<uint64_t>(1, tiles);
  ++list_.head.blocks;
  block[kEndTile] = tiles_;
  block[kTo] = address(to);
  block[kNumel] = static_cast<uint64_t>(numel);
  return block;
}

void ListBuilder::set_options(DType output, const AccumulateOptions& options) {
  list_.head.scale = static_cast<float>(options.scale);
  uint32_t flags = output == DType::kFloat32    ? kOutputFp32
                   : output == DType::kBFloat16 ? kOutputBf16
                                                : kOutputFp16;
  if (options.add_to_output) flags |= kAddToOutput;
  list_.head.flags = flags;
}

void ListBuilder::append_sum(const AccumulateBlock& block, void* to, int64_t numel,
                             const void* const* slices, int count) {
  const Grid grid = grid_of(to, numel, slices, count, dtype_bytes(block.slice_dtype),
                            dtype_bytes(block.output_dtype));
  // A block without vectors is all tail, shared by its tiles.
  const uint64_t tiles =
      divide_up(grid.vectors > 0 ? grid.vectors : numel, list_.head.tile_vectors);
  uint64_t* words = begin_block(kAccumulateWords + count, tiles, to, numel);
  words[kSlices] = static_cast<uint64_t>(count) | static_cast<uint64_t>(grid.head) << 32 |
                   (grid.misaligned ? kMisaligned : 0);
  words[kVectors] = static_cast<uint64_t>(grid.vectors);
  for (int s = 0; s < count; ++s) words[kAccumulateWords + s] = address(slices[s]);
}

bool ListBuilder::append(const AccumulateBlock& block, const AccumulateOptions& options) {
  const auto count = static_cast<int>(block.slices.size());
  const bool pads = block.pad_numel > 0 && !options.add_to_output;
  const int words =
      (block.numel > 0 ? kAccumulateWords + count : 0) + (pads ? kAccumulateWords : 0);
  if (words_ + words > kListWords) return false;
  set_options(block.output_dtype, options);
  if (block.numel > 0) append_sum(block, block.output, block.numel, block.slices.data(), count);
  if (pads) {
    char* behind = static_cast<char*>(block.output) + block.numel * dtype_bytes(block.output_dtype);
    append_sum(block, behind, block.pad_numel, nullptr, 0);
  }
  return true;
}

bool ListBuilder::append(const CastBlock& block) {
  if (block.numel <= 0) return true;
  if (words_ + kCastWords > kListWords) return false;
  const int64_t numel = vector_numel(static_cast<int>(dtype_bytes(block.from_dtype)),
                                     static_cast<int>(dtype_bytes(block.to_dtype)));
  uint64_t* words =
      begin_block(kCastWords, divide_up(block.numel, int64_t{kThreads} * kCastUnroll * numel),
                  block.to, block.numel);
  words[kFrom] = address(block.from);
  return true;
}

bool ListBuilder::append(const CopyBlock& block) {
  if (block.rows <= 0 || block.row_bytes <= 0) return true;
  if (words_ + kPackWords > kListWords) return false;
  CopyBlock whole = block;
  if (whole.rows > 1 && whole.to_pitch == whole.row_bytes && whole.from_pitch == whole.row_bytes) {
    whole.row_bytes *= whole.rows;  // no gaps: one long row
    whole.rows = 1;
  }
  if (whole.rows == 1) whole.to_pitch = whole.from_pitch = 0;
  const uint64_t all =
      address(whole.to) | address(whole.from) | static_cast<uint64_t>(whole.row_bytes) |
      static_cast<uint64_t>(whole.to_pitch) | static_cast<uint64_t>(whole.from_pitch);
  const bool fits = all % kPackBytes == 0;
  const int64_t units = (whole.row_bytes / kPackBytes + (fits ? 0 : 2)) * whole.rows;
  uint64_t* words = begin_block(kPackWords, divide_up(units, int64_t{kThreads} * kPackUnroll),
                                whole.to, whole.row_bytes);
  words[kFrom] = address(whole.from);
  words[kRows] = static_cast<uint64_t>(whole.rows) | (fits ? kFits16 : 0);
  words[kToPitch] = static_cast<uint64_t>(whole.to_pitch);
  words[kFromPitch] = static_cast<uint64_t>(whole.from_pitch);
  return true;
}

bool ListBuilder::append_multicast(const ReadAddBlock& block, const AccumulateOptions& options) {
  if (block.numel <= 0) return true;
  if (words_ + kCastWords > kListWords) return false;
  set_options(block.output_dtype, options);
  uint64_t* words =
      begin_block(kCastWords, divide_up(block.numel, int64_t{kThreads} * kMulticastUnroll * 4),
                  block.output, block.numel);
  words[kFrom] = address(block.from);
  return true;
}

Status can_accumulate(DType slice, DType output, const AccumulateOptions& options) {
  if (!is_small_float(slice) || !is_small_float(output)) {
    return {ErrorKind::kUnsupported, std::string("accumulate on CUDA: cannot add ") +
                                         dtype_name(slice) + " slices into " + dtype_name(output) +
                                         "; bf16, fp16 and fp32 are offered"};
  }
  if (options.op != ReduceOp::kSum) {
    return {ErrorKind::kUnsupported, "accumulate on CUDA: sums only, no MIN or MAX"};
  }
  return Status::ok();
}

Status can_cast(DType from, DType to) {
  const auto fits = [](DType dtype) { return is_small_float(dtype) || dtype == DType::kFloat64; };
  if (fits(from) && fits(to)) return Status::ok();
  return {ErrorKind::kUnsupported, std::string("cast on CUDA: from ") + dtype_name(from) + " to " +
                                       dtype_name(to) + " is not offered"};
}

std::string accumulate_kernel(DType slice) {
  return std::string("accumulate_") + dtype_name(slice);
}
std::string multicast_kernel() { return "multicast_combine"; }
std::string cast_kernel(DType from, DType to) {
  return std::string("cast_") + dtype_name(from) + "_" + dtype_name(to);
}
std::string pack_kernel() { return "pack"; }

}  // namespace tide::cuda
