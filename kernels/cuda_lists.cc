#include "kernels/cuda_lists.h"

#include <algorithm>

namespace tide::cuda {
namespace {

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

uint64_t divide_up(int64_t value, int64_t by) { return static_cast<uint64_t>((value + by - 1) / by); }

bool is_small_float(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32;
}

std::string suffix(bool is_short) { return is_short ? "_short" : "_long"; }

// Where the vectors of a sum lie: from the first element at which the output's vectors are aligned and, if one exists,
// the slices' too. Without any: slices are shifted, and a vector's room stays free at both ends.
struct Grid {
  int64_t head = 0;
  int64_t vectors = 0;
  bool misaligned = false;
};

Grid grid_of(const void* to, int64_t numel, const void* const* slices, int count, int64_t slice_bytes,
             int64_t output_bytes) {
  const int64_t vector_numel = kVectorBytes / slice_bytes;
  const auto output_step = static_cast<uint64_t>(std::min<int64_t>(16, vector_numel * output_bytes));
  Grid grid;
  if (address(to) % static_cast<uint64_t>(output_bytes) != 0) return {numel, 0, false};
  const auto slices_fit = [&](int64_t head) {
    return std::all_of(slices, slices + count, [&](const void* slice) {
      return (address(slice) + static_cast<uint64_t>(head * slice_bytes)) % kVectorBytes == 0;
    });
  };
  int64_t first = -1;
  for (int64_t head = 0; head < vector_numel; ++head) {
    if ((address(to) + static_cast<uint64_t>(head * output_bytes)) % output_step != 0) continue;
    if (first < 0) first = head;
    if (slices_fit(head)) {
      first = head;
      break;
    }
  }
  grid.head = first;
  grid.misaligned = !slices_fit(first);
  int64_t last = numel;
  if (grid.misaligned) {
    grid.head += vector_numel;
    last -= vector_numel;
  }
  grid.vectors = std::max<int64_t>(0, (last - grid.head) / vector_numel);
  if (grid.vectors == 0) return {0, 0, false};
  return grid;
}

}  // namespace

void ListBuilder::clear() {
  list_.head = {};
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
  uint32_t flags = output == DType::kFloat32 ? kOutputFp32 : output == DType::kBFloat16 ? kOutputBf16 : kOutputFp16;
  if (options.add_to_output) flags |= kAddToOutput;
  list_.head.flags = flags;
}

void ListBuilder::append_sum(const AccumulateBlock& block, void* to, int64_t numel, const void* const* slices,
                             int count) {
  const Grid grid =
      grid_of(to, numel, slices, count, dtype_bytes(block.slice_dtype), dtype_bytes(block.output_dtype));
  const uint64_t tiles = grid.vectors > 0 ? divide_up(grid.vectors, kThreads) : divide_up(numel, kThreads);
  uint64_t* words = begin_block(kAccumulateWords + count, tiles, to, numel);
  // A head that fills the block is a tail: the tail is what all tiles share.
  words[kSlices] = static_cast<uint64_t>(count) | (grid.vectors > 0 ? static_cast<uint64_t>(grid.head) << 32 : 0) |
                   (grid.misaligned ? kMisaligned : 0);
  words[kVectors] = static_cast<uint64_t>(grid.vectors);
  for (int s = 0; s < count; ++s) words[kAccumulateWords + s] = address(slices[s]);
  list_.head.most_slices = std::max(list_.head.most_slices, static_cast<uint32_t>(count));
}

bool ListBuilder::append(const AccumulateBlock& block, const AccumulateOptions& options) {
  const auto count = static_cast<int>(block.slices.size());
  const bool pads = block.pad_numel > 0 && !options.add_to_output;
  const int words = (block.numel > 0 ? kAccumulateWords + count : 0) + (pads ? kAccumulateWords : 0);
  if (words_ + words > kLongWords) return false;
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
  if (words_ + kCastWords > kLongWords) return false;
  const int64_t numel = cast_numel(static_cast<int>(dtype_bytes(block.from_dtype)), static_cast<int>(dtype_bytes(block.to_dtype)));
  uint64_t* words = begin_block(kCastWords, divide_up(block.numel, int64_t{kThreads} * kCastUnroll * numel), block.to, block.numel);
  words[kFrom] = address(block.from);
  return true;
}

bool ListBuilder::append(const CopyBlock& block) {
  if (block.rows <= 0 || block.row_bytes <= 0) return true;
  if (words_ + kPackWords > kLongWords) return false;
  CopyBlock whole = block;
  if (whole.rows > 1 && whole.to_pitch == whole.row_bytes && whole.from_pitch == whole.row_bytes) {
    whole.row_bytes *= whole.rows;  // no gaps: one long row
    whole.rows = 1;
  }
  if (whole.rows == 1) whole.to_pitch = whole.from_pitch = 0;
  const uint64_t all = address(whole.to) | address(whole.from) | static_cast<uint64_t>(whole.row_bytes) |
                       static_cast<uint64_t>(whole.to_pitch) | static_cast<uint64_t>(whole.from_pitch);
  const bool fits = all % kPackBytes == 0;
  const int64_t units = (whole.row_bytes / kPackBytes + (fits ? 0 : 2)) * whole.rows;
  uint64_t* words = begin_block(kPackWords, divide_up(units, int64_t{kThreads} * kPackUnroll), whole.to, whole.row_bytes);
  words[kFrom] = address(whole.from);
  words[kRows] = static_cast<uint64_t>(whole.rows) | (fits ? kFits16 : 0);
  words[kToPitch] = static_cast<uint64_t>(whole.to_pitch);
  words[kFromPitch] = static_cast<uint64_t>(whole.from_pitch);
  return true;
}

bool ListBuilder::append_multicast(const void* multicast, void* output, int64_t numel, DType output_dtype,
                                   const AccumulateOptions& options) {
  if (numel <= 0) return true;
  if (words_ + kCastWords > kLongWords) return false;
  set_options(output_dtype, options);
  uint64_t* words = begin_block(kCastWords, divide_up(numel, int64_t{kThreads} * kMulticastUnroll * 4), output, numel);
  words[kFrom] = address(multicast);
  return true;
}

Status can_accumulate(DType slice, DType output, const AccumulateOptions& options) {
  if (!is_small_float(slice) || !is_small_float(output)) {
    return {ErrorKind::kUnsupported, std::string("accumulate on CUDA: cannot add ") + dtype_name(slice) +
                                         " slices into " + dtype_name(output) + "; bf16, fp16 and fp32 are offered"};
  }
  if (options.op != ReduceOp::kSum) {
    return {ErrorKind::kUnsupported, "accumulate on CUDA: sums only, no MIN or MAX"};
  }
  return Status::ok();
}

Status can_cast(DType from, DType to) {
  const auto fits = [](DType dtype) { return is_small_float(dtype) || dtype == DType::kFloat64; };
  if (fits(from) && fits(to)) return Status::ok();
  return {ErrorKind::kUnsupported, std::string("cast on CUDA: from ") + dtype_name(from) + " to " + dtype_name(to) +
                                       " is not offered"};
}

std::string accumulate_kernel(DType slice, bool is_short) {
  return std::string("accumulate_") + dtype_name(slice) + suffix(is_short);
}
std::string multicast_kernel(bool is_short) { return "multicast" + suffix(is_short); }
std::string cast_kernel(DType from, DType to, bool is_short) {
  return std::string("cast_") + dtype_name(from) + "_" + dtype_name(to) + suffix(is_short);
}
std::string pack_kernel(bool is_short) { return "pack" + suffix(is_short); }

}  // namespace tide::cuda
