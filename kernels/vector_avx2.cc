// Sum and cast in steps of 8 lanes. The target pragma stands after all standard headers: nothing of
// theirs may be compiled for this level, as the linker could keep that copy for machines without
// it.
#include "kernels/vector_levels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,f16c")

namespace tide {
namespace {

struct Avx2Lanes {
  using Vector = __m256;
  static constexpr int64_t kLanes = 8;

  static Vector set(float value) { return _mm256_set1_ps(value); }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  static void fence() { _mm_sfence(); }

  static Vector canonical(Vector value) {
    const Vector nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    return _mm256_blendv_ps(value, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), nan);
  }

  template <DType kType>
  static Vector load(const char* from) {
    if constexpr (kType == DType::kFloat32) {
      return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
    } else {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      if constexpr (kType == DType::kFloat16) return _mm256_cvtph_ps(half);
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
  }

  template <DType kType, bool kStream>
  static void store(char* to, Vector value) {
    if constexpr (kType == DType::kFloat32) {
      if constexpr (kStream) {
        _mm256_stream_ps(reinterpret_cast<float*>(to), value);
      } else {
        _mm256_storeu_ps(reinterpret_cast<float*>(to), value);
      }
    } else {
      __m128i half;
      if constexpr (kType == DType::kFloat16) {
        half = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      } else {
        half = round_bf16(value);
      }
      if constexpr (kStream) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to), half);
      } else {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), half);
      }
    }
  }

 private:
  static __m128i round_bf16(Vector value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const Vector nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    const __m256i safe = _mm256_castps_si256(_mm256_blendv_ps(
        _mm256_castsi256_ps(rounded), _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), nan));
    const __m256i shifted = _mm256_srli_epi32(safe, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(shifted), _mm256_extracti128_si256(shifted, 1));
  }
};

}  // namespace
}  // namespace tide

#include "kernels/vector_loops.h"

namespace tide {

SumFunction sum_avx2(DType slice, DType output) { return choose_sum<Avx2Lanes>(slice, output); }
CastFunction cast_avx2(DType from, DType to) { return choose_cast<Avx2Lanes>(from, to); }

}  // namespace tide

#pragma GCC pop_options
#endif
