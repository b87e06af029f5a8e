// Writes the lists that the CUDA kernels walk (cuda_params.h) from the blocks of fabric.h. Host
// code, no driver: it builds and is tested everywhere.
//
// A list has room for some hundreds of blocks; append returns false when the next block does not
// fit, and the caller launches what it has and begins anew.
#pragma once

#include <string>

#include "backend/base/status.h"
#include "kernels/cuda_params.h"
#include "transports/fabric.h"

namespace tide::cuda {

class ListBuilder {
 public:
  ListBuilder() { clear(); }
  void clear();
  bool empty() const { return list_.head.blocks == 0; }
  void* parameters() { return &list_; }
  const List& list() const { return list_; }
  uint64_t tiles() const { return tiles_; }
  // CTAs worth launching, at most `most`.
  unsigned ctas(unsigned most) const {
    return static_cast<unsigned>(tiles_ < most ? tiles_ : most);
  }
  // Sums, before the first append: tiles of this list are small, so that little work still reaches
  // all CTAs.
  void use_small_tiles() { list_.head.tile_vectors = kSmallTileVectors; }
  void set_poison(const uint32_t* word) { list_.head.poison = word; }

  // The block's sum and, in write mode, the zeros behind it. One list has one pair of types and one
  // set of options.
  bool append(const AccumulateBlock& block, const AccumulateOptions& options);
  bool append(const CastBlock& block);
  // Empty rectangles vanish.
  bool append(const CopyBlock& block);
  bool append_multicast(const ReadAddBlock& block, const AccumulateOptions& options);

 private:
  void set_options(DType output, const AccumulateOptions& options);
  uint64_t* begin_block(int words, uint64_t tiles, void* to, int64_t numel);
  void append_sum(const AccumulateBlock& block, void* to, int64_t numel, const void* const* slices,
                  int count);

  List list_;
  int words_ = 0;
  uint64_t tiles_ = 0;
};

// OK when the kernels can add this pair of types with these options; else why not.
Status can_accumulate(DType slice, DType output, const AccumulateOptions& options);
// Likewise for a cast between two different types.
Status can_cast(DType from, DType to);

// "accumulate_bf16" ...
std::string accumulate_kernel(DType slice);
std::string multicast_kernel();
std::string cast_kernel(DType from, DType to);
std::string pack_kernel();

}  // namespace tide::cuda
