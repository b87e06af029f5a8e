// Conversions between fp32 and the two 16-bit float formats, one element at a time: the definition
// that every vector level repeats bit for bit. Rounding is to nearest, ties to even; denormals are
// kept; overflow gives infinity. What becomes of a NaN:
//
//   to bf16    0x7fc0
//   to fp16    its sign and upper payload, quiet
//   from bf16  the same bits
//   from fp16  its sign and payload, quiet
//
// For sources without target pragmas only: these functions are inline, and the linker keeps one
// copy of each.
#pragma once

#include <bit>
#include <cstdint>

namespace tide {

inline constexpr uint32_t kQuietNanBits = 0x7fc00000u;

inline float bf16_to_fp32(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

inline uint16_t fp32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float fp16_to_fp32(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0x1f) {
    const uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | (mantissa << 13));
  }
  if (exponent == 0) {
    if (mantissa == 0) return std::bit_cast<float>(sign);
    const int shift = std::countl_zero(mantissa) - 21;  // brings the leading one to bit 10
    const uint32_t fp32_exponent = static_cast<uint32_t>(113 - shift);
    return std::bit_cast<float>(sign | (fp32_exponent << 23) |
                                (((mantissa << shift) & 0x3ffu) << 13));
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

inline uint16_t fp32_to_fp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65536 and above
  if (magnitude >= 0x38800000u) {
    // Normal in fp16; a carry out of the mantissa is the next exponent, or infinity.
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
  // Below half of the least denormal.
  if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t shift = 126u - (magnitude >> 23);  // 14..24
  const uint32_t kept = mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1u);
  const uint32_t half = 1u << (shift - 1u);
  const uint32_t up = (rest > half || (rest == half && (kept & 1u) != 0)) ? 1u : 0u;
  return static_cast<uint16_t>(sign | (kept + up));
}

}  // namespace tide
