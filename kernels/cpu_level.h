// Which vector instructions a kernel may use. One binary holds every level and runs on every
// machine: the level is chosen when a kernel is called, never when it is compiled. All levels give
// the same bits.
#pragma once

#include <cstdint>
#include <vector>

namespace tide {

enum class CpuLevel : uint8_t {
  kBaseline,  // plain C++, any machine
  kAvx2,      // AVX2 and F16C
  kAvx512,    // AVX-512 F, BW, DQ and VL
};

// The highest level that this machine has. Asked of the processor once.
CpuLevel best_cpu_level();

// Every level that this machine has, lowest first.
std::vector<CpuLevel> usable_cpu_levels();

// "baseline", "avx2", "avx512".
const char* cpu_level_name(CpuLevel level);

}  // namespace tide
