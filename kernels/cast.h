// Changes the element type of a run of elements: fp32, bf16, fp16 and fp64 to each other, rounded
// once to nearest, ties to even (fp64 to a 16-bit type goes through fp32, as torch does). The same
// type: a copy. float_bits.h says what becomes of NaNs. Pointers need no alignment; source and
// destination do not overlap.
#pragma once

#include "backend/base/status.h"
#include "kernels/cpu_level.h"
#include "transports/fabric.h"

namespace tide {

// kUnsupported for other types.
Status cast_block(const CastBlock& block, CpuLevel level = best_cpu_level());

}  // namespace tide
