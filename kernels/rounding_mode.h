// Gives the calling thread IEEE arithmetic while it lives: round to nearest, denormals kept. A
// program may have set flush-to-zero (torch.set_flush_denormal does, and threads inherit it); sums
// must not depend on that.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tide {

class DefaultRoundingMode {
 public:
#if defined(__x86_64__)
  DefaultRoundingMode() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~DefaultRoundingMode() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kDefault = 0x1f80;  // all exceptions masked, nearest, no flush
  unsigned saved_;
#else
  DefaultRoundingMode() {}
  ~DefaultRoundingMode() {}
#endif

 public:
  DefaultRoundingMode(const DefaultRoundingMode&) = delete;
  DefaultRoundingMode& operator=(const DefaultRoundingMode&) = delete;
};

}  // namespace tide
