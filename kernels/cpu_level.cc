#include "kernels/cpu_level.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tide {
namespace {

#if defined(__x86_64__)
// Not every compiler knows this one by name.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

CpuLevel ask_processor() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && has_f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512) return CpuLevel::kAvx512;
  if (avx2) return CpuLevel::kAvx2;
#endif
  return CpuLevel::kBaseline;
}

}  // namespace

CpuLevel best_cpu_level() {
  static const CpuLevel level = ask_processor();
  return level;
}

std::vector<CpuLevel> usable_cpu_levels() {
  std::vector<CpuLevel> levels;
  for (int i = 0; i <= static_cast<int>(best_cpu_level()); ++i) {
    levels.push_back(static_cast<CpuLevel>(i));
  }
  return levels;
}

const char* cpu_level_name(CpuLevel level) {
  switch (level) {
    case CpuLevel::kBaseline:
      return "baseline";
    case CpuLevel::kAvx2:
      return "avx2";
    case CpuLevel::kAvx512:
      return "avx512";
  }
  return "unknown";
}

}  // namespace tide
