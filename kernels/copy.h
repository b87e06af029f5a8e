// Moves bytes on the processor: rectangles, from anywhere to anywhere. Source and destination do
// not overlap.
//
// Large rows leave by non-temporal stores (they do not pull the destination into the cache first,
// which saves a third of the memory traffic); small ones by memcpy. Either way the bytes are
// ordered before any later store of the calling thread when the call returns: what a peer reads
// after it has seen a later signal is complete.
#pragma once

#include <cstdint>

#include "kernels/cpu_level.h"
#include "transports/fabric.h"

namespace tide {

// Rows of at least this many bytes, in a block of at least kStreamBlockBytes, are stored past the
// cache.
inline constexpr int64_t kStreamRowBytes = 1024;
inline constexpr int64_t kStreamBlockBytes = 64 << 10;

void copy_block(const CopyBlock& block, CpuLevel level = best_cpu_level());

}  // namespace tide
