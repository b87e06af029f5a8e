// Sum and cast in steps of 16 lanes. The target pragma stands after all standard headers: nothing
// of theirs may be compiled for this level, as the linker could keep that copy for machines without
// it.
#include "kernels/vector_levels.h"

#if defined(__x86_64__)
// The header starts unmasked results from a register of any content, which the compiler reports
// where it is inlined.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")

namespace tide {
namespace {

struct Avx512Lanes {
  using Vector = __m512;
  static constexpr int64_t kLanes = 16;

  static Vector set(float value) { return _mm512_set1_ps(value); }
  static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static void fence() { _mm_sfence(); }

  static Vector canonical(Vector value) {
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_mov_ps(value, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
  }

  template <DType kType>
  static Vector load(const char* from) {
    if constexpr (kType == DType::kFloat32) {
      return _mm512_loadu_ps(from);
    } else {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      if constexpr (kType == DType::kFloat16) return _mm512_cvtph_ps(half);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
  }

  template <DType kType, bool kStream>
  static void store(char* to, Vector value) {
    if constexpr (kType == DType::kFloat32) {
      if constexpr (kStream) {
        _mm512_stream_ps(reinterpret_cast<float*>(to), value);
      } else {
        _mm512_storeu_ps(to, value);
      }
    } else {
      __m256i half;
      if constexpr (kType == DType::kFloat16) {
        half = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      } else {
        half = round_bf16(value);
      }
      if constexpr (kStream) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), half);
      } else {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
      }
    }
  }

 private:
  // Not the processor's own bf16 conversion: that one flushes denormals.
  static __m256i round_bf16(Vector value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i safe = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(safe, 16));
  }
};

}  // namespace
}  // namespace tide

#include "kernels/vector_loops.h"

namespace tide {

SumFunction sum_avx512(DType slice, DType output) { return choose_sum<Avx512Lanes>(slice, output); }
CastFunction cast_avx512(DType from, DType to) { return choose_cast<Avx512Lanes>(from, to); }

}  // namespace tide

#pragma GCC pop_options
#endif
