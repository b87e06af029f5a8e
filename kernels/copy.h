// Moves bytes on the processor: rectangles, from anywhere to anywhere. Source and destination do
// not overlap.
//
// Large rows leave by non-temporal stores (they do not pull the destination into the cache first,
// which saves a third of the memory traffic); small ones by memcpy. The call ends with a fence for
// the former, so either way a later release store of the calling thread covers the bytes. Other
// side: whoever loads that store's value with acquire (a fabric's signal and wait).
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
