// Device functions that the kernels share: loads and stores of 2 to 16 bytes at any alignment, and
// the conversions of float_bits.h, bit for bit. All inline PTX of the project is in this file.
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda_params.h"

namespace tide::cuda {

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

constexpr uint32_t kQuietNan = 0x7fc00000u;

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(BFloat value) {
  return __uint_as_float(uint32_t{value.bits} << 16);
}
__device__ inline float to_float(Half value) {
  const uint32_t bits = value.bits;
  if ((bits & 0x7fffu) > 0x7c00u) {  // the hardware's conversion would drop the payload
    return __uint_as_float(((bits & 0x8000u) << 16) | 0x7fc00000u | ((bits & 0x3ffu) << 13));
  }
  return __half2float(__ushort_as_half(value.bits));
}
__device__ inline float to_float(double value) {
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(value));
  if ((bits & 0x7fffffffffffffffull) > 0x7ff0000000000000ull) {
    return __uint_as_float(static_cast<uint32_t>(bits >> 63) << 31 | 0x7fc00000u |
                           (static_cast<uint32_t>(bits >> 29) & 0x7fffffu));
  }
  return __double2float_rn(value);
}

template <class T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline BFloat from_float<BFloat>(float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
}
template <>
__device__ inline Half from_float<Half>(float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return {
        static_cast<uint16_t>(((bits >> 16) & 0x8000u) | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
  }
  return {__half_as_ushort(__float2half_rn(value))};
}
template <>
__device__ inline double from_float<double>(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return __longlong_as_double(static_cast<long long>(
        (uint64_t{bits >> 31} << 63) | 0x7ff8000000000000ull | (uint64_t{bits & 0x3fffffu} << 29)));
  }
  return static_cast<double>(value);
}

// In sums the payload of a NaN does not matter: the result is made canonical.
__device__ inline float sum_float(float value) { return value; }
__device__ inline float sum_float(BFloat value) { return to_float(value); }
__device__ inline float sum_float(Half value) { return __half2float(__ushort_as_half(value.bits)); }

// The elements of a word, lowest first; one instruction each.
template <class T>
__device__ void unpack(uint32_t word, float* values);
template <>
__device__ inline void unpack<float>(uint32_t word, float* values) {
  values[0] = __uint_as_float(word);
}
template <>
__device__ inline void unpack<BFloat>(uint32_t word, float* values) {
  values[0] = __uint_as_float(word << 16);
  values[1] = __uint_as_float(word & 0xffff0000u);
}
template <>
__device__ inline void unpack<Half>(uint32_t word, float* values) {
  __half2 pair;
  memcpy(&pair, &word, 4);
  values[0] = __low2float(pair);
  values[1] = __high2float(pair);
}

__device__ inline bool poisoned(const ListHead& head) {
  return head.poison != nullptr && *reinterpret_cast<const volatile uint32_t*>(head.poison) != 0;
}

__device__ inline float canonical(float value) {
  return value != value ? __uint_as_float(kQuietNan) : value;
}

// Unsigned types by size, for whole accesses. Streaming: every byte is used once.
template <int kBytes>
struct Word;
template <>
struct Word<1> {
  using Type = unsigned char;
};
template <>
struct Word<2> {
  using Type = unsigned short;
};
template <>
struct Word<4> {
  using Type = unsigned int;
};
template <>
struct Word<8> {
  using Type = uint2;
};
template <>
struct Word<16> {
  using Type = uint4;
};

template <int kBytes>
__device__ inline typename Word<kBytes>::Type load_streaming(const char* from) {
  return __ldcs(reinterpret_cast<const typename Word<kBytes>::Type*>(from));
}
template <int kBytes>
__device__ inline void store_streaming(char* to, typename Word<kBytes>::Type value) {
  __stcs(reinterpret_cast<typename Word<kBytes>::Type*>(to), value);
}

// kBytes from an address that is a multiple of kStep only.
template <int kBytes, int kStep>
__device__ inline void load_steps(const char* from, typename Word<kBytes>::Type* value) {
  using Step = typename Word<kStep>::Type;
  Step steps[kBytes / kStep];
#pragma unroll
  for (int i = 0; i < kBytes / kStep; ++i) steps[i] = load_streaming<kStep>(from + i * kStep);
  memcpy(value, steps, kBytes);
}

// kBytes from any address.
template <int kBytes>
__device__ inline typename Word<kBytes>::Type load_anywhere(const char* from) {
  typename Word<kBytes>::Type value;
  const auto low = reinterpret_cast<uintptr_t>(from);
  if (low % kBytes == 0) return load_streaming<kBytes>(from);
  if constexpr (kBytes > 8) {
    if (low % 8 == 0) {
      load_steps<kBytes, 8>(from, &value);
      return value;
    }
  }
  if constexpr (kBytes > 4) {
    if (low % 4 == 0) {
      load_steps<kBytes, 4>(from, &value);
      return value;
    }
  }
  if constexpr (kBytes > 2) {
    if (low % 2 == 0) {
      load_steps<kBytes, 2>(from, &value);
      return value;
    }
  }
  load_steps<kBytes, 1>(from, &value);
  return value;
}

// One element at any address.
template <class T>
__device__ inline T load_element(const char* from) {
  const auto word = load_anywhere<sizeof(T)>(from);
  T value;
  memcpy(&value, &word, sizeof(T));
  return value;
}
template <class T>
__device__ inline void store_element(char* to, T value) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(T) == 0) {
    memcpy(to, &value, sizeof(T));
    return;
  }
  unsigned char bytes[sizeof(T)];
  memcpy(bytes, &value, sizeof(T));
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) to[i] = static_cast<char>(bytes[i]);
}

// Elements before the first whole vector of an output; its address is a multiple of the element
// size.
template <class T, int kNumel>
__device__ inline int64_t head_numel(const char* to) {
  constexpr uint32_t kBytes = kNumel * sizeof(T);
  return static_cast<int64_t>((kBytes - reinterpret_cast<uintptr_t>(to) % kBytes) % kBytes /
                              sizeof(T));
}

// 8 or 16 bytes from any address, as one or two aligned words; touches less than a word before and
// behind them.
template <int kBytes>
__device__ inline typename Word<kBytes>::Type load_shifted(const char* from) {
  constexpr int kWords = kBytes / 4;
  const uint32_t shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) % kBytes);
  const char* floor = from - shift;
  const auto low = load_streaming<kBytes>(floor);
  if (shift == 0) return low;
  const auto high = load_streaming<kBytes>(floor + kBytes);
  uint32_t both[2 * kWords];
  memcpy(both, &low, kBytes);
  memcpy(both + kWords, &high, kBytes);
  uint32_t from_first[kWords + 1];  // from the word that holds the first byte on
#pragma unroll
  for (int w = 0; w <= kWords; ++w) {
    from_first[w] = both[w];
#pragma unroll
    for (int skip = 1; skip < kWords; ++skip) {
      if (shift / 4 == skip) from_first[w] = both[w + skip];
    }
  }
  uint32_t result[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w)
    result[w] = __funnelshift_r(from_first[w], from_first[w + 1], shift % 4 * 8);
  typename Word<kBytes>::Type value;
  memcpy(&value, result, kBytes);
  return value;
}

#if __CUDA_ARCH__ >= 900
// The sum over all members of a multicast object, formed by the switch. `from` is a multicast
// address.
__device__ inline float4 multicast_sum_4(const char* from) {
  float4 sum;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(sum.x), "=f"(sum.y), "=f"(sum.z), "=f"(sum.w)
               : "l"(from)
               : "memory");
  return sum;
}
__device__ inline float multicast_sum(const char* from) {
  float sum;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.f32 %0, [%1];"
               : "=f"(sum)
               : "l"(from)
               : "memory");
  return sum;
}
#endif

}  // namespace tide::cuda
