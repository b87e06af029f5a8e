// The sum of a reduce, on the processor: adds the ranks' slices of a shard and writes or adds the
// result.
//
// bf16, fp16, fp32 slices to any of these: added in fp32 in slice order, times float(scale), in add
// mode plus the output read as fp32, rounded once to the output type. No contraction.
//
// fp64 to fp64: the same in fp64. Integers to the same type: exact, modulo 2^bits; the scale must
// be 1.
//
// MIN, MAX: the first slice that holds the least or greatest value wins (so -0 and +0 keep their
// order); a NaN in any slice makes the result NaN. No scale, no add mode.
//
// A NaN result is always the canonical quiet NaN (fp32 0x7fc00000, bf16 0x7fc0, fp16 0x7e00): its
// payload would otherwise depend on operand order, which compilers and machines choose differently.
//
// Pointers need no alignment. Slices and output do not overlap, except that a slice may be the
// output itself where both types have the same size. The calling thread's flush-to-zero and
// rounding modes do not change the result.
#pragma once

#include "backend/base/status.h"
#include "kernels/cpu_level.h"
#include "transports/fabric.h"

namespace tide {

// kInvalidUse or kUnsupported, before anything is written, for types or options that do not go
// together.
Status accumulate_block(const AccumulateBlock& block, const AccumulateOptions& options,
                        CpuLevel level = best_cpu_level());

}  // namespace tide
